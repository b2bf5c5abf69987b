"""Tiles of a product by 4-bit weights: those of Triton's kernels, planned without Triton, and those of PyTorch's.

`awq_matmul_torch` multiplies with PyTorch's own operators, on any device. Each byte holds two nibbles. The lower
nibbles are one half of the columns, the upper ones the other. Each half is unpacked by a single operator, and the
columns of the result, which is much smaller, are reordered at the end.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

_TILE = 1 << 21  # weights that a CPU unpacks at a time, at least one group of rows: 8 MiB as float32
_UNPACKED_BYTES = 5  # of a weight: as uint8 and as float32
_FEW = 8  # tokens; for fewer it is cheaper to scale the products of each group than its weights
# For more rows, weights are dequantized to memory for PyTorch's own product, which moves 4.5 bytes for each, not
# half a byte. Up to here one takes 2 to 8 instructions in registers. benchmarks/awq.py measures both ways.
MOST_ROWS = 128
SCRATCH_BYTES = 128 << 20  # of dequantized weights at a time
_MOST_PARTS = 16  # of a product of several rows: the last program adds up 4 at a time


def awq_matmul_torch(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply by 4-bit weights.

    Products and sums are float32 whatever the dtype of `x`. The order of sums depends on the shapes alone.

    Args:
        x: [tokens, in_features], of any float dtype.
        qweight: int32 [in_features, out_features / 8], in the layout `gemm`.
        qzeros: int32 [groups, out_features / 8].
        scales: float16 [groups, out_features].

    Returns:
        [tokens, out_features], in the dtype of `x`.
    """
    with torch.autocast(x.device.type, enabled=False):
        steps = _halves(scales.float())
        rows = len(qweight) // len(scales)
        grouped = x.float().contiguous().view(len(x), len(scales), rows).transpose(0, 1)
        sums = -(grouped.sum(2).T @ (_nibbles(qzeros).float() * steps))
        for tile, levels in _unpacked_tiles(qweight, len(scales)):
            if len(x) < _FEW:
                sums += (grouped[tile] @ levels).mul_(steps[:, tile, None]).sum(1)
            else:
                weights = levels.mul_(steps[:, tile, None]).flatten(1, 2)
                sums.baddbmm_(grouped[tile].transpose(0, 1).flatten(1).expand(2, -1, -1), weights)
        return _whole(sums).to(x.dtype)


def awq_matmul_transposed_torch(
    grad: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply by the transposed weights: [tokens, out_features] to [tokens, in_features], in the dtype of `grad`."""
    with torch.autocast(grad.device.type, enabled=False):
        steps, halves = _halves(scales.float()), _halves(grad.float())
        zeros = (_nibbles(qzeros).float() * steps).transpose(1, 2)
        sums = -(halves @ zeros).sum(0)[..., None].repeat(1, 1, len(qweight) // len(scales))  # tokens, groups, rows
        for tile, levels in _unpacked_tiles(qweight, len(scales)):
            weights = levels.mul_(steps[:, tile, None]).flatten(1, 2).transpose(1, 2)
            sums[:, tile] += (halves @ weights).sum(0).view_as(sums[:, tile])
        return sums.flatten(1).to(grad.dtype)


def tile_weights(device: torch.device) -> int:
    """Weights that are unpacked at a time: few for the caches of a CPU, and on a GPU, for few launches, many."""
    return _TILE if device.type == "cpu" else SCRATCH_BYTES // _UNPACKED_BYTES


def scratch_bytes(tokens: int, in_features: int, out_features: int, group_size: int) -> int:
    """Bytes that `awq_matmul_torch` takes on a GPU at its peak, beside its result.

    These are a tile of unpacked weights, its inputs or its products, zeros and scales, all inputs and all sums.
    """
    tile = min(max(SCRATCH_BYTES // _UNPACKED_BYTES, group_size * out_features), in_features * out_features)
    of_tile = tile // group_size if tokens < _FEW else tile // out_features  # numbers of each token
    numbers = tokens * (in_features + 2 * out_features + of_tile) + 5 * (in_features // group_size) * out_features
    return _UNPACKED_BYTES * tile + torch.float32.itemsize * numbers


def _unpacked_tiles(qweight: torch.Tensor, groups: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Groups of rows, and their unpacked levels, float32 [2, groups, rows, out / 2], valid until the next ones."""
    octets = qweight.view(torch.uint8).view(groups, -1, 4 * qweight.shape[1])
    count = min(groups, max(1, tile_weights(qweight.device) // (2 * octets[0].numel())))
    nibbles = torch.empty(2 * octets[:count].numel(), dtype=torch.uint8, device=qweight.device)
    levels = torch.empty_like(nibbles, dtype=torch.float32)
    for start in range(0, groups, count):
        part = octets[start : start + count]
        unpacked = _nibbles(part, out=nibbles[: 2 * part.numel()].view(2, *part.shape))
        yield slice(start, start + len(part)), levels[: unpacked.numel()].view(unpacked.shape).copy_(unpacked)


def _nibbles(words: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The lower and the upper nibble of each byte, uint8 [2, ...]."""
    octets = words.view(torch.uint8)
    out = octets.new_empty((2, *octets.shape)) if out is None else out
    torch.bitwise_and(octets, 15, out=out[0])
    torch.bitwise_right_shift(octets, 4, out=out[1])
    return out


def _halves(columns: torch.Tensor) -> torch.Tensor:
    """Reorder columns [rows, out] as nibbles are, [2, rows, out / 2].

    Column `4 a + 2 h + b` of a word is in half `h`, in byte `2 b + a`.
    """
    return columns.reshape(len(columns), columns.shape[1] // 8, 2, 2, 2).permute(3, 0, 1, 4, 2).flatten(2)


def _whole(halves: torch.Tensor) -> torch.Tensor:
    """Undo `_halves`."""
    return halves.view(2, halves.shape[1], halves.shape[2] // 4, 2, 2).permute(1, 2, 4, 0, 3).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiling:
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
) -> ProductTiling:
    """Tiles that fit into registers and shared memory, and parts that keep all processors busy.

    Args:
        rows: The number of rows of the left factor.
        in_features: A multiple of the group size.
        out_features: A multiple of 8.
        group_size: 32, 64 or 128.
        processors: The number of processors of the device.
        tile_rows: The most rows of a tile for its tensor cores: 32, 64 or 128; 0 where they cannot multiply the dtype.
    """
    if rows == 1:
        steps = -(-in_features // (4 * group_size))  # four groups at a time, one for each warp
        # Of a row of words one line of the cache, or half of one where this leaves processors without work.
        block_n, block_k = (256, 16) if -(-out_features // 256) * steps >= processors else (128, 32)
        parts = _split_into(-(-out_features // block_n), steps, 12 * processors)
        return ProductTiling(block_m=1, block_n=block_n, block_k=block_k, warps=4, stages=1, parts=parts)
    groups = in_features // group_size
    for tile in _tilings(rows, group_size, tile_rows):
        tiles = -(-rows // tile.block_m) * -(-out_features // tile.block_n)
        if tiles * min(groups, _MOST_PARTS) >= processors:
            break
    # Programs that a processor has registers for.
    at_a_time = {16: 3, 32: 3, 64: 8 // tile.warps, 128: 1}[tile.block_m]
    return replace(tile, parts=_split_into(tiles, groups, min(at_a_time * processors, _MOST_PARTS * tiles)))


def _tilings(rows: int, group_size: int, tile_rows: int) -> list[ProductTiling]:
    """The tilings for several rows, those first that take the fewest instructions; the last has the most programs.

    A warp has 64 columns: 16 halfwords of each row of words. Of other tiles Triton has each warp make weights that
    another one makes, too, or needs more registers than there are. A test counts instructions.
    """
    block_m = max(16, 1 << (rows - 1).bit_length())
    if not tile_rows:
        return [ProductTiling(block_m=min(block_m, 32), block_n=64, block_k=32, warps=4, stages=3, parts=1)]
    block_m, block_k, scaled = min(block_m, tile_rows), min(64, group_size), block_m > 16
    found = []
    if block_m > 32 and tile_rows == 128:  # weights go through shared memory
        given = {"block_n": 256, "block_k": 32, "warps": block_m // 16, "stages": 3}
        found = [ProductTiling(block_m=block_m, **given, parts=1, scaled=True)]
    elif block_m > 32:
        found = [ProductTiling(block_m=64, block_n=512, block_k=block_k, warps=8, stages=3, parts=1, scaled=True)]
    for warps in (4, 2):
        given = {"block_n": 64 * warps, "block_k": block_k, "warps": warps, "stages": 3}
        found.append(ProductTiling(block_m=min(block_m, 32), **given, parts=1, scaled=scaled))
    return found


def scratch_columns(in_features: int, out_features: int, itemsize: int) -> int:
    """Columns of a weight that are dequantized at a time, to `itemsize` bytes each: all, or a multiple of 256."""
    most = max(1, SCRATCH_BYTES // (256 * in_features * itemsize)) * 256
    times = -(-out_features // most)
    return min(out_features, -(-out_features // (256 * times)) * 256)


def _split_into(tiles: int, steps: int, programs: int) -> int:
    """As many parts as programs run at a time, none of them empty."""
    most = max(1, min(programs // tiles, steps))
    return -(-steps // -(-steps // most))
