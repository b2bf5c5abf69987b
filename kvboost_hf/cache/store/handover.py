"""`hand_over`: writes what only host memory holds to the lower tiers, before the store that holds it is closed."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from kvboost_hf.cache.kv.records import Stored
from kvboost_hf.cache.store.lower import LowerMemory
from kvboost_hf.cache.store.memory import HostMemory
from kvboost_hf.cache.tiers.below import MeasuredTier

_log = logging.getLogger("kvboost_hf")

_AT_ONCE = 32  # records between two looks at the clock, and at what others have removed
_SHARE = 0.9  # of the budget of a tier: more would have it give up what was written first
_AROUND = 4096  # bytes of a blob and of its row beside the K/V, at most


def hand_over(
    memory: HostMemory,
    lower: LowerMemory,
    lock: AbstractContextManager[object],
    until: float,
    hear: Callable[[], object],
) -> int:
    """Write what lower tiers lack, what is asked for most often first.

    Tiers that are written at close get all that they have room for, others what they have not been given yet. A blob
    is in a tier whole or not at all, so that it may end anywhere.

    Args:
        memory: Holds the records.
        lower: The tiers, to which nothing else is being written.
        lock: Held while `memory` is listed.
        until: When to end, by `time.monotonic()`.
        hear: Takes out of `memory` what others who share a tier have removed meanwhile.

    Returns:
        Bytes that were written.
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
    budget = tier.tier.stats().get("max_bytes")
    room = float("inf") if budget is None else float(budget) * _SHARE
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
