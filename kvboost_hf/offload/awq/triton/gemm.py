"""Kernel that multiplies a few rows by 4-bit weights, which it dequantizes in registers to the dtype of the rows."""

import triton
import triton.language as tl

from kvboost_hf.offload.awq.triton.parts import is_last
from kvboost_hf.offload.awq.triton.words import weights_of
from kvboost_hf.triton_dot import dot


@triton.jit(do_not_specialize=["rows", "groups"])
def gemm(
    x, qweight, qzeros, scales, out, sums, arrived, stride, words, rows, groups,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_M rows and BLOCK_N columns, and one part of what is summed up.

    With SPLIT the last program adds the parts up. Programs that follow each other take the same weights.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile_m, tile_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tile_n * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    inside = (row[:, None] < rows) & (column < 8 * words)[None, :]
    result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = groups * (GROUP // BLOCK_K)
    part = tl.cdiv(steps, tl.num_programs(1))
    low = part * tl.program_id(1)
    for step in range(low, tl.minimum(low + part, steps)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        values = tl.load(x + row[:, None] * stride + k[None, :], mask=row[:, None] < rows, other=0.0)
        weights = weights_of(qweight, qzeros, scales, k[:, None], step * BLOCK_K // GROUP, word, column, words)
        result = dot(values, weights.to(values.dtype), result)
    at = row[:, None] * (8 * words) + column[None, :]
    if SPLIT:
        apart = tl.cast(rows, tl.int64) * (8 * words)  # one part from the next
        tl.store(sums + tl.program_id(1) * apart + at, result, mask=inside)
        if is_last(arrived):
            result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.range(0, tl.num_programs(1), loop_unroll_factor=4):  # whose loads wait for each other else
                result += tl.load(sums + other * apart + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
