"""Loads tiles of codes in Triton, with the lengths, scales and steps that belong to them."""

import triton
import triton.language as tl

from kvboost_hf.attention.triton.halfwords import halves


@triton.jit
def start_of(plane, batch, block):
    """The address of a block in a plane, whose blocks are less than 2**31 numbers apart.

    Of two numbers of 32 bits the product takes one instruction; of 64 bits it takes four, for each plane and tile.
    """
    behind = tl.cast(block, tl.uint32).to(tl.uint64) * tl.cast(plane[2], tl.uint32).to(tl.uint64)
    return plane[0] + batch * plane[1] + behind


@triton.jit
def load_factors(
    lengths, key_scale, value_scale, batch, block, head, token, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load the length of a block, and the scales of its values and of its keys, if they have any."""
    found: tl.tuple = (tl.load(lengths + block),)
    vector = head * TOKENS + token
    if value_scale is not None:
        size = _load(start_of(value_scale, batch, block) + vector, token, 0, TOKENS, BLOCK_N, 16)
        found += (size,)
    if key_scale is not None:
        size = _load(start_of(key_scale, batch, block) + vector, token, 0, TOKENS, BLOCK_N, 16)
        found += (size,)
    return found


@triton.jit
def load_grouped(
    step, least, head, token, column, first: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Load `step` and `least` of values, for dimension `first` and each second one behind it in a run."""
    groups: tl.constexpr = (HEAD_DIM + GROUP - 1) // GROUP
    at = (head * TOKENS + token)[:, None] * groups
    if first // GROUP != (first + 2 * RUN - 1) // GROUP:
        at += (first + 2 * column)[None, :] // GROUP
        found = (
            _load(step + at, token[:, None], column[None, :], TOKENS, BLOCK_N, RUN),
            _load(least + at, token[:, None], column[None, :], TOKENS, BLOCK_N, RUN),
        )
    elif groups == 2 and step.dtype.element_ty.primitive_bitwidth == 16:  # words are copied ahead
        dtype: tl.constexpr = step.dtype.element_ty
        upper: tl.constexpr = first // GROUP == 1
        at = at // 2
        steps = _load(_words(step) + at, token[:, None], 0, TOKENS, BLOCK_N, 16)
        leasts = _load(_words(least) + at, token[:, None], 0, TOKENS, BLOCK_N, 16)
        found = halves(steps, upper, dtype, PACKED), halves(leasts, upper, dtype, PACKED)
    else:
        at += first // GROUP
        found = (
            _load(step + at, token[:, None], 0, TOKENS, BLOCK_N, 16),
            _load(least + at, token[:, None], 0, TOKENS, BLOCK_N, 16),
        )
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
def load_pairs(plane, at, column, COLUMNS: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Load two tiles, for each column the two numbers from `at` on; as words, where two numbers fit into one."""
    inside = column < COLUMNS
    if dtype.primitive_bitwidth == 16:
        pairs = tl.load(_words(plane + at) + column, mask=inside, other=0)
        even, odd = halves(pairs, False, dtype, PACKED)[:, None], halves(pairs, True, dtype, PACKED)[:, None]
    else:
        even = tl.load(plane + at + 2 * column, mask=inside, other=0.0)[:, None]
        odd = tl.load(plane + at + 2 * column + 1, mask=inside, other=0.0)[:, None]
    return even, odd


@triton.constexpr_function
def columns_of(head_dim: int, bits: int) -> int:
    """The columns of `numbers` that a row has."""
    return head_dim // (2 if bits == 8 else 4)


@triton.constexpr_function
def block_of(columns: int) -> int:
    """The columns of a tile that matrix products take: a power of two, 16 or more."""
    return max(16, 1 << (columns - 1).bit_length())


@triton.constexpr_function
def dim_of(head_dim: int, n: int, column: int) -> int:
    """The dimension in that column of tile n of `numbers`, or in the first one of a run that begins there."""
    return n // 2 * (head_dim // 2) + n % 2 + 2 * column
