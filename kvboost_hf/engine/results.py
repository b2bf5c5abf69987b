"""The results that `KVBoost` returns."""

from dataclasses import dataclass, replace
from enum import StrEnum

from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Chunker, Tokens
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.prompt.chats import Start
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.engine.prompts import Prompt


class GenerationMode(StrEnum):
    """Which stored K/V a call may reuse."""

    BASELINE = "baseline"  # none: plain generate()
    PREFIX_CACHE = "prefix_cache"  # that of an exact prefix
    CHUNK_KV_REUSE = "chunk_kv_reuse"  # that which `recompute_strategy` allows


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One answer.

    Args:
        mode: What the call was allowed to reuse.
        prompt: As it was passed: a text, or messages.
        output_text: The answer, without special tokens.
        generated_tokens: Tokens of the answer, with the one that ends it.
        ttft_ms: Milliseconds from the call to the first token on the host. In a batch that of all rows.
        total_ms: Milliseconds from the call to the last token on the host. In a batch that of the longest row.
        tokens_per_sec: `generated_tokens` by `total_ms`.
        kv_reuse_ratio: `cached_tokens` as a share of `prompt_tokens`.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Tokens of the prompt that were not computed for this answer. In a batch, the prefix that all
            rows share counts as computed for the first one.
        token_ids: The token ids of the answer, with the one that ends it.
        report: Where reused tokens came from, and where and why reuse ended; in a batch, of all rows together.
    """

    mode: GenerationMode
    prompt: Prompt
    output_text: str
    generated_tokens: int
    ttft_ms: float
    total_ms: float
    tokens_per_sec: float
    kv_reuse_ratio: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    report: ReuseReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """The result of `KVBoost.warm`: true if part of the text can be reused now, and `chunks_stored` as an int.

    Args:
        chunks_stored: Chunks that are new; 0 where all of the text was stored before.
        token_count: Tokens of the text.
        cached_tokens: Tokens of the text that were stored before.
        chunk_size: The most tokens of a chunk.
        partial_tail_tokens: The last tokens of the text, which fill no chunk.
        alignment_warning: What becomes of them, or None if there are none.
        report: What was stored before, and what was computed.
    """

    chunks_stored: int
    token_count: int
    cached_tokens: int
    chunk_size: int
    partial_tail_tokens: int
    alignment_warning: str | None
    report: ReuseReport

    @property
    def chunk_boundary_aligned(self) -> bool:
        """Whether the text ends where a chunk does."""
        return self.partial_tail_tokens == 0

    def __bool__(self) -> bool:
        return self.chunks_stored + self.cached_tokens > 0

    def __int__(self) -> int:
        return self.chunks_stored


def warm(
    store: ChunkStore, policy: ReusePolicy, start: Start, *, pin: bool, live_quant: KVQuantConfig | None
) -> WarmResult:
    """Store the K/V of the beginning of prompts.

    Args:
        store: The store.
        policy: The policy of the cache that will find it.
        start: What prompts begin with.
        pin: Never evict it.
        live_quant: The `live_quant` of that cache.
    """
    before, ids = store.stats(), start.ids
    report = store.warm(ids.tolist(), pin=pin, policy=policy, live_quant=live_quant)
    report = replace(report, start_reason=report.start_reason or start.reason)
    after = store.stats()
    chunk_size = store.chunker.chunk_size
    tail = len(ids) - _last_cut(store.chunker, ids)
    warning = None
    if tail:
        what = "are stored as a shorter one" if tail >= HEAD_TOKENS else "are too few to be stored"
        warning = f"The last {tail} of {len(ids)} tokens fill no chunk of {chunk_size} and {what}."
    return WarmResult(
        chunks_stored=sum(after[name] - before[name] for name in ("chunks", "evictions")),
        token_count=len(ids),
        cached_tokens=report.reused_tokens,
        chunk_size=chunk_size,
        partial_tail_tokens=tail,
        alignment_warning=warning,
        report=report,
    )


def _last_cut(chunker: Chunker, ids: Tokens) -> int:
    at = 0
    while (cut := chunker.next_cut(ids, at)) is not None:
        at = cut
    return at
