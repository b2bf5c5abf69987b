"""`figures`: the counts and bytes of a store, as `ChunkStore.stats()` returns them."""

from typing import Any

from kvboost_hf.cache.store.audits import Audits
from kvboost_hf.cache.store.records.tiered import TieredRecords


def figures(records: TieredRecords, audits: Audits, codec: str, seconds_per_token: float | None) -> dict[str, Any]:
    """Counts and bytes of the records of a store, by tier. Whoever calls it holds the lock.

    Args:
        records: The records.
        audits: Of the store.
        codec: The name of its codec.
        seconds_per_token: How long the model computes a token; None where it is not known.
    """
    memory, device, lower = records.memory, records.device, records.lower
    chunks = memory.chunks.values()
    ram = {"chunks": len(chunks), "bytes": memory.nbytes, "max_bytes": memory.max_bytes}
    return {
        **ram,
        "pinned_chunks": len(memory.pinned_keys()),
        "content_only": sum(chunk.content_only for chunk in chunks),
        "states": len(memory.states),
        "tokens": sum(len(chunk.tokens) for chunk in chunks),
        "ngram_bytes": records.text.nbytes,
        **records.counts,
        "evictions": memory.evictions,
        "audits": audits.count,
        "divergences": audits.divergences,
        "loaded": lower.loaded,
        "lost": lower.lost,
        "codec": codec,
        "seconds_per_token": seconds_per_token,
        "tiers": {**({"device": device.stats()} if device.max_bytes else {}), "ram": ram, **lower.tiers.stats()},
    }
