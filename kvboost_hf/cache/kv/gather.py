"""Describes columns of stored chunks, and where they go, in one table that a kernel reads."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kvboost_hf.cache.kv import transfer
from kvboost_hf.cache.kv.layer_kv import LayerKV

_ALIGNED_BYTES = 16
_FIELDS = (
    5  # row, first column, columns, first token in the chunk, tokens of the chunk; then an address for each block
)


class Run(NamedTuple):
    """Consecutive tokens of one chunk, and where they go."""

    kv: LayerKV | None  # None for columns that are zeroed
    at: int  # first token in the chunk
    length: int  # tokens
    row: int
    column: int  # of the first token, among those that a layer has opened


def can_gather(chunks: Sequence[LayerKV], device: torch.device) -> bool:
    """Whether a kernel can read the tensors of chunks, as they are, where they are.

    They must have arrived: their planes are where they are going to stay.

    Args:
        chunks: Their K/V.
        device: The device of the layers, with memory of its own.
    """
    link = transfer.link
    return all(
        block.codec.lossless
        and block.blob is None
        and block.shape[1] == kv.blocks[0].shape[1]
        and plane.data_ptr() % _ALIGNED_BYTES == 0
        and (plane.device == device or link.is_pinned(plane))
        for kv in chunks
        for block in kv.blocks
        for plane in block.planes.values()
    ) and all(kv.is_like(chunks[0]) for kv in chunks[1:])


def table_of(runs: Iterable[Run], like: LayerKV, device: torch.device) -> torch.Tensor:
    """Make the table [runs, 5 + blocks] of runs, int64, on a device: one copy, behind the current stream's work.

    Args:
        runs: All of them, of chunks that `can_gather` accepts.
        like: One of the chunks.
        device: The device.
    """
    addresses: dict[int, tuple[int, ...]] = {}
    rows: list[tuple[int, ...]] = []
    for kv, at, length, row, column in runs:
        if kv is None:
            rows.append((row, column, length, at, 0, *(0 for _ in like.blocks)))
            continue
        own = addresses.get(id(kv))
        if own is None:
            own = addresses[id(kv)] = tuple(_plane(block.planes).data_ptr() for block in kv.blocks)
        rows.append((row, column, length, at, kv.blocks[0].shape[1], *own))
    shape = torch.Size((len(rows), _FIELDS + len(like.blocks)))
    host = transfer.link.pinned(shape, torch.int64)
    host.copy_(torch.tensor(rows, dtype=torch.int64).view(shape))
    return transfer.link.send(host, device)


def places_in_table(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The columns of the table with the addresses of blocks, in place of the numbers of the blocks."""
    return [(_FIELDS + block, at) for block, at in places]


def planes_of(chunks: Iterable[LayerKV]) -> list[torch.Tensor]:
    """The tensors that a kernel reads."""
    return [_plane(block.planes) for kv in chunks for block in kv.blocks]


def _plane(planes: dict[str, torch.Tensor]) -> torch.Tensor:
    (plane,) = planes.values()
    return plane
