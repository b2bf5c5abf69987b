"""How large the tiles of a product are, and into how many parts it is split: by shapes alone."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How one call is cut."""

    block_m: int  # rows of a program; 1 is a kernel of its own
    block_n: int  # columns
    block_k: int  # what is summed up at a time, within a group
    warps: int
    stages: int  # blocks that are on their way at a time
    parts: int  # of the sum, each with programs of its own

    def options(self) -> dict[str, Any]:
        """What the compiler is told."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


def plan_tiling(
    rows: int, in_features: int, out_features: int, group_size: int, *, processors: int, tensor_cores: bool
) -> Tiling:
    """Tiles that fit into registers and shared memory, and parts that keep all processors busy.

    Args:
        rows: Of what is multiplied.
        in_features: A multiple of the group size.
        out_features: A multiple of 8.
        group_size: 32, 64 or 128.
        processors: Of the device.
        tensor_cores: Whether it has some for the dtype that Triton knows of.
    """
    if rows == 1:
        block_n, block_k = 256, 16  # of a row of words, one line of the cache
        parts = _parts(-(-out_features // block_n), in_features // group_size, 3 * processors)
        return Tiling(block_m=1, block_n=block_n, block_k=block_k, warps=4, stages=1, parts=parts)
    block_m = min(max(16, 1 << (rows - 1).bit_length()), 128 if tensor_cores else 32)
    block_n, block_k = (128, min(64, group_size)) if tensor_cores else (64, 32)
    warps, stages = 8 if block_m == 128 else 4, 4 if block_m <= 32 else 3
    at_a_time = {16: 3, 32: 2, 64: 2, 128: 1}[block_m]  # programs of a processor, by their registers
    tiles = -(-rows // block_m) * -(-out_features // block_n)
    parts = _parts(tiles, in_features // block_k, at_a_time * processors)
    return Tiling(block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=stages, parts=parts)


def _parts(tiles: int, steps: int, programs: int) -> int:
    """As many as there is room for at a time, none of them empty."""
    most = max(1, min(programs // tiles, steps))
    return -(-steps // -(-steps // most))
