"""What may be chosen for a `KVBoost`, and the policy and store that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from kvboost_hf.cache.cutting import ContentChunker
from kvboost_hf.cache.store import ChunkStore
from kvboost_hf.cache.tiers.addresses import DEFAULT_DISK_BYTES
from kvboost_hf.cache.tiers.base import Tier
from kvboost_hf.compat import bytes_per_token
from kvboost_hf.config import Repair, ReusePolicy

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


class RecomputeStrategy(StrEnum):
    """How chunks that are found elsewhere in other prompts are repaired."""

    SELECTIVE = "selective"  # `recompute_overlap` tokens before each seam
    CACHEBLEND = "cacheblend"  # the tokens that differ most
    QUERY = "query"  # those after each seam, and those that the end of the prompt attends to most
    FIRST_K = "first_k"  # those after each seam
    NONE = "none"  # not at all


_REPAIRS: dict[RecomputeStrategy, Repair] = {
    RecomputeStrategy.SELECTIVE: "selective_before",
    RecomputeStrategy.CACHEBLEND: "cacheblend",
    RecomputeStrategy.QUERY: "query",
    RecomputeStrategy.FIRST_K: "first_k",
    RecomputeStrategy.NONE: "none",
}
_CODECS = {16: "raw", 8: "int8", 4: "int4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of a `KVBoost`.

    Args:
        recompute_strategy: A `RecomputeStrategy`, or its value: chunks are used anywhere in a prompt, and repaired.
            Answers may differ from those of plain `generate()`. None uses K/V only where everything before it is the
            same, too, and answers are those of plain `generate()`.
        chunk_size: Tokens per chunk, a multiple of 16.
        chunk_boundary_window: Cut by content, and let cuts move up to so many tokens to the end of a sentence; 0 cuts
            at multiples of `chunk_size`.
        max_cache_bytes: Host memory for K/V; None for 4 GiB.
        max_chunks: In place of it, room for so many chunks that are not compressed.
        kv_cache_bits: 16 keeps K/V as it is, 8 and 4 as codes of so many bits, which is lossy.
        disk_cache_dir: A folder that keeps up to 10 GB of K/V for later processes.
        tiers: Other places for K/V, as `ChunkStore` takes them.
        tier_key: 32 bytes or more that seal what is written to `disk_cache_dir` and `tiers`, as `ChunkStore` takes it.
        recompute_overlap: Tokens at each seam that `"selective"` and `"query"` compute again.
        recompute_ratio: Share of the moved tokens that `"cacheblend"`, `"query"` and `"first_k"` compute again.
        sink_tokens: The first tokens of a prompt, which are never moved.
        overlap_k: Tokens before each seam that every strategy computes again.
        min_prefill_saving: Chunks are moved where that saves at least so many tokens.
        prefill_chunk_size: The most prompt tokens in a forward; 0 for all at once.
        salt: Separates those who must not see each other's prompts.

    Raises:
        ValueError: for an unknown strategy, other bits, counts or ratios that are none, or both of `max_cache_bytes`
            and `max_chunks`.
    """

    recompute_strategy: RecomputeStrategy | str | None = None
    chunk_size: int = 128
    chunk_boundary_window: int = 0
    max_cache_bytes: int | None = None
    max_chunks: int | None = None
    kv_cache_bits: int | None = 16
    disk_cache_dir: str | Path | None = None
    tiers: Sequence[str | Tier] = ()
    tier_key: bytes | None = field(default=None, repr=False)
    recompute_overlap: int = 16
    recompute_ratio: float = 0.15
    sink_tokens: int = 16
    overlap_k: int = 0
    min_prefill_saving: int = 64
    prefill_chunk_size: int = 0
    salt: str | bytes = b""

    def __post_init__(self) -> None:
        if self.recompute_strategy is not None:
            choice(
                RecomputeStrategy, "recompute_strategy", self.recompute_strategy, " Pass None for exact reuse only."
            )
        if self.kv_cache_bits not in (None, *_CODECS):
            raise ValueError(
                f"`kv_cache_bits` must be 16, 8 or 4, got {self.kv_cache_bits!r}. For other codecs make a "
                "ChunkStore(model, codec=...) and pass it to ChunkReuseCache."
            )
        if self.max_chunks is not None and self.max_cache_bytes is not None:
            raise ValueError(
                f"`max_chunks` must be None beside `max_cache_bytes` ({self.max_cache_bytes}), got {self.max_chunks}. "
                "Pass one of the two."
            )
        for name, least in (("max_chunks", 1), ("prefill_chunk_size", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"`{name}` must be an int of {least} or more, got {value!r}.")
        self.policy()  # refuses the rest

    def policy(self) -> ReusePolicy:
        """How stored K/V may be used."""
        strategy = self.recompute_strategy
        return ReusePolicy(
            mode="exact" if strategy is None else "blend",
            repair=_REPAIRS[RecomputeStrategy(strategy or RecomputeStrategy.CACHEBLEND)],
            recompute_ratio=self.recompute_ratio,
            seam_tokens=self.recompute_overlap,
            sink_tokens=self.sink_tokens,
            overlap_k=self.overlap_k,
            min_prefill_saving=self.min_prefill_saving,
        )

    def store(self, model: PreTrainedModel, tokenizer: Any, *, tiers: bool = True) -> ChunkStore:
        """A new store.

        Args:
            model: Whose K/V it holds.
            tokenizer: Of the model.
            tiers: With what is below host memory; else host memory alone.
        """
        window = self.chunk_boundary_window
        chunker = ContentChunker.for_tokenizer(tokenizer, self.chunk_size, window) if window else None
        max_bytes = self.max_cache_bytes
        if self.max_chunks is not None:
            max_bytes = self.max_chunks * self.chunk_size * (bytes_per_token(model) + np.dtype(np.int64).itemsize)
        lower = list(self.tiers) if tiers else []
        if tiers and self.disk_cache_dir is not None:
            lower.append(f"disk:{self.disk_cache_dir}:{DEFAULT_DISK_BYTES}B")
        return ChunkStore(
            model,
            chunk_size=self.chunk_size if chunker is None else None,
            chunker=chunker,
            max_bytes=max_bytes,
            salt=self.salt,
            tiers=lower,
            tier_key=self.tier_key,
            codec=_CODECS[self.kv_cache_bits or 16],
        )


SETTINGS = frozenset(field.name for field in fields(EngineSettings))


def choice(kind: type[ChoiceT], name: str, value: object, remedy: str = "") -> ChoiceT:
    """The member of an enumeration that an argument names.

    Raises:
        ValueError: for anything else.
    """
    try:
        return kind(value)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"`{name}` must be one of {[str(each) for each in kind]}, got {value!r}.{remedy}") from None
