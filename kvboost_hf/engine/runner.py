"""`CallRunner` runs the generate() calls of a `KVBoost`, one after the other, with a cache for each mode.

`call_options` checks the arguments of a call. A `Watch` follows it while it runs, and can end it.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import forks
from kvboost_hf.assisted.limits import end_tokens
from kvboost_hf.assisted.tree_decoding import TreeDecoding
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import CACHE, input_device
from kvboost_hf.config import ReusePolicy
from kvboost_hf.engine.prompts import Prompt
from kvboost_hf.engine.results import GenerationMode, GenerationResult
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.fields import require_bool
from kvboost_hf.old_names import refuse
from kvboost_hf.verify.correctness import require_plain

_log = logging.getLogger("kvboost_hf")
_OWN = (
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "generation_config",
    "past_key_values",
    "cache",
    "cache_implementation",
    "use_cache",
    "streamer",
    "assistant_model",
    "custom_generate",
    "num_beams",
    "num_return_sequences",
    "return_dict_in_generate",
)
_OF_ONE_ROW = ("stop_strings", "stopping_criteria")


class Watch(StoppingCriteria):
    """Notes when the first token is on the host, passes tokens on, and ends the call when it is told to.

    Unlike a streamer it may be used with several rows, assistants and trees of drafts.

    Attributes:
        once_a_round: Drafts may go on: no token decides when it ends a text, so that it need not be asked at each.

    Args:
        prompt_tokens: Columns of the prompt.
        streamer: Gets the tokens of the only row; None for nobody.
    """

    once_a_round = True

    def __init__(self, prompt_tokens: int, streamer: BaseStreamer | None = None) -> None:
        self.first_at: float | None = None  # by time.perf_counter()
        self._seen = prompt_tokens
        self._streamer = streamer
        self._cancelled = False

    def cancel(self) -> None:
        """End the call with the token that is being computed. Any thread may call it."""
        self._cancelled = True

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        if self._streamer is not None and input_ids.shape[1] > self._seen:
            self._streamer.put(input_ids[0, self._seen :].cpu())  # type: ignore[no-untyped-call]
            self._seen = input_ids.shape[1]
        if self.first_at is None:
            input_ids[0, -1].item()  # waits for the device
            self.first_at = time.perf_counter()
        done: Any = torch.full((len(input_ids),), self._cancelled, device=input_ids.device)
        return done  # type: ignore[no-any-return]


class CallRunner:
    """Runs the calls of one engine.

    Args:
        model: A causal language model in eval mode.
        tokenizer: The model's tokenizer.
        store: Where K/V is kept.
        policy: How stored K/V may be used.
        settings: `live_config` and `prefill_chunk_size` are used.
        assistant: Drafts tokens for calls of one row, a `TreeDecoding` without heads for several; None for no drafts.

    Attributes:
        lock: Held while a call runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        store: ChunkStore,
        policy: ReusePolicy,
        settings: EngineSettings,
        assistant: PreTrainedModel | TreeDecoding | None,
    ) -> None:
        self.lock, self._pid = forks.rlock(), os.getpid()
        self._model, self._tokenizer, self._assistant = model, tokenizer, assistant
        self._prefill_chunk_size = settings.prefill_chunk_size
        exact = ChunkReuseCache(
            model, store, replace(policy, mode="exact", repair="auto"), live_quant=settings.live_config
        )
        blend = exact if policy.mode == "exact" else ChunkReuseCache(model, store, policy)
        self._caches = {GenerationMode.PREFIX_CACHE: exact, GenerationMode.CHUNK_KV_REUSE: blend}
        self._said_no_drafts = False

    def run(
        self, rows: Sequence[Tokens], mode: GenerationMode, options: dict[str, Any], watch: Watch
    ) -> tuple[list[list[int]], ReuseReport]:
        """Call generate() for prompts; returns the new tokens of each row, and what was reused."""
        given = dict(options)
        if not given.setdefault("prefill_chunk_size", self._prefill_chunk_size):
            del given["prefill_chunk_size"]  # generate() does not take 0 for all at once
        if "stop_strings" in given:
            given["tokenizer"] = self._tokenizer
        cache = self._caches.get(mode)
        with self.lock:
            self._start_over_after_fork()
            if cache is None:
                require_plain(self._model)
            else:
                given |= {CACHE: cache, **self._drafts(len(rows))}
            answers = generate_rows(self._model, rows, self._pad(), watch, given)
            if cache is not None:
                return answers, cache.report
        tokens = sum(len(row) for row in rows)
        return answers, ReuseReport(prompt_tokens=tokens, forwarded_tokens=tokens)

    def _start_over_after_fork(self) -> None:
        """Another thread may have been in the middle of a call when this process was forked."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            for cache in {id(cache): cache for cache in self._caches.values()}.values():
                cache.reset()

    def stream(self, row: Tokens, mode: GenerationMode, options: dict[str, Any]) -> Iterator[str]:
        """Call generate() for a prompt; yields the text as it comes. Closing the iterator ends the call."""
        streamer = TextIteratorStreamer(self._tokenizer, skip_special_tokens=True)
        watch = Watch(len(row), streamer)

        def run() -> None:
            try:
                self.run([row], mode, options, watch)
                streamer.end()  # type: ignore[no-untyped-call]
            finally:  # whatever has failed, the tokenizer included, nobody waits for more
                streamer.text_queue.put(streamer.stop_signal)

        with ThreadPoolExecutor(max_workers=1) as thread:
            call = thread.submit(run)
            try:
                yield from filter(None, streamer)
            finally:
                watch.cancel()
            call.result()

    def results(
        self,
        prompts: Sequence[Prompt],
        rows: Sequence[Tokens],
        mode: GenerationMode,
        ran: tuple[list[list[int]], ReuseReport],
        began: float,
        watch: Watch,
    ) -> list[GenerationResult]:
        """The results of a call that has ended now, from what `run` returned; it began at `began` (perf_counter)."""
        assert watch.first_at is not None
        total_s, (answers, report) = time.perf_counter() - began, ran
        return [
            GenerationResult(
                mode=mode,
                prompt=prompt,
                output_text=self._tokenizer.decode(answer, skip_special_tokens=True),
                generated_tokens=len(answer),
                ttft_ms=1000 * (watch.first_at - began),
                total_ms=1000 * total_s,
                tokens_per_sec=len(answer) / total_s,
                kv_reuse_ratio=cached / len(row),
                prompt_tokens=len(row),
                cached_tokens=cached,
                token_ids=tuple(answer),
                report=report,
            )
            for prompt, row, answer, cached in zip(
                prompts, rows, answers, report.row_tokens or (0,) * len(rows), strict=True
            )
        ]

    def reset(self) -> None:
        """Forget the K/V of the last prompts."""
        for cache in self._caches.values():
            cache.reset()

    def _drafts(self, rows: int) -> dict[str, Any]:
        if self._assistant is None:
            return {}
        drafts_trees = isinstance(self._assistant, TreeDecoding)
        if rows > 1 and not drafts_trees:
            if not self._said_no_drafts:
                self._said_no_drafts = True
                _log.warning(
                    "Batches are decoded without the assistant, which drafts for one row. "
                    "TreeDecoding(assistant) drafts for several."
                )
            return {}
        return {"custom_generate" if drafts_trees else "assistant_model": self._assistant}

    def _pad(self) -> int:
        found = (getattr(self._model.generation_config, "pad_token_id", None), self._tokenizer.pad_token_id)
        return next((int(pad) for pad in found if pad is not None), 0)


def call_options(
    max_new_tokens: int, temperature: float, do_sample: bool, more: Mapping[str, Any], *, rows: int = 1
) -> dict[str, Any]:
    """Arguments for generate().

    Args:
        max_new_tokens: Tokens of each answer, at most.
        temperature: With `do_sample`, positive; else 1 or 0.
        do_sample: Sample tokens.
        more: Other arguments of generate().
        rows: Token ids of each row of the call.

    Raises:
        ValueError: The engine sets an argument itself, only the kvboost package has it, or arguments do not fit.
    """
    refuse("generate", more)
    for name in _OWN:
        if name in more:
            raise ValueError(
                f"`{name}` is set by the engine, got {type(more[name]).__name__}. Call "
                "engine.model.generate(..., cache=ChunkReuseCache(engine.model, engine.store)) for what it "
                "does not offer."
            )
    for name in _OF_ONE_ROW:
        if rows > 1 and more.get(name):
            raise ValueError(
                f"`{name}` ends one row, and must be left out for {rows} prompts in a batch. Call generate() for each."
            )
    criteria = more.get("stopping_criteria")
    if not isinstance(criteria, list | None):
        raise ValueError(f"`stopping_criteria` must be a list, got {type(criteria).__name__}. Pass [criterion].")
    require_bool("do_sample", do_sample)
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` must be an int of 1 or more, got {max_new_tokens!r}.")
    piece = more.get("prefill_chunk_size") or 0
    if type(piece) is not int or piece < 0:
        raise ValueError(f"`prefill_chunk_size` must be an int of 0 or more, got {piece!r}. Pass 0 for all at once.")
    told: Any = temperature
    if do_sample and not (isinstance(told, Real) and float(told) > 0):
        raise ValueError(
            f"`temperature` must be a positive number with do_sample=True, got {temperature!r}. Pass 1.0, or "
            "do_sample=False for the likeliest tokens."
        )
    if not do_sample and temperature not in (0, 1):
        raise ValueError(f"`temperature` is used with do_sample=True only, got {temperature}. Pass that, too.")
    sampling = {"do_sample": True, "temperature": temperature} if do_sample else {"do_sample": False}
    return {**more, "max_new_tokens": max_new_tokens, **sampling}


def generate_rows(
    model: PreTrainedModel, rows: Sequence[Tokens], pad: int, watch: Watch, options: Mapping[str, Any]
) -> list[list[int]]:
    """Call generate() for prompts of any lengths; returns the new tokens of each row, with the one that ends it.

    Rows are padded with `pad`, which nothing attends to. `watch` sees the call.
    """
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, width - len(row) :] = torch.from_numpy(row)
        mask[at, width - len(row) :] = 1
    device = input_device(model)
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), watch])
    given = {**options, "stopping_criteria": criteria, "pad_token_id": pad}
    generate: Any = model.generate
    out = generate(input_ids=ids.to(device), attention_mask=mask.to(device), **given)
    watch(out, None)  # the last token: not every way of decoding asks criteria about that
    told = options.get("eos_token_id", getattr(model.generation_config, "eos_token_id", None))
    ends = set(end_tokens(told))
    return [_to_end(row, ends) for row in out[:, width:].tolist()]


def _to_end(row: list[int], ends: set[int]) -> list[int]:
    """A row without the padding behind its end."""
    return row[: next((at + 1 for at, token in enumerate(row) if token in ends), len(row))]
