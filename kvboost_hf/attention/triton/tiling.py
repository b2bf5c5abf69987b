"""Chooses the tiles of a kernel, and the number of parts into which it splits the columns, by shapes alone."""

from dataclasses import dataclass
from functools import cache

import torch
from triton import knobs

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_DIM = 256
MAX_SPLITS = 128  # what `combine` merges at once
_MIN_BLOCKS = 2  # of a part: merging costs as much as a block
_STEP = 32  # columns: tilings differ between multiples of them only, as blocks and their parts do


def is_taken(query: torch.Tensor, dim: int) -> bool:
    """Whether there are kernels for the dtype and the device of a query, and for vectors of so many dimensions."""
    return query.dtype in _DTYPES and dim <= _MAX_DIM and (query.is_cuda or bool(knobs.runtime.interpret))


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """The properties of a device that a tiling depends on."""

    processors: int
    shared_bytes: int  # that one program may use
    interpreted: bool = False  # by Triton's interpreter: a block costs the same whatever its size, tests want several


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The tiles of one call, and its parts."""

    block_m: int  # rows of a program: queries times the heads that share keys
    block_n: int  # columns that it takes at a time
    warps: int
    stages: int  # blocks that are on their way at a time
    border_stages: int  # the same at borders, which are short
    splits: int = 1  # parts of the columns, each with programs of its own

    def grid(self, query: torch.Tensor, kv_heads: int) -> tuple[int, int, int]:
        """The programs of a kernel: tiles of queries that share keys, heads of keys in the batch, and parts."""
        batch, heads, queries, _ = query.shape
        return -(-queries * (heads // kv_heads) // self.block_m), batch * kv_heads, self.splits


def empty_parts(query: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate [splits, batch, queries, heads, head_dim] and [splits, batch, heads, queries], float32."""
    batch, heads, queries, head_dim = query.shape
    out = query.new_empty((splits, batch, queries, heads, head_dim), dtype=torch.float32)
    return out, query.new_empty((splits, batch, heads, queries), dtype=torch.float32)


@cache
def device_of(device: torch.device) -> Device:
    """Return the properties of a device; a CPU has one processor."""
    if device.type == "cpu":
        return Device(processors=1, shared_bytes=64 * 1024, interpreted=True)
    found = torch.cuda.get_device_properties(device)
    return Device(found.multi_processor_count, found.shared_memory_per_multiprocessor - 1024)


def power_of_2(x: int) -> int:
    """Round up to a power of two; Triton's own function takes 20 times as long."""
    return 1 << (x - 1).bit_length()


@cache
def padded_dim(dim: int) -> int:
    """The dimensions of a tile for vectors of `dim` dimensions."""
    return max(16, power_of_2(dim))


def round_columns(columns: int) -> int:
    """Round columns up, so that a cache that grows does not get a new tiling at each token."""
    return -(-columns // _STEP) * _STEP


def plan_tiling(rows: int, dim: int, itemsize: int, device: Device, *, has_matrix: bool = False) -> Tiling:
    """Choose tiles that fit into registers and shared memory.

    Args:
        rows: Queries times the heads that share keys.
        dim: The larger of head_dim and value_dim.
        itemsize: Bytes of a number in keys and values.
        device: The device of the call.
        has_matrix: There is a mask of queries and columns, which takes registers for each column of a tile.
    """
    if device.interpreted:
        return Tiling(block_m=32, block_n=16, warps=1, stages=1, border_stages=1)
    padded = padded_dim(dim)
    if itemsize == 4:  # without tensor cores
        block_n, warps = 32 if padded <= 128 else 16, 4 if padded <= 64 else 8
        return Tiling(block_m=16, block_n=block_n, warps=warps, stages=2, border_stages=2)
    block_m = min(max(16, power_of_2(rows)), 128 if padded <= 128 else 64)
    sums = block_m * padded  # float32 in registers, beside the scores and, before sm_90, the keys of a block
    is_tight = sums > 8192 and (has_matrix or device.shared_bytes < 200 * 1024)
    block_n = 32 if padded == 256 or is_tight else 64
    room = (device.shared_bytes - sums * itemsize) // (2 * block_n * padded * itemsize)
    stages = max(1, min(2 if padded == 256 else 3, room))
    border_stages = 1 if padded == 256 else stages  # a second pipeline takes registers, too
    warps = 8 if sums >= 8192 else 4
    return Tiling(block_m=block_m, block_n=block_n, warps=warps, stages=stages, border_stages=border_stages)


def plan_splits(programs: int, columns: int, block_n: int, device: Device, *, per_processor: int = 2) -> int:
    """Choose the number of parts of the columns, so that a few queries keep all processors busy.

    Args:
        programs: The programs without parts.
        columns: The most that a query sees.
        block_n: Columns that a program takes at a time.
        device: The device of the call.
        per_processor: Programs that fit onto a processor at a time.
    """
    room = device.processors * per_processor // max(programs, 1)
    return max(1, min(room, -(-columns // (block_n * _MIN_BLOCKS)), MAX_SPLITS))
