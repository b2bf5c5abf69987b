"""What goes through a model: every forward, and how few tokens would have been enough."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf import ChunkReuseCache
from kvboost_hf.compat import PrivateCache, cache_in

_USUAL = frozenset(
    "input_ids attention_mask position_ids cache past_key_values use_cache logits_to_keep return_dict "
    "cache_position".split()
)
_CAUSES = {"fingerprint": "what is stored is for other weights", "evicted": "it has been evicted"}


@dataclass(frozen=True, slots=True)
class Forward:
    """A call of the model.

    Args:
        rows: The text of each row so far, as far as it is known, with what this call adds.
        new: How many tokens of each row this call was given, padding left out.
        logits: How many of the last ones' logits the caller wants.
        weights: Under which name the model's weights went; K/V of others is of no use.
        why: Why nothing could be reused, as far as the cache says, or "".
    """

    rows: tuple[tuple[int, ...], ...]
    new: tuple[int, ...]
    logits: int
    weights: str
    why: str

    @property
    def begins(self) -> bool:
        """Whether it is the first of a text."""
        return all(new == len(row) for new, row in zip(self.new, self.rows, strict=True))

    def line(self) -> str:
        """In short."""
        of = ", ".join(f"{new} of {len(row)}" for new, row in zip(self.new, self.rows, strict=True))
        return f"{of} tokens; {self.logits} logits; {self.weights}; {self.why}"


class Watch:
    """Counts the tokens that really go through a model, in all threads, and keeps what it was called with.

    Args:
        model: What is watched, by a hook.
    """

    leaves_kv_alone = True  # read by the library, which cannot know what other hooks do with the cache

    def __init__(self, model: PreTrainedModel) -> None:
        self.forwards: list[Forward] = []
        self.embedded = 0
        self.unseen = 0  # of these, those that went past the model's own forward
        self.weights = "as loaded"
        self._texts: WeakKeyDictionary[Cache, list[tuple[int, ...]]] = WeakKeyDictionary()
        self._table = model.get_input_embeddings().weight
        self._lock = Lock()
        self._asides = 0
        model.register_forward_hook(self._after, with_kwargs=True)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count tokens where they become vectors: whatever calls the model in whatever way, it has to go there."""
        look_up = torch.nn.functional.embedding

        def embedding(ids: torch.Tensor, table: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if table is self._table:
                self._count(ids.numel(), 0)
            return look_up(ids, table, *args, **kwargs)

        embedding.leaves_kv_alone = True  # type: ignore[attr-defined]  # read by the library, as above
        torch.nn.functional.embedding = embedding  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.nn.functional.embedding = look_up

    @contextmanager
    def under(self, weights: str) -> Iterator[None]:
        """For as long as the model has other weights."""
        before, self.weights = self.weights, weights
        try:
            yield
        finally:
            self.weights = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For calls whose K/V nobody else can use, and that can use nobody's."""
        self._asides += 1
        with self.under(f"aside {self._asides}"):
            yield

    @torch.compiler.disable
    def _count(self, embedded: int, seen: int) -> None:
        with self._lock:
            self.embedded += embedded
            self.unseen += embedded - seen

    @torch.compiler.disable
    def _after(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return
        self._count(0, ids.numel())
        cache = cache_in(kwargs)
        new = ids.shape[1]
        rows = _without_padding(ids, kwargs.get("attention_mask"))
        keep = kwargs.get("logits_to_keep", 0)
        logits = keep if isinstance(keep, int) and 0 < keep < new else new
        why = _why(cache, kwargs) if new > 1 else ""
        weights = f"{self.weights}, {model.config.num_hidden_layers} layers"  # fewer, where drafts exit early
        with self._lock:
            texts = self._continued(cache, rows, new) if isinstance(cache, Cache) else rows
            self.forwards.append(Forward(tuple(texts), tuple(map(len, rows)), logits, weights, why))

    def _continued(self, cache: Cache, rows: list[tuple[int, ...]], new: int) -> list[tuple[int, ...]]:
        held = max(0, int(cache.get_seq_length()) - new)  # columns, padding included
        before = self._texts.get(cache, [])
        texts = rows
        if held and len(before) == len(rows):
            gone = max(map(len, before)) - held  # what generate() has cropped
            texts = [old[: len(old) - max(0, gone)] + row for old, row in zip(before, rows, strict=True)]
        self._texts[cache] = texts
        return texts


def _why(cache: Any, kwargs: dict[str, Any]) -> str:
    if isinstance(cache, ChunkReuseCache):
        return cache.report.bypass_reason or "; ".join({_CAUSES.get(m.cause, "") for m in cache.report.misses})
    if isinstance(cache, PrivateCache):
        return ""
    odd = sorted(n for n, value in kwargs.items() if n not in _USUAL and value is not None and value is not False)
    given = type(cache).__name__ if cache is not None else "no cache"
    return f"the forward had {given}" + (f", and {', '.join(odd)}" if odd else "")


def _without_padding(ids: torch.Tensor, mask: Any) -> list[tuple[int, ...]]:
    rows = [tuple(row) for row in ids.tolist()]
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return rows
    shown = mask[:, -ids.shape[1] :].tolist()
    return [tuple(compress(row, seen)) for row, seen in zip(rows, shown, strict=True)]


def tokens_given(forwards: Sequence[Forward]) -> int:
    """Tokens of all forwards, where they cannot be counted as they become vectors."""
    return sum(sum(forward.new) for forward in forwards)


def ideal(forwards: Sequence[Forward]) -> int:
    """How many tokens these forwards would have come down to, had each known all K/V that those before it made."""
    known: dict[str, list[tuple[int, ...]]] = {}
    total = 0
    for forward in forwards:
        texts = known.setdefault(forward.weights, [])
        for row, new in zip(forward.rows, forward.new, strict=True):
            found = max((_common(row, text) for text in texts), default=0)
            total += new - min(max(0, found - (len(row) - new)), new - min(new, forward.logits))
        texts.extend(forward.rows)
    return total


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
