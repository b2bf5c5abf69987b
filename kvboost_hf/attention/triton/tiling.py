"""How large the tiles of a kernel are, and into how many parts it splits the columns: by shapes alone."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton import knobs

MAX_SPLITS = 128  # what `combine` merges at once
_MIN_BLOCKS = 2  # of a part: merging costs as much as a block


@dataclass(frozen=True, slots=True)
class Device:
    """What a tiling depends on."""

    processors: int
    shared_bytes: int  # that one program may use


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How one call is cut."""

    block_m: int  # rows of a program: queries times the heads that share keys
    block_n: int  # columns that it takes at a time
    warps: int
    stages: int  # blocks that are on their way at a time
    splits: int = 1  # parts of the columns, each with programs of its own


@cache
def device_of(device: torch.device) -> Device:
    """The processors of a device; of one only, on a CPU."""
    if device.type == "cpu":
        return Device(processors=1, shared_bytes=64 * 1024)
    found = torch.cuda.get_device_properties(device)
    return Device(found.multi_processor_count, found.shared_memory_per_multiprocessor - 1024)


def plan_tiling(rows: int, dim: int, itemsize: int, device: Device) -> Tiling:
    """Tiles that fit into registers and shared memory.

    Args:
        rows: Queries times the heads that share keys.
        dim: The larger of head_dim and value_dim.
        itemsize: Of keys and values, in bytes.
        device: Where.
    """
    if knobs.runtime.interpret:  # where a block costs the same whatever its size, but tests want several
        return Tiling(block_m=32, block_n=16, warps=1, stages=1)
    padded = max(16, triton.next_power_of_2(dim))
    if itemsize == 4:  # without tensor cores
        return Tiling(block_m=16, block_n=32, warps=4, stages=2)
    if rows <= 64:
        block_m, block_n, warps = max(16, triton.next_power_of_2(rows)), 64, 4
    else:
        block_m, block_n, warps = 128, 64, 8 if padded > 64 else 4
    stage = 2 * block_n * padded * itemsize
    spare = device.shared_bytes - block_m * padded * itemsize
    return Tiling(block_m=block_m, block_n=block_n, warps=warps, stages=max(1, min(3, spare // stage)))


def plan_splits(programs: int, columns: int, block_n: int, device: Device, *, per_processor: int = 2) -> int:
    """Into how many parts columns go, so that a few queries keep all processors busy.

    Args:
        programs: There are without parts.
        columns: That a query sees at most.
        block_n: Columns that a program takes at a time.
        device: Where.
        per_processor: Programs that fit onto a processor at a time.
    """
    room = device.processors * per_processor // max(programs, 1)
    return max(1, min(room, triton.cdiv(columns, block_n * _MIN_BLOCKS), MAX_SPLITS))
