"""Rows times weights of four bits, which become numbers of the dtype of the rows in registers."""

import triton
import triton.language as tl

from kvboost_hf.offload.awq.triton.words import numbers, spread, unit
from kvboost_hf.triton_dot import dot

_TOGETHER = tl.constexpr(8)  # tiles of rows that take the same weights at a time, from the second-level cache


@triton.jit(do_not_specialize=["rows"])
def gemm(
    x, qweight, qzeros, scales, out, rows, stride, in_features, words,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_M rows and BLOCK_N columns, and one part of what is summed up."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(8 * words, BLOCK_N)
    program = tl.program_id(0)
    tile_m, tile_n = tl.swizzle2d(program // tiles_n, program % tiles_n, tiles_m, tiles_n, _TOGETHER)
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tile_n * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    there, inside = word < words, column < 8 * words
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = in_features // BLOCK_K
    part = tl.cdiv(steps, tl.num_programs(1))
    low = part * tl.program_id(1)
    for step in range(low, tl.minimum(low + part, steps)):
        k, group = step * BLOCK_K + tl.arange(0, BLOCK_K), step * BLOCK_K // GROUP
        values = tl.load(x + row[:, None] * stride + k[None, :], mask=row[:, None] < rows, other=0.0)
        held = tl.load(qweight + k[:, None] * words + word[None, :], mask=there[None, :], other=0)
        zero = numbers(spread(tl.load(qzeros + group * words + word, mask=there, other=0)), column)
        scale = tl.load(scales + group * (8 * words) + column, mask=inside, other=0.0).to(tl.float32) * unit(column)
        weights = (numbers(spread(held), column[None, :]) - zero[None, :]) * scale[None, :]
        sums = dot(values, weights.to(values.dtype), sums)
    at = (tl.program_id(1) * rows + row)[:, None] * (8 * words) + column[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=(row[:, None] < rows) & inside[None, :])
