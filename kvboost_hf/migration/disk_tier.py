"""`kvboost.disk_tier`: K/V of chunks in a folder, found by their hashes, over the disk tier of stores."""

import os
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from kvboost_hf.cache.planning.chunks import KEY_BYTES
from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.disk import DiskTier as Folder
from kvboost_hf.cache.tiers.record import Blob, DamagedBlobError, dump
from kvboost_hf.fields import require_int

__all__ = ["CachedChunk", "DiskTier"]


@dataclass(frozen=True, slots=True, eq=False)
class CachedChunk:
    """K/V of a chunk."""

    chunk_hash: str  # it is found by
    token_ids: list[int]
    past_key_values: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # of each layer, [batch, heads, tokens, head_dim]
    text: str = ""
    position: int = 0  # of its first token in the prompt


class DiskTier:
    """Chunks of up to `slot_bytes` each in files of `cache_dir`, of `max_chunks` times `slot_bytes` in all."""

    def __init__(self, cache_dir: str | os.PathLike[str], max_chunks: int = 256, slot_bytes: int = 10_485_760) -> None:
        require_int("max_chunks", max_chunks)
        require_int("slot_bytes", slot_bytes)
        self._slot_bytes = slot_bytes
        self._tier = Folder(cache_dir, max_chunks * slot_bytes)

    def write(self, chunk: CachedChunk) -> bool:
        """Write a chunk; False if it is larger than a slot, or the folder takes no more."""
        tensors = {
            f"{role}{number}": x.detach().cpu().contiguous()
            for number, pair in enumerate(chunk.past_key_values)
            for role, x in zip("kv", pair, strict=True)
        }
        if sum(x.nbytes for x in tensors.values()) > self._slot_bytes:
            return False
        tokens = np.asarray(chunk.token_ids, dtype=np.int64)
        key, none = _key(chunk.chunk_hash), bytes(KEY_BYTES)
        entry = Entry(key, Kind.CONTENT, none, none, none, b"", chunk.position, tokens, 0)
        layout = {"layers": len(chunk.past_key_values), "text": chunk.text, "hash": chunk.chunk_hash}
        return self._tier.write(*dump(entry, tensors, layout))

    def read(self, chunk_hash: str, device: torch.device | str = "cpu") -> CachedChunk | None:
        """The chunk with its K/V on a device, or None if there is none, or it is damaged."""
        data = self._tier.read(_key(chunk_hash))
        if data is None:
            return None
        try:
            blob = Blob(data)
            blob.check_all()
        except DamagedBlobError:
            self._tier.delete([_key(chunk_hash)])
            return None
        layers = range(blob.layout["layers"])
        kv = tuple((blob.tensor(f"k{number}").to(device), blob.tensor(f"v{number}").to(device)) for number in layers)
        entry = blob.entry
        return CachedChunk(chunk_hash, entry.tokens.tolist(), kv, blob.layout["text"], entry.start)


def _key(chunk_hash: str) -> bytes:
    return blake2b(chunk_hash.encode(), digest_size=KEY_BYTES).digest()
