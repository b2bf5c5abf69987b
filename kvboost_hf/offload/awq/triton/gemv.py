"""Kernel that multiplies one row by 4-bit weights, limited by reading these."""

import triton
import triton.language as tl

from kvboost_hf.offload.awq.triton.parts import is_last
from kvboost_hf.offload.awq.triton.words import code_unit, codes, spread

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
