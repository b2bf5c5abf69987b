"""Dequantizes words of eight 4-bit weights in registers."""

import triton
import triton.language as tl


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
