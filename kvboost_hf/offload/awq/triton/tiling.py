"""Chooses the tiles of a product, and the parts it is split into, from its shapes."""

from dataclasses import dataclass

# For more rows, weights are dequantized to memory for PyTorch's own product: a second tile of rows took as long as
# both of these (benchmarks/results/awq-cuda.md).
MOST_ROWS = 128
SCRATCH_BYTES = 128 << 20  # of dequantized weights at a time
_MOST_PARTS = 16  # of a product of several rows: the last program adds up 4 at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The tiling of one call."""

    block_m: int  # rows of a program; 1 selects the gemv kernel
    block_n: int  # columns of a program
    block_k: int  # inputs that are summed at a time, within a group
    warps: int
    stages: int  # blocks that are loaded ahead
    parts: int  # of the sum, each with programs of its own


def plan_tiling(
    rows: int, in_features: int, out_features: int, group_size: int, *, processors: int, tensor_cores: bool
) -> Tiling:
    """Tiles that fit into registers and shared memory, and parts that keep all processors busy.

    Args:
        rows: Of the left factor.
        in_features: A multiple of the group size.
        out_features: A multiple of 8.
        group_size: 32, 64 or 128.
        processors: Of the device.
        tensor_cores: Whether Triton can use its tensor cores for the dtype.
    """
    if rows == 1:
        steps = -(-in_features // (4 * group_size))  # four groups at a time, one for each warp
        # Of a row of words one line of the cache, or half of one where this leaves processors without work.
        block_n, block_k = (256, 16) if -(-out_features // 256) * steps >= processors else (128, 32)
        parts = _parts(-(-out_features // block_n), steps, 12 * processors)
        return Tiling(block_m=1, block_n=block_n, block_k=block_k, warps=4, stages=1, parts=parts)
    block_m = min(max(16, 1 << (rows - 1).bit_length()), 128 if tensor_cores else 32)
    block_n, block_k = (128, min(64, group_size)) if tensor_cores else (64, 32)
    warps, stages = 8 if block_m == 128 else 4, 4 if block_m <= 32 else 3
    at_a_time = {16: 3, 32: 2, 64: 2, 128: 1}[block_m]  # programs of a processor, by their registers
    tiles = -(-rows // block_m) * -(-out_features // block_n)
    parts = _parts(tiles, in_features // block_k, min(at_a_time * processors, _MOST_PARTS * tiles))
    return Tiling(block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=stages, parts=parts)


def scratch_columns(in_features: int, out_features: int, itemsize: int) -> int:
    """Columns of a weight that are dequantized at a time, to `itemsize` bytes each: all, or a multiple of 256."""
    most = max(1, SCRATCH_BYTES // (256 * in_features * itemsize)) * 256
    times = -(-out_features // most)
    return min(out_features, -(-out_features // (256 * times)) * 256)


def _parts(tiles: int, steps: int, programs: int) -> int:
    """As many parts as programs run at a time, none of them empty."""
    most = max(1, min(programs // tiles, steps))
    return -(-steps // -(-steps // most))
