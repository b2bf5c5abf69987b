"""Loads tiles of codes in Triton, with the lengths, scales and steps that belong to them."""

import triton
import triton.language as tl

from kvboost_hf.attention.triton.halfwords import number_in


@triton.jit
def start_of(plane, batch, block):
    """The address of a block in a plane, whose blocks are less than 2**31 numbers apart.

    Of two numbers of 32 bits the product takes one instruction; of 64 bits it takes four, for each plane and tile.
    """
    behind = tl.cast(block, tl.uint32).to(tl.uint64) * tl.cast(plane[2], tl.uint32).to(tl.uint64)
    return plane[0] + batch * plane[1] + behind


@triton.jit
def load_factors(
    lengths, key_scale, value_step, value_least, batch, block, head, token, VALUE_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load the length of a block, the steps and the least numbers of its values, and the scales of its keys, if any.

    The steps of two groups that are two halfwords are a word.
    """
    found: tl.tuple = (tl.load(lengths + block),)
    vector = head * TOKENS + token
    for plane in tl.static_range(2):
        values = value_least if plane == 1 else value_step
        if values is not None:
            start = start_of(values, batch, block)
            if in_words(VALUE_GROUPS, start.dtype.element_ty):
                found += (_load(_words(start) + vector, token, 0, TOKENS, BLOCK_N, 16),)
            else:
                for group in tl.static_range(VALUE_GROUPS):
                    found += (_load(start + vector * VALUE_GROUPS + group, token, 0, TOKENS, BLOCK_N, 16),)
    if key_scale is not None:
        found += (_load(start_of(key_scale, batch, block) + vector, token, 0, TOKENS, BLOCK_N, 16),)
    return found


@triton.jit
def factor_of(factors, plane: tl.constexpr, group: tl.constexpr, VALUE_GROUPS: tl.constexpr, dtype: tl.constexpr):
    """The steps (plane 0) or the least numbers (plane 1) of a group of values, as `load_factors` loads them."""
    if in_words(VALUE_GROUPS, dtype):
        found = number_in(factors[1 + plane], group == 1, dtype)
    else:
        found = factors[1 + plane * VALUE_GROUPS + group].to(tl.float32)
    return found


@triton.jit
def _words(start):
    return start.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def load_halfwords(
    plane, batch, block, head, token, column, first, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Load COLUMNS halfwords of the rows of tokens from `first` on, as `numbers` takes them."""
    row = start_of(plane, batch, block) + (head * TOKENS + token) * (HEAD_DIM * BITS // 16)
    at = first + column
    found: tl.tuple = ()
    if BITS >= 4:
        found = (_load(row + at, token, column, TOKENS, BLOCK_N, COLUMNS),)
    else:
        bits: tl.constexpr = 2 if BITS == 3 else BITS
        width: tl.constexpr = HEAD_DIM * bits // 16
        found = _load(row + at % width, token, column, TOKENS, BLOCK_N, COLUMNS), at // width * bits
    if BITS == 3:
        third: tl.constexpr = HEAD_DIM // 16
        last = _load(row + HEAD_DIM // 8 + at % third, token, column, TOKENS, BLOCK_N, COLUMNS)
        found += (last, at // third)
    return found


@triton.jit
def _load(at, token, column, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    if TOKENS % BLOCK_N == 0 and COLUMNS == block_of(COLUMNS):
        return tl.load(at)
    return tl.load(at, mask=(token < TOKENS) & (column < COLUMNS), other=0)


@triton.jit
def load_pairs(start, column, inside):
    """Load the numbers at `2 * column` and those behind them, in float32; numbers of 16 bits begin at words."""
    dtype: tl.constexpr = start.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        words = tl.load(_words(start) + column, mask=inside, other=0)
        even, odd = number_in(words, False, dtype), number_in(words, True, dtype)
    else:
        even = tl.load(start + 2 * column, mask=inside, other=0.0)
        odd = tl.load(start + 2 * column + 1, mask=inside, other=0.0)
    return even, odd


@triton.jit
def in_bytes(halfword, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Give each row of [COLUMNS, BLOCK_N] twice, for both of its bytes: eight rows, then the same ones again.

    Two rows that are eight apart are in the registers of one lane in a product of matrices, and so share what was
    read from memory.
    """
    eights = tl.reshape(halfword, [COLUMNS // 8, 1, 8, BLOCK_N])
    return tl.reshape(tl.broadcast_to(eights, [COLUMNS // 8, 2, 8, BLOCK_N]), [2 * COLUMNS, BLOCK_N])


@triton.constexpr_function
def in_words(groups: int, dtype: tl.dtype) -> bool:
    """Whether the steps of a token are one word."""
    return groups == 2 and dtype.primitive_bitwidth == 16


@triton.constexpr_function
def columns_of(head_dim: int, bits: int) -> int:
    """The columns of halfwords that a row has."""
    return head_dim // (2 if bits == 8 else 4)


@triton.constexpr_function
def block_of(columns: int) -> int:
    """The columns of a tile that matrix products take: a power of two, 16 or more."""
    return max(16, 1 << (columns - 1).bit_length())


@triton.constexpr_function
def groups_of(head_dim: int, group: int) -> int:
    """The groups of the dimensions of a value."""
    return -(-head_dim // group)


@triton.constexpr_function
def dim_of(head_dim: int, nibble: int, column: int) -> int:
    """The dimension of byte 0 of a nibble, in that column or in the first one of a run that begins there."""
    return nibble * (head_dim // 2) + 2 * column
