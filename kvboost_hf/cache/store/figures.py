"""`figures`: the counts and bytes of a store, as `ChunkStore.stats()` returns them."""

from typing import Any

from kvboost_hf.cache.store.tiered import TieredRecords


def figures(records: TieredRecords) -> dict[str, Any]:
    """Counts and bytes of the records of a store, by tier. Whoever calls it holds the lock."""
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
        "loaded": lower.loaded,
        "lost": lower.lost,
        "tiers": {**({"device": device.stats()} if device.max_bytes else {}), "ram": ram, **lower.tiers.stats()},
    }
