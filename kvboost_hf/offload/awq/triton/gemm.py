"""Kernel that multiplies a few rows by 4-bit weights, which become numbers of the dtype of the rows in registers.

A row of words is read in halfwords of four codes. Nibble j of halfword c is column `c // 2 * 8 + 2 * j + c % 2`, so
that a tile of halfwords becomes four tiles of weights of its shape and layout, and no number moves to another lane.
"""

import triton
import triton.language as tl

from kvboost_hf.offload.awq.triton.halfwords import weights
from kvboost_hf.offload.awq.triton.parts import is_last
from kvboost_hf.triton_dot import dot


@triton.jit(do_not_specialize=["rows", "groups"])
def gemm(
    x, qweight, qzeros, scales, out, sums, arrived, stride, halves, rows, groups,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    SCALED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_M rows and BLOCK_N columns, and for one part of the groups.

    Codes less zeros, which are exact, are multiplied by, and the sums of each group by scales, in float32. With SCALED
    weights are multiplied by scales instead, and rounded to the dtype of `x`: that takes one sum in registers in place
    of two. With SPLIT the last program adds the parts up; one of them is [4, rows, halves]. Programs that follow each
    other take the same weights. `halves` is the number of halfwords in a row of words.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile_m, tile_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    half = tile_n * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    there = half < halves
    column = half // 2 * 8 + half % 2  # of the first nibble
    inside = (row[:, None] < rows) & there[None, :]
    codes, zeros = qweight.to(tl.pointer_type(tl.int16)), qzeros.to(tl.pointer_type(tl.int16))
    result: tl.tuple = ()
    for _ in tl.static_range(4):
        result += (tl.zeros([BLOCK_M, BLOCK_N // 4], tl.float32),)
    part = tl.cdiv(groups, tl.num_programs(1))
    low = part * tl.program_id(1)
    for group in range(low, tl.minimum(low + part, groups)):
        zero = tl.load(zeros + group * halves + half, mask=there, other=0)
        scale: tl.tuple = ()
        found: tl.tuple = ()
        for j in tl.static_range(4):
            scale += (tl.load(scales + group * (4 * halves) + column + 2 * j, mask=there, other=0.0)[None, :],)
            found += (result[j] if SCALED else tl.zeros([BLOCK_M, BLOCK_N // 4], tl.float32),)
        for step in tl.static_range(GROUP // BLOCK_K):
            k = group * GROUP + step * BLOCK_K + tl.arange(0, BLOCK_K)
            values = tl.load(x + row[:, None].to(tl.int64) * stride + k[None, :], mask=row[:, None] < rows, other=0.0)
            held = tl.load(codes + k[:, None] * halves + half[None, :], mask=there[None, :], other=0)
            tiles = weights(held, zero[None, :], scale if SCALED else None, dtype, PTX)
            grown: tl.tuple = ()
            for j in tl.static_range(4):
                grown += (dot(values, tiles[j], found[j]),)
            found = grown
        total: tl.tuple = ()
        for j in tl.static_range(4):
            total += (found[j] if SCALED else found[j] * scale[j].to(tl.float32) + result[j],)
        result = total
    if SPLIT:
        apart = tl.cast(rows, tl.int64) * halves
        here = sums + row[:, None] * halves + half[None, :]
        for j in tl.static_range(4):
            tl.store(here + (tl.program_id(1) * 4 + j) * apart, result[j], mask=inside)
        if is_last(arrived):
            for j in tl.static_range(4):
                whole = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.float32)
                for other in tl.range(0, tl.num_programs(1), loop_unroll_factor=4):  # else loads wait for each other
                    whole += tl.load(here + (other * 4 + j) * apart, mask=inside, other=0.0, cache_modifier=".cg")
                _store(out, whole, row, column + 2 * j, 4 * halves, inside)
    else:
        for j in tl.static_range(4):
            _store(out, result[j], row, column + 2 * j, 4 * halves, inside)


@triton.jit
def _store(out, numbers, row, column, columns, inside):
    tl.store(out + row[:, None] * columns + column[None, :], numbers.to(out.dtype.element_ty), mask=inside)
