"""Kernel that dequantizes 4-bit weights to memory, for products with many rows."""

import triton
import triton.language as tl

from kvboost_hf.offload.awq.triton.words import weights_of


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
