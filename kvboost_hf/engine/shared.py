"""Computes the prefix that all prompts of a batch share, and counts it once."""

from collections.abc import Sequence
from dataclasses import replace

from kvboost_hf.cache.planning.chunks import Tokens, common_length
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.config import KVQuantConfig, ReusePolicy


def store_shared(
    store: ChunkStore, policy: ReusePolicy, rows: Sequence[Tokens], live_quant: KVQuantConfig | None
) -> int:
    """Store the prefix that all rows share, if that saves tokens; returns how many were computed.

    Args:
        store: The store.
        policy: The policy of the cache that will find it.
        rows: Token ids [n] of each prompt.
        live_quant: The `live_quant` of that cache.
    """
    shared = min(min(common_length(rows[0], row), len(row) - 1) for row in rows)
    if shared < HEAD_TOKENS or shared * (len(rows) - 1) < policy.min_prefill_saving:
        return 0
    first = rows[0][:shared].tolist()
    return store.warm(first, pin=False, policy=policy, live_quant=live_quant).forwarded_tokens


def with_computed(report: ReuseReport, computed: int) -> ReuseReport:
    """The report of a batch in which tokens computed ahead of it count as computed for its first row."""
    if not report.row_tokens:
        return replace(report, forwarded_tokens=report.forwarded_tokens + computed)
    first, *others = report.row_tokens
    own = min(computed, first)
    left, tiers = own, dict(report.tier_tokens)
    for tier in reversed(tiers):  # what was still in the cache was not computed now
        taken = min(left, tiers[tier])
        tiers[tier], left = tiers[tier] - taken, left - taken
    return replace(
        report,
        exact_tokens=report.exact_tokens - own,
        forwarded_tokens=report.forwarded_tokens + computed,
        tier_tokens=tiers,
        row_tokens=(first - own, *others),
    )
