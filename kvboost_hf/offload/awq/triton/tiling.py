"""Chooses the tiles of a product, and the parts it is split into, from its shapes."""

from dataclasses import dataclass, replace

# For more rows, weights are dequantized to memory for PyTorch's own product, which moves 4.5 bytes for each, not
# half a byte. Up to here one takes 2 to 8 instructions in registers. benchmarks/awq.py measures both ways.
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
    # Whether weights are multiplied by scales, in place of the sums of a group. A weight is then off by at most 2**-11
    # of itself with float16, and by 2**-7 with bfloat16, in which its scale is rounded first; else none is rounded.
    scaled: bool = False


def plan_tiling(
    rows: int, in_features: int, out_features: int, group_size: int, *, processors: int, tile_rows: int
) -> Tiling:
    """Tiles that fit into registers and shared memory, and parts that keep all processors busy.

    Args:
        rows: Of the left factor.
        in_features: A multiple of the group size.
        out_features: A multiple of 8.
        group_size: 32, 64 or 128.
        processors: Of the device.
        tile_rows: The most rows of a tile for its tensor cores: 32, 64 or 128; 0 where they cannot multiply the dtype.
    """
    if rows == 1:
        steps = -(-in_features // (4 * group_size))  # four groups at a time, one for each warp
        # Of a row of words one line of the cache, or half of one where this leaves processors without work.
        block_n, block_k = (256, 16) if -(-out_features // 256) * steps >= processors else (128, 32)
        parts = _parts(-(-out_features // block_n), steps, 12 * processors)
        return Tiling(block_m=1, block_n=block_n, block_k=block_k, warps=4, stages=1, parts=parts)
    groups = in_features // group_size
    for tile in _tiles(rows, group_size, tile_rows):
        tiles = -(-rows // tile.block_m) * -(-out_features // tile.block_n)
        if tiles * min(groups, _MOST_PARTS) >= processors:
            break
    # Programs that a processor has registers for.
    at_a_time = {16: 3, 32: 3, 64: 8 // tile.warps, 128: 1}[tile.block_m]
    return replace(tile, parts=_parts(tiles, groups, min(at_a_time * processors, _MOST_PARTS * tiles)))


def _tiles(rows: int, group_size: int, tile_rows: int) -> list[Tiling]:
    """The tilings for several rows, those first that take the fewest instructions; the last has the most programs.

    A warp has 64 columns: 16 halfwords of each row of words. Of other tiles Triton has each warp make weights that
    another one makes, too, or needs more registers than there are. A test counts instructions.
    """
    block_m = max(16, 1 << (rows - 1).bit_length())
    if not tile_rows:
        return [Tiling(block_m=min(block_m, 32), block_n=64, block_k=32, warps=4, stages=3, parts=1)]
    block_m, block_k, scaled = min(block_m, tile_rows), min(64, group_size), block_m > 16
    found = []
    if block_m > 32 and tile_rows == 128:  # weights go through shared memory
        given = {"block_n": 256, "block_k": 32, "warps": block_m // 16, "stages": 3}
        found = [Tiling(block_m=block_m, **given, parts=1, scaled=True)]
    elif block_m > 32:
        found = [Tiling(block_m=64, block_n=512, block_k=block_k, warps=8, stages=3, parts=1, scaled=True)]
    for warps in (4, 2):
        given = {"block_n": 64 * warps, "block_k": block_k, "warps": warps, "stages": 3}
        found.append(Tiling(block_m=min(block_m, 32), **given, parts=1, scaled=scaled))
    return found


def scratch_columns(in_features: int, out_features: int, itemsize: int) -> int:
    """Columns of a weight that are dequantized at a time, to `itemsize` bytes each: all, or a multiple of 256."""
    most = max(1, SCRATCH_BYTES // (256 * in_features * itemsize)) * 256
    times = -(-out_features // most)
    return min(out_features, -(-out_features // (256 * times)) * 256)


def _parts(tiles: int, steps: int, programs: int) -> int:
    """As many parts as programs run at a time, none of them empty."""
    most = max(1, min(programs // tiles, steps))
    return -(-steps // -(-steps // most))
