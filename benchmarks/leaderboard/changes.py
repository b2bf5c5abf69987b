"""Changes that show whether a measurement can fail: damaged K/V, keys that are not rotated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.leaderboard.method import Change
from kvboost_hf import ChunkStore
from kvboost_hf.compat.rotation import KeyRotation


def damage(store: ChunkStore, kind: str, seed: int = 0) -> None:
    """Set all K/V of a store to zero, or give each key and each value of a chunk that of another of its tokens.

    Keys and values are shuffled apart from each other: attention does not mind the order of pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    for block_XHTD in _blocks(store):  # X: keys and values of the layers
        if kind == "zeroed":
            block_XHTD.zero_()
            continue
        for tensor_HTD in block_XHTD:
            others = torch.randperm(tensor_HTD.shape[1], generator=generator)
            tensor_HTD.copy_(tensor_HTD[:, others.to(tensor_HTD.device)])


def damaged(kind: str) -> Change:
    """A change: within it, the K/V of a store is "zeroed" or "shuffled"."""

    @contextmanager
    def change(store: ChunkStore) -> Iterator[None]:
        before = [block.clone() for block in _blocks(store)]
        damage(store, kind)
        try:
            yield
        finally:
            for block, kept in zip(_blocks(store), before, strict=True):
                block.copy_(kept)

    return change


def _blocks(store: ChunkStore) -> Iterator[torch.Tensor]:
    for chunk in store.inspect().chunks.values():
        yield from chunk.kv.tensors


@contextmanager
def keys_not_rotated(_store: ChunkStore) -> Iterator[None]:
    """A change: within it, moved keys stay as they were stored. The model has to be probed for rotation before it."""
    rotate = KeyRotation.rotate

    def copy(
        _rotation: KeyRotation, _layer_idx: int, keys: torch.Tensor, _shift: object, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return keys if out is None or out is keys else out.copy_(keys)

    KeyRotation.rotate = copy  # type: ignore[assignment]
    try:
        yield
    finally:
        KeyRotation.rotate = rotate
