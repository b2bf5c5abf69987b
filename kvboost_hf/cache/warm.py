"""Computing K/V ahead of the first request: of the start of prompts, and of documents that may stand anywhere."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.admission import blend_reason
from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.live.ledger import offer_content
from kvboost_hf.cache.planning.moved import Measure
from kvboost_hf.cache.planning.report import ReuseReport, Tally
from kvboost_hf.cache.prompt.chats import ChatTemplate, is_chat, text_tokenizer, why_not_stored
from kvboost_hf.cache.prompt.token_log import one_row
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore, Put
from kvboost_hf.cache.store.settings import Starts, Texts, WarmSettings
from kvboost_hf.compat import input_device, known_reason, probe_reason, rope_regime, run_model
from kvboost_hf.config import ReusePolicy
from kvboost_hf.errors import StoreFullError

Progress = Callable[[int, int], None]  # tokens done, and tokens in all

_TOKENS_PER_FORWARD = 2048  # bounds the activations of a long text


@torch.no_grad()
def warm(
    model: PreTrainedModel,
    store: ChunkStore,
    text_or_ids: Starts | None,
    documents: Sequence[Texts] | None,
    prefix: Starts | None,
    settings: WarmSettings,
) -> ReuseReport:
    """Compute and store K/V, as `ChunkStore.warm` is asked to."""
    if (text_or_ids is None) == (documents is None) or (prefix is not None and documents is None):
        raise ValueError("`warm` takes either `text_or_ids`, or `documents` and perhaps the `prefix` before them.")
    start = prefix if text_or_ids is None else text_or_ids
    given = [name for name in ("tools", "chat_template_kwargs") if getattr(settings, name)]
    if given and not is_chat(start):
        raise ValueError(
            f"`{given[0]}` needs messages, beside which the chat template puts it, got {type(start).__name__}. Pass "
            "[{'role': 'system', 'content': text}]."
        )
    if documents is None:
        assert text_or_ids is not None
        return _warm_text(model, store, text_or_ids, settings)
    if settings.live_quant is not None:
        raise ValueError(
            "`live_quant` must be None with `documents`, for codes cannot be moved, got a "
            f"{type(settings.live_quant).__name__}. Make a store with a `codec` in its place."
        )
    return _warm_documents(model, store, documents, prefix, settings)


def _warm_text(model: PreTrainedModel, store: ChunkStore, text_or_ids: Starts, settings: WarmSettings) -> ReuseReport:
    ids, reason = _as_start(text_or_ids, settings)
    cache = ChunkReuseCache(model, store, _exact(settings.policy), settings.salt, live_quant=settings.live_quant)
    done = _Done(settings.progress, ids.shape[1])
    # A text that is longer than what its rotary frequencies were trained for has others from its first token on.
    _run(model, ids, cache, ids.shape[1] if rope_regime(model, ids.shape[1]) else _TOKENS_PER_FORWARD, done)
    pinned_before = store.pinned_keys()
    _require_room(
        store, cache.store_all(pinned=settings.pin), settings.pin, pinned_before, f"A text of {ids.shape[1]} tokens"
    )
    return replace(cache.report, start_reason=reason)


def _warm_documents(
    model: PreTrainedModel,
    store: ChunkStore,
    documents: Sequence[Texts],
    prefix: Starts | None,
    settings: WarmSettings,
) -> ReuseReport:
    policy, tokenizer, pin, salt = _exact(settings.policy), settings.tokenizer, settings.pin, settings.salt
    root = store.root(salt, read_all=policy.weights_check == "full")
    assert root is not None
    in_training = ModelState.of(model).fingerprint.reason_in_training(model)
    if reason := known_reason(model) or in_training or probe_reason(model) or blend_reason(model, Measure.NOTHING):
        raise ValueError(
            f"`documents` need a model whose K/V can be moved, but {reason}. Warm what prompts start with: "
            "store.warm(text_or_ids)."
        )
    if isinstance(documents, str):
        raise ValueError("`documents` must be a sequence of texts or ids, got one text. Pass [text].")
    if is_chat(documents) or any(map(is_chat, documents)):
        raise ValueError(
            "`documents` must be texts or ids, which may stand anywhere in prompts, got messages. Pass their "
            "contents; messages that prompts start with are `text_or_ids` or `prefix`."
        )
    rows = [_as_ids(document, tokenizer, add_special_tokens=False) for document in documents]
    pinned_before = store.pinned_keys()
    before = ChunkReuseCache(model, store, policy, salt)
    start, tally = 0, Tally()
    opening, reason = _as_start(prefix, settings) if prefix is not None else (None, None)
    done = _Done(settings.progress, sum(ids.shape[1] for ids in [*rows, *([opening] if opening is not None else [])]))
    if opening is not None:
        ids = opening
        start = ids.shape[1]
        _run(model, ids, before, _TOKENS_PER_FORWARD, done)
        _require_room(store, before.store_all(pinned=pin), pin, pinned_before, f"A prefix of {start} tokens")
        _count(tally, before.report)
        history = ids.cpu().numpy().astype(np.int64)[0]
    else:
        history = np.empty(0, dtype=np.int64)
    unstored = store.without_room()
    for n, row in enumerate(rows):
        tokens = np.concatenate([history, row.cpu().numpy()[0]])
        results = offer_content(store, root, tokens, start, lambda at, stop: (0, None), pinned=pin)
        if set(results) <= {Put.PRESENT, Put.TOO_SHORT}:
            tally.prompt += row.shape[1]
            tally.tiers["ram"] += row.shape[1]
            done.add(row.shape[1])
            continue
        cache = before.fork()
        cache.store = unstored
        _run(model, row, cache, _TOKENS_PER_FORWARD, done)
        results = cache.store_content(store, start, pinned=pin)
        _require_room(store, results, pin, pinned_before, f"Document {n} of {row.shape[1]} tokens")
        _count(tally, cache.report)
    return replace(tally.report(), start_reason=reason)


def _exact(policy: ReusePolicy | None) -> ReusePolicy:
    """A policy whose K/V is found by what `policy` is for, and computed in full."""
    return replace(policy, mode="exact", repair="auto") if policy is not None else ReusePolicy()


class _Done:
    """Counts tokens, and tells how far it is."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._tokens = progress, total, 0

    def add(self, tokens: int) -> None:
        """So many more."""
        self._tokens += tokens
        if self._progress is not None:
            self._progress(self._tokens, self._total)


def _run(
    model: PreTrainedModel, ids: torch.Tensor, cache: ChunkReuseCache, tokens_per_forward: int, done: _Done
) -> None:
    for part in torch.split(ids.to(input_device(model)), tokens_per_forward, dim=1):
        run_model(model, part, cache)
        done.add(part.shape[1])


def _count(tally: Tally, report: ReuseReport) -> None:
    tally.prompt += report.prompt_tokens
    tally.live += report.tier_tokens["live"]
    for tier, tokens in report.tier_tokens.items():
        if tier != "live":
            tally.tiers[tier] += tokens
    tally.forwarded += report.forwarded_tokens
    tally.bypass = tally.bypass or report.bypass_reason


def _require_room(store: ChunkStore, results: Iterable[Put], pin: bool, pinned_before: set[bytes], what: str) -> None:
    if pin and any(result in (Put.NO_ROOM, Put.NO_PARENT, Put.GONE) for result in results):
        store.unpin(store.pinned_keys() - pinned_before)
        raise StoreFullError(
            f"{what} does not fit into `max_bytes`={store.max_bytes} beside the {len(pinned_before)} chunks pinned "
            "already. Raise `max_bytes`, warm less, or pass `pin=False`."
        )


def _as_start(start: Starts, settings: WarmSettings) -> tuple[torch.Tensor, str | None]:
    """Ids [1, n] of what prompts start with, and why chats never begin with it, or not always."""
    tokenizer, arguments = settings.tokenizer, settings.chat_template_kwargs
    if is_chat(start):
        _require_tokenizer(tokenizer, "messages")
        found = ChatTemplate(tokenizer, tools=settings.tools, arguments=arguments).start(start)  # type: ignore[arg-type]
        ids, reason = _as_ids(found.ids.tolist(), None), found.reason
    else:
        ids = _as_ids(start, tokenizer)  # type: ignore[arg-type]
        reason = ChatTemplate(tokenizer).why_never(ids[0].tolist()) if tokenizer is not None else None
    return ids, why_not_stored(ids.shape[1]) or reason


def _require_tokenizer(tokenizer: Any, name: str) -> None:
    if tokenizer is None:
        what = "a text" if name == "text" else name
        raise ValueError(
            f"Warming {what} needs `tokenizer`: store.warm({name}, tokenizer=tokenizer), or pass its ids."
        )


def _as_ids(text_or_ids: Texts, tokenizer: Any, *, add_special_tokens: bool = True) -> torch.Tensor:
    if isinstance(text_or_ids, str):
        _require_tokenizer(tokenizer, "text")
        encode = text_tokenizer(tokenizer)
        text_or_ids = encode(text_or_ids, add_special_tokens=add_special_tokens)["input_ids"]
    are_texts = isinstance(text_or_ids, Sequence) and any(isinstance(each, str) for each in text_or_ids[:1])
    if isinstance(text_or_ids, Mapping) or are_texts:
        is_message = isinstance(text_or_ids, Mapping) and "role" in text_or_ids
        encoded = "[message]" if is_message else "['input_ids'] of it"
        raise _not_a_start(text_or_ids, encoded if isinstance(text_or_ids, Mapping) else "one text after the other")
    try:
        return one_row("`text_or_ids` must be a text or ids", text_or_ids, least=1)
    except TypeError as error:
        raise _not_a_start(text_or_ids, "one prompt after the other") from error


def _not_a_start(found: object, remedy: str) -> ValueError:
    kind = type(found).__name__
    return ValueError(f"`text_or_ids` must be a text, ids or a list of messages, got {kind}. Pass {remedy}.")
