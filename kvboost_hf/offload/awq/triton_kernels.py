"""Triton kernels for 4-bit weights, for GPUs, and for CPUs by Triton's interpreter.

`gemv` multiplies one row, and is limited by reading the weights. It reads words of eight codes. `gemm` multiplies a
few rows by weights that become numbers of the dtype of the rows in registers. `dequantize` writes weights to memory,
for products with many rows.

`gemm` reads a row of words in halfwords of four codes. Nibble j of halfword c is column `c // 2 * 8 + 2 * j + c % 2`,
so that a tile of halfwords becomes four tiles of weights of its shape and layout, and no number moves to another lane.
On NVIDIA's GPUs a register holds two halfwords, and an instruction makes two numbers. Codes become the last bits of
normal numbers, from which zeros in the same form are subtracted: `1024 + code` in float16, 16 times the code in every
other nibble, and `128 + code` in bfloat16. All of these, and the differences, are exact, and none is so small that it
could be taken for 0. Zeros are subtracted before anything is summed, so that no sum loses bits to them, and rows with
infinities become what plain weights make of them. Elsewhere, and with float32, operations on single numbers compute
the same. Tests compare both on every halfword.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kvboost_hf.triton_launch import dot

GROUPS = tl.constexpr(4)  # that a program reads at a time, each warp its own
_LOADS = tl.constexpr(8)  # of words, that are sent for before the first is multiplied by
_PARTS = tl.constexpr(16)  # that the last program reads at a time


@triton.jit(do_not_specialize=["groups"])
def gemv(
    x, qweight, qzeros, scales, out, sums, arrived, words, groups,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N columns, and one part of the groups; with SPLIT the last program adds the parts up.

    A code is cut out of its word and stays where it is: among the last bits of a float32 it is a multiple of
    2 ** -149. So a weight takes two instructions, one to cut it out and one to multiply by it. `x` is enlarged in
    return, so that products are normal numbers; beyond 2 ** 63 it would become infinite. Zeros are taken away and
    scales multiplied by once for each group.
    """
    lanes: tl.constexpr = BLOCK_K // GROUPS
    loads: tl.constexpr = min(_LOADS, GROUP // lanes)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.program_id(0) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    there, inside = word < words, column < 8 * words
    row = tl.arange(0, BLOCK_K)[:, None]
    lane = row % lanes
    total = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    steps = tl.cdiv(groups, GROUPS)
    part = tl.cdiv(steps, tl.num_programs(1))
    low = part * tl.program_id(1)
    for step in range(low, tl.minimum(low + part, steps)):
        group = step * GROUPS + row // lanes
        real = group < groups
        group = tl.where(real, group, 0)
        found = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        for first in range(0, GROUP, loads * lanes):
            for each in tl.static_range(loads):
                k = group * GROUP + first + each * lanes + lane
                held = tl.load(qweight + k * words + word[None, :], mask=there[None, :], other=0)
                found += _enlarged(tl.load(x + k)) * codes(spread(held), column[None, :])
        k = group * GROUP + lane * (GROUP // lanes) + tl.arange(0, GROUP // lanes)[None, :]
        of_zero = tl.sum(_enlarged(tl.load(x + k)), 1, keep_dims=True)
        zero = tl.load(qzeros + group * words + word[None, :], mask=there[None, :], other=0)
        at = group * (8 * words) + column[None, :]
        scale = tl.load(scales + at, mask=real & inside[None, :], other=0.0).to(tl.float32)
        total += (found - of_zero * codes(spread(zero), column[None, :])) * scale
    result = tl.sum(total, 0) * code_unit(column)
    if SPLIT:
        tl.store(sums + tl.program_id(1) * (8 * words) + column, result, mask=inside)
        if is_last(arrived):
            rest = tl.zeros([_PARTS, BLOCK_N], tl.float32)
            for begin in range(0, tl.num_programs(1), _PARTS):
                other = begin + tl.arange(0, _PARTS)[:, None]
                mask = (other < tl.num_programs(1)) & inside[None, :]
                at = sums + other * (8 * words) + column[None, :]
                rest += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + column, tl.sum(rest, 0).to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _enlarged(x):
    return x.to(tl.float32) * 18446744073709551616.0  # 2 ** 64, as `code_unit` has it


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


@triton.jit(do_not_specialize=["first"])
def dequantize(
    qweight, qzeros, scales, out, words, width, first,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N of `width` columns, from the word `first` on, and one group of rows."""
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = 8 * first + place
    word = first + tl.program_id(0) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    group = tl.program_id(1)
    for step in range(0, GROUP, BLOCK_K):
        k = group * GROUP + step + tl.arange(0, BLOCK_K)[:, None]
        weights = weights_of(qweight, qzeros, scales, k, group, word, column, words)
        tl.store(out + k * width + place[None, :], weights.to(out.dtype.element_ty), mask=(place < width)[None, :])


@triton.jit
def weights_of(qweight, qzeros, scales, k, group, word, column, words):
    """Weights [k, column] as float32, for rows `k` [k, 1] of one group.

    Codes stay where they are in the word, among the last bits of 2 ** 23: that takes fewer instructions than to shift
    and to convert each. Zeros are taken away from each, which is exact.
    """
    there = word < words
    held = tl.load(qweight + k * words + word[None, :], mask=there[None, :], other=0)
    zero = _in_place(spread(tl.load(qzeros + group * words + word, mask=there, other=0)), column) | 0x4B000000
    scale = tl.load(scales + group * (8 * words) + column, mask=column < 8 * words, other=0.0).to(tl.float32)
    unit = ((127 - _place(column)) << 23).to(tl.float32, bitcast=True)
    numbers = (_in_place(spread(held), column[None, :]) | 0x4B000000).to(tl.float32, bitcast=True)
    return (numbers - zero.to(tl.float32, bitcast=True)[None, :]) * (scale * unit)[None, :]


@triton.jit
def codes(words, column):
    """The codes of columns, from their words: float32, code / unit * 2 ** -149, less than any normal number."""
    return _in_place(words, column).to(tl.float32, bitcast=True)


@triton.jit
def code_unit(column):
    """A power of two that takes away how small `codes` are, where the other factor was enlarged by 2 ** 64."""
    return ((127 + 149 - 64 - _place(column)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def spread(words):
    """[…, n] words as […, 8 n], where each is there once for each of its columns."""
    for _ in tl.static_range(3):
        words = tl.interleave(words, words)
    return words


@triton.jit
def _in_place(words, column):
    """The code of each column, where it is in its word; only the three highest are shifted, all at once."""
    words = tl.where(_shift(column) < 20, words, words >> 12)
    return words & (15 << _place(column))


@triton.jit
def _shift(column):
    """The bit that the code of a column begins at: 0, 16, 4, 20, 8, 24, 12, 28."""
    return (column & 1) * 16 + (column & 6) * 2


@triton.jit
def _place(column):
    """The bit at which it is cut out."""
    shift = _shift(column)
    return tl.where(shift < 20, shift, shift - 12)


@triton.jit
def weights(codes, zeros, scales, dtype: tl.constexpr, PTX: tl.constexpr):
    """Four tiles of `dtype`, one for each nibble of a tile of halfwords.

    Args:
        codes: int16 [k, halfwords].
        zeros: int16 [1, halfwords].
        scales: Four of float16 [1, halfwords] to multiply by, or None: then weights are codes less zeros.
        dtype: The dtype of the tiles.
        PTX: As `instructions` gives it, or None.
    """
    found: tl.tuple = ()
    if PTX is not None:
        numbers = _levels_in_place(codes, dtype, PTX)
        lowest = _levels_in_place(tl.broadcast_to(zeros, codes.shape), dtype, PTX)
        for j in tl.static_range(4):
            level = numbers[j] - lowest[j]
            if dtype == tl.float16 and j % 2:
                level = numbers[j] * 0.0625 - lowest[j] * 0.0625
            if scales is not None:
                level *= _pairs(scales[j], level)
            found += (level,)
    else:
        for j in tl.static_range(4):
            level = ((codes.to(tl.int32) >> (4 * j)) & 15) - ((zeros.to(tl.int32) >> (4 * j)) & 15)
            level = level.to(tl.float32)
            if scales is not None:
                level *= scales[j].to(tl.float32)
            found += (level.to(dtype),)
    return found


@triton.jit
def _levels_in_place(halfwords, dtype: tl.constexpr, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(PTX, "=&r,=&r,=&r,=&r,r", [halfwords], _four_times(dtype), is_pure=True, pack=2)


@triton.constexpr_function
def _four_times(dtype):
    return (dtype,) * 4


@triton.jit
def _pairs(scale, level):
    """Scales for a tile, as pairs in registers; without the instruction each product makes its own pairs."""
    spread = tl.broadcast_to(scale.to(level.dtype), level.shape)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [spread], level.dtype, is_pure=True, pack=2)


@cache
def instructions(dtype: torch.dtype) -> str:
    """Write the PTX for two halfwords, $4: their first nibbles as numbers of float16 or bfloat16, $0, and so on."""
    base, shifts = ("0x64006400", (0, 0, 8, 8)) if dtype == torch.float16 else ("0x43004300", (0, 4, 8, 12))
    lines = [".reg .b32 base, t", f"mov.b32 base, {base}"]
    for j, shift in enumerate(shifts):
        lines.append(f"shr.b32 t, $4, {shift}")
        lines.append(f"lop3.b32 ${j}, t, 0x{0xF << (4 * j - shift):04x}{0xF << (4 * j - shift):04x}, base, 0xea")
    return "\n".join(["{", *(f"{line};" for line in lines), "}"])


@triton.jit
def is_last(arrived):
    """Count a program whose part is stored; whether the parts of its tile are all there, for it to add up.

    Counters, of which each tile has one, are zero before and behind a kernel.
    """
    tl.debug_barrier()  # what all threads have stored comes before the count
    last = tl.atomic_add(arrived + tl.program_id(0), 1) == tl.num_programs(1) - 1
    if last:
        tl.store(arrived + tl.program_id(0), 0)
    return last
