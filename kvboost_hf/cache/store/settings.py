"""Opens and closes a store: checks of its settings, those of `ChunkStore.warm`, and what is written at its end.

Computing K/V ahead takes caches, which are built on the store: what does it is imported when it is asked for.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.codecs.base import Codec
from kvboost_hf.cache.kv import Stored
from kvboost_hf.cache.planning.chunks import Chunker, FixedChunker, Tokens
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.store.lower import LowerMemory
from kvboost_hf.cache.store.memory import HostMemory
from kvboost_hf.cache.tiers.base import capacity
from kvboost_hf.cache.tiers.below import MeasuredTier
from kvboost_hf.compat import bytes_per_token, known_reason
from kvboost_hf.config import KVQuantConfig, ReusePolicy, require_size
from kvboost_hf.fields import require_bool


def checked_chunker(chunker: Chunker | None, chunk_size: int | None) -> Chunker:
    """The chunker of a store. ValueError: no chunker, a bad `chunk_size`, or another than the chunker's."""
    if chunker is None:
        return FixedChunker(128 if chunk_size is None else chunk_size)
    if not hasattr(chunker, "next_cut"):
        raise ValueError(
            f"`chunker` must be a ContentChunker or have its `chunk_size` and `next_cut`, got {chunker!r}. For chunks "
            "of one length pass `chunk_size` in its place."
        )
    if chunk_size not in (None, chunker.chunk_size):
        raise ValueError(
            f"`chunk_size` must be left out beside a `chunker`, or be its {chunker.chunk_size}, got {chunk_size!r}."
        )
    return chunker


def chunk_bytes(model: PreTrainedModel, chunk_size: int, codec: Codec) -> int:
    """The least that a chunk takes; 0 where nothing will be stored, and the configuration may have other names."""
    if known_reason(model) is not None:
        return 0
    per_token = bytes_per_token(model) if codec.lossless else 0  # of codes: less, and not worth a second formula
    return (per_token + np.dtype(np.int64).itemsize) * chunk_size


def checked_budget(model: PreTrainedModel, max_bytes: int | str | None, least: int, chunk_size: int) -> int | None:
    """The budget of host memory; None where none is given. ValueError: no size, or less than `least` bytes."""
    ram = None if max_bytes is None else require_size("max_bytes", max_bytes, least=1)
    if ram is not None and ram < least:
        raise ValueError(
            f"`max_bytes` must hold at least one chunk, which is {least} bytes ({chunk_size} tokens "
            f"of {bytes_per_token(model)} bytes of K/V), got {ram}. Raise it, or lower `chunk_size`."
        )
    return ram


def checked_share(state_share: float) -> float:
    """The share of the budget that states may take. ValueError: anything but a number from 0 to 1."""
    if isinstance(state_share, bool) or not isinstance(state_share, int | float) or not 0 <= state_share <= 1:
        raise ValueError(
            f"`state_share` must be a number from 0 to 1, got {state_share!r}. Leave it out for 0.5, or pass 0 to "
            "keep no states but those that are pinned."
        )
    return float(state_share)


class Uncut:
    """A chunker that cuts nothing."""

    chunk_size = 2**31

    def next_cut(self, tokens: Tokens, start: int) -> int | None:
        """None: there is no cut."""
        return None


Texts = str | Sequence[int] | torch.Tensor  # a text, or its token ids
Starts = Texts | Sequence[Mapping[str, Any]]  # or the first messages of chats


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """The keyword arguments of `ChunkStore.warm`."""

    tokenizer: Any
    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    pin: bool
    policy: ReusePolicy | None
    salt: bytes
    progress: Callable[[int, int], None] | None  # given the tokens that are done, and all of them
    live_quant: KVQuantConfig | None

    def __post_init__(self) -> None:
        require_bool("pin", self.pin)


Warmer = Callable[..., ReuseReport]  # of a model, its store, texts, documents, their prefix, and settings


def warmer() -> Warmer:
    """The function that computes K/V ahead."""
    found: Warmer = import_module("kvboost_hf.cache.warm").warm
    return found


_log = logging.getLogger("kvboost_hf")

_AT_ONCE = 32  # records between two looks at the clock, and at what others have removed
_SHARE = 0.9  # of what a tier can hold: more would have it give up what was written first
_AROUND = 4096  # bytes of a blob and of its row beside the K/V, at most


def hand_over(
    memory: HostMemory,
    lower: LowerMemory,
    lock: AbstractContextManager[object],
    until: float,
    hear: Callable[[], object],
) -> int:
    """Write what lower tiers lack, what is asked for most often first; returns its bytes.

    Tiers that are written at close get all that they have room for, others what they have not been given yet. A blob
    is in a tier whole or not at all, so that it may end anywhere: at `until`, by `time.monotonic()`. `hear` takes out
    of `memory` what others who share a tier have removed meanwhile.
    """
    hear()
    with lock:
        records = [each for each in hottest_first(memory) if lower.may_write(each)]
    written = 0
    for tier in lower.tiers.tiers:
        at_close = tier.tier.name in lower.tiers.at_close
        lacking = records if at_close else [each for each in records if each.key not in lower]
        written += _write(tier, list(_that_fit(lacking, tier)), memory, lower, until, hear)
    hear()
    return written


def _write(
    tier: MeasuredTier,
    records: Sequence[Stored],
    memory: HostMemory,
    lower: LowerMemory,
    until: float,
    hear: Callable[[], object],
) -> int:
    written = 0
    for at in range(0, len(records), _AT_ONCE):
        some = records[at : at + _AT_ONCE]
        if time.monotonic() >= until:
            _log.warning("%s: no time was left to write all that is in host memory.", tier.tier.location)
            break
        hear()
        there = tier.tier.find([each.key for each in some])
        for each in some:
            if each.key not in there and each.key in memory:
                entry, blob = lower.blob_of(each)
                written += entry.nbytes if tier.tier.write(entry, blob) else 0
    return written


def _that_fit(records: Iterable[Stored], tier: MeasuredTier) -> Iterator[Stored]:
    """The first records that a tier has room for, beside each other."""
    room = capacity(tier.tier.stats()) * _SHARE
    for each in records:
        room -= each.nbytes + _AROUND
        if room < 0:
            return
        yield each


def hottest_first(memory: HostMemory) -> Iterator[Stored]:
    """All records: the pinned ones, then those that are used most often; each behind the chunks that it continues."""
    pinned, seen = memory.pinned_keys(), set[bytes]()
    rates = {each.key: (each.key in pinned, memory.order.rate(each.key)) for each in memory.records()}
    for key in sorted(rates, key=rates.__getitem__, reverse=True):
        chain, each = list[Stored](), memory.get(key)
        while each is not None and each.key not in seen:
            seen.add(each.key)
            chain.append(each)
            each = memory.chunks.get(each.parent)
        yield from reversed(chain)
