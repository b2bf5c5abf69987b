"""Words of eight weights as numbers, in registers."""

import triton
import triton.language as tl


@triton.jit
def spread(words):
    """[…, n] words as […, 8 n], where each is there once for each of its columns."""
    for _ in tl.static_range(3):
        words = tl.interleave(words, words)
    return words


@triton.jit
def numbers(words, column):
    """The codes of columns, from their words: float32, 2 ** 23 + code / unit.

    They stay where they are in the word, among the last bits of 2 ** 23: that takes fewer instructions than to shift
    and to convert each. Only the three that are higher than these bits are shifted, all at once.
    """
    words = tl.where(_shift(column) < 20, words, words >> 12)
    return ((words & (15 << _place(column))) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def unit(column):
    """What a difference of `numbers` is a multiple of, as a factor that takes it away: a power of two."""
    return ((127 - _place(column)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _shift(column):
    """The bit that the code of a column begins at: 0, 16, 4, 20, 8, 24, 12, 28."""
    return (column & 1) * 16 + (column & 6) * 2


@triton.jit
def _place(column):
    """The bit at which `numbers` reads it."""
    shift = _shift(column)
    return tl.where(shift < 20, shift, shift - 12)
