"""One row times weights of four bits: as fast as these can be read."""

import triton
import triton.language as tl

from kvboost_hf.offload.awq.triton.words import numbers, spread, unit


@triton.jit
def gemv(
    x, qweight, qzeros, scales, out, groups, words,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N columns, and one part of the groups.

    Zeros are taken away from each weight, which is exact, and scales are multiplied by once for each group.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.program_id(0) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    there = word < words
    sums = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    part = tl.cdiv(groups, tl.num_programs(1))
    low = part * tl.program_id(1)
    for group in range(low, tl.minimum(low + part, groups)):
        zero = numbers(spread(tl.load(qzeros + group * words + word, mask=there, other=0)), column)
        found = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        for step in tl.static_range(GROUP // BLOCK_K):
            k = group * GROUP + step * BLOCK_K + tl.arange(0, BLOCK_K)
            held = tl.load(qweight + k[:, None] * words + word[None, :], mask=there[None, :], other=0)
            weights = numbers(spread(held), column[None, :]) - zero[None, :]
            found += tl.load(x + k).to(tl.float32)[:, None] * weights
        scale = tl.load(scales + group * (8 * words) + column, mask=column < 8 * words, other=0.0)
        sums += found * (scale.to(tl.float32) * unit(column))[None, :]
    at = out + tl.program_id(1) * (8 * words) + column
    tl.store(at, tl.sum(sums, 0).to(out.dtype.element_ty), mask=column < 8 * words)
