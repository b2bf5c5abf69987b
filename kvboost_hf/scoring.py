"""`score`: log-likelihoods of many continuations of one or many prefixes, each common beginning computed once.

A row is a prefix and a continuation without its last token. `plan_batches` orders rows so that whatever two of them
begin with is computed for the first, and served to the others by the store. K/V is the business of the
`ChunkReuseCache` that the batches run with.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvboost_hf.cache.attach import cache_of_attached
from kvboost_hf.cache.planning.chunks import Tokens, common_length
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.compat import (
    input_device,
    padding_reason,
    require_cache,
    require_known_ids,
    require_model,
    rope_regime,
    run_model,
    unwrapped,
)
from kvboost_hf.errors import NonFiniteLogitsError

Ids = Sequence[int] | NDArray[np.int64] | torch.Tensor

_READ_BYTES = 2**26  # of logits in float32 at a time

_WINDOW = 16  # batches whose rows may change places


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is behind its prefix.

    Args:
        logprob: The log-likelihood of the continuation in nats: the sum of `token_logprobs`.
        token_logprobs: That of each token, given all before it.
        is_greedy: Each token is the most likely one: greedy decoding would give this continuation.
    """

    logprob: float
    token_logprobs: tuple[float, ...]
    is_greedy: bool


@dataclass(slots=True)
class Row:
    """Tokens that go through the model in one row."""

    ids: Tokens  # a text without its last token
    first: int  # the first token whose logits are wanted
    texts: list[int]  # those that it answers, by number

    @property
    def logits(self) -> int:
        """How many of its last tokens must be computed."""
        return len(self.ids) - self.first


@overload
def score(
    model: PreTrainedModel,
    tokenizer: Any,
    prefix: str,
    continuations: Sequence[str],
    *,
    batch_size: int = ...,
    cache: ChunkReuseCache | None = ...,
) -> list[Score]: ...


@overload
def score(
    model: PreTrainedModel,
    tokenizer: Any,
    prefix: Sequence[str],
    continuations: Sequence[Sequence[str]],
    *,
    batch_size: int = ...,
    cache: ChunkReuseCache | None = ...,
) -> list[list[Score]]: ...


def score(
    model: PreTrainedModel,
    tokenizer: Any,
    prefix: str | Sequence[str],
    continuations: Sequence[str] | Sequence[Sequence[str]],
    *,
    batch_size: int = 8,
    cache: ChunkReuseCache | None = None,
) -> list[Score] | list[list[Score]]:
    """Log-likelihoods of continuations of one prefix, or of each of many; what rows share is computed once.

    A prefix and a continuation are tokenized together, as lm_eval does, and the continuation is what follows as many
    tokens as the prefix has alone. Spaces that end the prefix belong to the continuation. An empty prefix stands for
    the tokenizer's `bos_token`.

    Args:
        model: A causal language model, or a wrapper of PEFT around it; it runs in eval mode and without gradients.
        tokenizer: The tokenizer of the model. It adds its special tokens, unless the prefix begins with `bos_token`.
        prefix: A text, or one for each list in `continuations`.
        continuations: Texts, or a list of them for each prefix.
        batch_size: Rows in one forward, at most.
        cache: Runs the forwards, with its store, policy and salt. None takes the settings of `attach`, and for a
            model that is not attached its default store.

    Returns:
        A score for each continuation, in lists as `continuations` has them.

    Raises:
        ValueError: for an empty continuation, one whose only token merges with the end of the prefix, an empty prefix
            without a `bos_token`, more tokens than the model has positions for, and what `score_ids` refuses.
        NonFiniteLogitsError: where the model gives NaN; nothing is stored of such a batch.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> likely, unlikely = score(model, tokenizer, "The lamp is red. The lamp is", [" red", " Oslo"])
        >>> likely.logprob > unlikely.logprob
        True
    """
    if not callable(tokenizer):
        raise ValueError(f"`tokenizer` must be a tokenizer of transformers, got {tokenizer!r:.80}. Pass the model's.")
    if not isinstance(prefix, Sequence) or not isinstance(continuations, Sequence):
        raise ValueError(
            "`prefix` must be a text and `continuations` a sequence of texts, or both sequences of these, got "
            f"{prefix!r:.80} and {continuations!r:.80}."
        )
    if isinstance(prefix, str):
        return score_ids(model, _encoded(tokenizer, prefix, continuations), batch_size=batch_size, cache=cache)
    if len(prefix) != len(continuations):
        raise ValueError(
            f"`continuations` must have a list for each of the {len(prefix)} prefixes, got {len(continuations)}. Pass "
            "[] for a prefix without any."
        )
    lists = [_encoded(tokenizer, *each) for each in zip(prefix, continuations, strict=True)]
    scores = iter(score_ids(model, [pair for pairs in lists for pair in pairs], batch_size=batch_size, cache=cache))
    return [[next(scores) for _ in pairs] for pairs in lists]


def score_ids(
    model: PreTrainedModel,
    pairs: Sequence[tuple[Ids, Ids]],
    *,
    batch_size: int = 8,
    cache: ChunkReuseCache | None = None,
) -> list[Score]:
    """`score` of token ids.

    Args:
        model: A causal language model, or a wrapper of PEFT around it.
        pairs: Ids of a prefix [n] and of a continuation [m], n > 0 and m > 0, in any order.
        batch_size: Rows in one forward, at most.
        cache: Runs the forwards, with its store, policy and salt; None for the settings of `attach`.

    Returns:
        A score for each pair.

    Raises:
        ValueError: for an empty prefix or continuation, ids of a wrong shape or type, ids that the model does not
            have, more tokens than it has positions for, a bad `batch_size`, and a model that takes no cache.
        NonFiniteLogitsError: where the model gives NaN; nothing is stored of such a batch.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> model, _ = load_embedded()
        >>> [found] = score_ids(model, [([5, 6, 7], [8, 9])])
        >>> len(found.token_logprobs)
        2
    """
    inner = require_model(model)
    known = [_checked(number, pair) for number, pair in enumerate(pairs)]
    limit = getattr(inner.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for number, (ids, start) in enumerate(known):
        require_known_ids(inner, ids, f"Ids of pair {number}")
        if limit is not None and len(ids) - 1 > limit:
            raise ValueError(
                f"Pair {number} has {start} tokens of prefix and {len(ids) - start} of continuation, and "
                f"{type(model).__name__} reads {limit} at most, all but the last. Shorten the prefix: lm_eval, for "
                "one, cuts it from the left."
            )
    found: dict[int, Score] = dict(scored(model, known, batch_size, cache))
    return [found[number] for number in range(len(known))]


def scored(
    model: PreTrainedModel,
    texts: Sequence[tuple[Tokens, int]],
    batch_size: int,
    cache: ChunkReuseCache | None = None,
) -> Iterator[tuple[int, Score]]:
    """The scores of texts, as they are computed.

    Args:
        model: A causal language model, or a wrapper of PEFT around it.
        texts: Ids of a prefix and its continuation [n], and where the continuation starts: in [1, n).
        batch_size: Rows in one forward, at most.
        cache: Runs the forwards, with its store, policy and salt; None for the settings of `attach`.

    Yields:
        The number of a text, and its score.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"`batch_size` must be a positive integer, got {batch_size!r}. Pass 8.")
    if cache is not None and not isinstance(cache, ChunkReuseCache):
        raise ValueError(
            f"`cache` must be a ChunkReuseCache or None, got {type(cache).__name__}. Pass ChunkReuseCache(model)."
        )
    inner = unwrapped(model)
    require_cache(inner)
    with _evaluating(inner):
        runner = _Runner(inner, cache if cache is not None else cache_of_attached(inner))
        batches = plan_batches(texts, batch_size, runner.kind)
    for batch in batches:
        with _evaluating(inner):  # not while the caller has the scores
            found = list(runner.scores(batch, texts))
        yield from found


class _Runner:
    """Runs batches with a cache.

    Args:
        model: The model.
        cache: Made for it.
    """

    def __init__(self, model: PreTrainedModel, cache: ChunkReuseCache) -> None:
        self._model, self._cache = model, cache

    def kind(self, length: int) -> Hashable:
        """Rows of one kind give in one batch what each gives alone."""
        regime = rope_regime(self._model, length)
        return length if regime is None or padding_reason(self._model) is not None else regime

    def scores(self, batch: Sequence[Row], texts: Sequence[tuple[Tokens, int]]) -> Iterator[tuple[int, Score]]:
        """The scores of all texts that the rows of a batch answer."""
        keep = max(row.logits for row in batch)
        logits = self._logits(batch, keep)
        at: list[tuple[int, int, int]] = []  # row, place in the logits, token
        for number, row in enumerate(batch):
            for text in row.texts:
                ids, start = texts[text]
                first = keep - len(row.ids) + start - 1
                at += [(number, first + place, int(token)) for place, token in enumerate(ids[start:])]
        found = _read(logits, at)
        for row in batch:
            for text in row.texts:
                ids, start = texts[text]
                tokens = [next(found) for _ in ids[start:]]
                logprobs = tuple(logprob for logprob, _ in tokens)
                yield text, Score(math.fsum(logprobs), logprobs, all(best for _, best in tokens))

    def _logits(self, batch: Sequence[Row], keep: int) -> torch.Tensor:
        """The logits of the last `keep` tokens of each row [rows, keep, vocab]."""
        columns = max(len(row.ids) for row in batch)
        ids = np.zeros((len(batch), columns), dtype=np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(batch):
            ids[number, columns - len(row.ids) :] = row.ids
            mask[number, columns - len(row.ids) :] = 1
        device, cache = input_device(self._model), self._cache
        with _keeping_what_is_finite(cache, batch):
            cache.begin_anew()
            output = run_model(
                self._model,
                torch.from_numpy(ids).to(device),
                cache,
                logits=keep,
                attention_mask=torch.from_numpy(mask).to(device),
                position_ids=torch.from_numpy((mask.cumsum(axis=1) - 1).clip(min=0)).to(device),
            )
        logits: torch.Tensor = output.logits[:, -keep:]
        return logits


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode without gradients, for as long as it lasts."""
    training = [module for module in model.modules() if module.training]
    model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _keeping_what_is_finite(cache: ChunkReuseCache, batch: Sequence[Row]) -> Iterator[None]:
    """Have a cache store whole texts, but nothing of a forward whose logits are not numbers."""
    before = cache.stores_prompts_whole, cache.judge
    cache.stores_prompts_whole, cache.judge = True, partial(_require_finite, batch)
    try:
        yield
    finally:
        cache.stores_prompts_whole, cache.judge = before


def _require_finite(batch: Sequence[Row], output: Any) -> None:
    finite = output.logits.amax(dim=-1).isfinite().all(dim=-1)  # the highest is NaN if one of them is
    if not bool(finite.all()):
        text = batch[int(finite.int().argmin())].texts[0]
        raise NonFiniteLogitsError(
            f"The model's logits for pair {text} are NaN or infinite, so that nothing can be scored, and nothing of "
            "its batch is stored. Look at the weights, and at the range of their dtype: float16 overflows where "
            "bfloat16 does not."
        )


def _read(logits: torch.Tensor, at: Sequence[tuple[int, int, int]]) -> Iterator[tuple[float, bool]]:
    """The log-probability of tokens at (row, place), and whether each is the most likely one."""
    step = max(1, _READ_BYTES // (4 * logits.shape[-1]))
    for start in range(0, len(at), step):
        rows, places, tokens = torch.tensor(at[start : start + step], device=logits.device).unbind(dim=1)
        part = logits[rows, places].float()
        chosen = part.gather(1, tokens[:, None])[:, 0] - part.logsumexp(dim=-1)
        yield from zip(chosen.tolist(), (part.argmax(dim=-1) == tokens).tolist(), strict=True)


# What it is given


def _checked(number: int, pair: Any) -> tuple[Tokens, int]:
    """A pair as one text, and where its continuation starts."""
    if not isinstance(pair, Collection) or isinstance(pair, str) or len(pair) != 2:
        raise ValueError(
            f"Pair {number} must be ids of a prefix and ids of a continuation, got {pair!r:.80}. Pass [(ids, ids)]."
        )
    parts = []
    for name, ids in zip(("prefix", "continuation"), pair, strict=True):
        given = torch.as_tensor(ids)
        if given.numel() and (given.is_floating_point() or given.dtype == torch.bool):
            raise ValueError(f"The {name} of pair {number} must be ids, which are integers, got {given.dtype}.")
        found = given.long().cpu().numpy()
        if found.ndim != 1 or not len(found):
            remedy = "Begin with [bos_token_id]" if name == "prefix" else "Leave out what has nothing to score"
            raise ValueError(
                f"The {name} of pair {number} must be ids of the shape [n], n > 0, got {list(found.shape)}. {remedy}."
            )
        parts.append(found)
    return np.concatenate(parts), len(parts[0])


def _encoded(tokenizer: Any, prefix: str, continuations: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """A prefix and each of its continuations, as lm_eval tokenizes them."""
    if isinstance(continuations, str) or not all(isinstance(each, str) for each in continuations):
        raise ValueError(
            f"`continuations` must be a sequence of texts for one prefix, got {continuations!r:.80}. Pass [text]."
        )
    if "" in continuations:
        raise ValueError(f"Continuation {list(continuations).index('')} of {prefix[-40:]!r} is empty. Leave it out.")
    if not continuations:
        return []
    bos = getattr(tokenizer, "bos_token", None)
    if not prefix:
        if bos is None:
            raise ValueError(
                "`prefix` is empty, and the tokenizer has no `bos_token` to begin with. Pass the text that the first "
                "token is to follow, such as tokenizer.eos_token."
            )
        prefix = bos
    kept = prefix.rstrip()
    special = not (bos and prefix.startswith(bos))
    start = tokenizer(kept, add_special_tokens=special)["input_ids"]
    wholes = tokenizer([prefix + each for each in continuations], add_special_tokens=special)["input_ids"]
    for continuation, whole in zip(continuations, wholes, strict=True):
        if len(whole) <= len(start):
            raise ValueError(
                f"Continuation {continuation!r} has no token of its own behind {prefix[-40:]!r}: the tokenizer merges "
                "it with the end of the prefix. Move the last word of the prefix to the continuation."
            )
    return [(start, whole[len(start) :]) for whole in wholes]


def plan_batches(
    texts: Sequence[tuple[Tokens, int]], batch_size: int, kind: Callable[[int], Hashable] = lambda length: None
) -> list[list[Row]]:
    """Rows in the order in which to compute them.

    Rows that begin alike are close together, and where they are, those with most new tokens come first: a few-shot
    head, then what opens each question, then the other answers to it. A batch computes as many columns of each row as
    of the one with most, so that no row of it has less than half of that.

    Args:
        texts: Ids of a prefix and its continuation [n], and where the continuation starts: in [1, n).
        batch_size: Rows of a batch, at most.
        kind: The class of lengths that the row is in; rows of a batch are of one kind.

    Returns:
        Batches of rows.
    """
    rows = _rows(texts)
    shared = [0, *(common_length(before.ids, row.ids) for before, row in pairwise(rows))]
    new = [max(len(row.ids) - shared[number], row.logits) for number, row in enumerate(rows)]
    batches: list[list[Row]] = []
    for start in range(0, len(rows), _WINDOW * batch_size):
        window = range(start, min(start + _WINDOW * batch_size, len(rows)))
        leader = -1
        for number in sorted(window, key=lambda number: -new[number]):
            row = rows[number]
            fits = leader >= 0 and len(batches[-1]) < batch_size and 2 * new[number] >= new[leader]
            if not fits or kind(len(row.ids)) != kind(len(rows[leader].ids)):
                batches.append([])
                leader = number
            batches[-1].append(row)
    return batches


def _rows(texts: Sequence[tuple[Tokens, int]]) -> list[Row]:
    """What has to be computed, those that begin alike together: a row may answer for what it begins with."""
    names = [ids[:-1].astype(">i8").tobytes() for ids, _ in texts]  # in the order of the ids
    rows: list[Row] = []
    behind = b""
    # Longer ones first; of those with the same ids, that with the longest continuation.
    for number in sorted(range(len(texts)), key=lambda number: (names[number], -texts[number][1]), reverse=True):
        ids, start = texts[number]
        if rows and behind.startswith(names[number]) and start - 1 >= rows[-1].first:
            rows[-1].texts.append(number)
        else:
            rows.append(Row(ids[:-1], start - 1, [number]))
            behind = names[number]
    return rows[::-1]
