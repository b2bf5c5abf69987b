"""Computes and stores the beginning of prompts, for `KVBoost.warm`."""

from dataclasses import replace

from kvboost_hf.cache.planning.chunks import Chunker, Tokens
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.prompt.chats import Start
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.engine.results import WarmResult


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
