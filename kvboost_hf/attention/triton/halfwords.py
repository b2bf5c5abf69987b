"""Decodes codes into numbers in registers, two at a time.

A row of codes is read in halfwords. Codes of 4 bits or fewer have one nibble each: column c of a tile has the halfword
c % n of a row of n, moved by `c // n` codes, so that all of them together are `head_dim / 4` columns. As `CodePlanes`
packs them, nibble i of byte b in column c is then dimension `i * head_dim / 2 + 2 * c + b`, whatever the bits; with 8
bits, byte b is `2 * c + b`. One byte of each halfword of a tile becomes one tile of numbers for each nibble, of its
shape and layout, so that no number moves to another lane.

On NVIDIA's GPUs a register holds two halfwords, and an instruction makes two numbers in float16:

- Even steps: a code that is taken for the bits of a float16 is the subnormal number `code * 2**-24`, exactly, and that
  of the upper nibble is 16 times as large. Tensor cores multiply subnormal numbers as they do others (Fasi et al.,
  2021, https://doi.org/10.7717/peerj-cs.330). One instruction is left for each two numbers, which takes their bits out
  of the halfwords.
- Codebooks: `prmt` takes four of eight bytes, chosen by four codes of 3 bits: the lower bytes of the numbers, then the
  upper ones. The numbers of 4 bits are as far below 0 as above, so that one of the bits is a sign.

Elsewhere, and with float32, operations on single numbers say the same, but that a code is a whole number: AMD's MI200
takes subnormal numbers for 0. Tests compare both on every halfword.
"""

from collections.abc import Callable
from functools import cache

import triton
import triton.language as tl


@triton.jit
def numbers(given, byte, table, BITS: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """Decode one byte of each halfword of a tile into `nibbles_of` tiles, one for each nibble.

    Args:
        given: The halfwords, int16; with fewer than 4 bits also how far up codes begin in their nibbles, int32; with 3
            bits also the halfwords with the third ones, and how far up these begin.
        byte: Which byte, 0 or 1: an integer, or a tile of int32 for another one in each place.
        table: As `load_table` gives it, or None: then tile n has codes times `16 ** n * unit_of(PTX)`.
    """
    found: tl.tuple = ()
    if PTX is not None:
        given += (byte,)
        if table is not None:
            given += table
        found = tl.inline_asm_elementwise(
            PTX, _constraints(BITS, table is not None), given, _repeated(dtype, nibbles_of(BITS)), is_pure=True, pack=2
        )
    else:
        for n in tl.static_range(nibbles_of(BITS)):
            codes = given[0].to(tl.int32) >> (8 * byte + 4 * n)
            if BITS < 4:
                codes = codes >> given[1]
            codes &= mask_of(BITS)
            if BITS == 3:
                codes += ((given[2].to(tl.int32) >> (8 * byte + 4 * n) >> given[3]) & 1) * 4
            if table is None:
                found += ((codes << (4 * n)).to(tl.float32).to(dtype),)
            else:
                found += (_look_up(codes, table, BITS).to(dtype),)
    return found


@triton.jit
def rounded(x, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Round numbers of float32 to `dtype`, and those beyond the largest one to that."""
    if PACKED:
        found = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.float16, is_pure=True, pack=2
        )
    elif dtype == tl.float16:
        found = tl.clamp(x, -65504.0, 65504.0).to(tl.float16)
    else:
        found = x.to(dtype)
    return found


@triton.jit
def log2(x, PACKED: tl.constexpr):
    """Compute log2 of normal numbers of float32, to some 22 bits."""
    if PACKED:  # `tl.log2` takes 18 instructions
        found = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:
        found = tl.log2(x)
    return found


@triton.jit
def number_in(words, upper: tl.constexpr, dtype: tl.constexpr):
    """Take the numbers of 16 bits in the lower or the upper halves of words of two, as float32."""
    if dtype == tl.bfloat16:
        found = (words & -65536 if upper else words << 16).to(tl.float32, bitcast=True)
    else:
        found = (words >> (16 if upper else 0)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return found


@triton.jit
def load_table(codebook, BITS: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Load a codebook for `numbers`; of 4 bits, its upper half.

    `PACKED`, four words: the lower bytes of the numbers, four to a word, and the upper ones. Else, the numbers.
    """
    first: tl.constexpr = 8 if BITS == 4 else 0
    found: tl.tuple = ()
    if PACKED:
        for i in tl.static_range(4):
            word = tl.full([], 0, tl.int32)
            for byte in tl.static_range(4):
                entry = (i % 2 * 4 + byte) % (8 if BITS == 4 else 1 << BITS)
                number = tl.load(codebook + first + entry).to(dtype)
                bits = number.to(tl.int16, bitcast=True).to(tl.int32)
                word |= ((bits >> (i // 2 * 8)) & 255) << (8 * byte)
            found += (word,)
    else:
        for i in tl.static_range(8 if BITS == 4 else 1 << BITS):
            found += (tl.load(codebook + first + i).to(dtype).to(tl.float32),)
    return found


@triton.jit
def _look_up(codes, table, BITS: tl.constexpr):
    upper = (codes & 8) != 0
    chosen = codes
    if BITS == 4:
        chosen = tl.where(upper, codes, ~codes)
    found = table[0]
    for i in tl.static_range(1, 8 if BITS == 4 else 1 << BITS):
        found = tl.where((chosen & 7) == i, table[i], found)
    if BITS == 4:
        found = tl.where(upper, found, -found)
    return found


@triton.constexpr_function
def nibbles_of(bits: int) -> int:
    """The codes of a byte of a column."""
    return 1 if bits == 8 else 2


@triton.constexpr_function
def unit_of(ptx: str | None) -> float:
    """What a code of 1 becomes in the lower nibble."""
    return 1.0 if ptx is None else 2.0**-24


@triton.constexpr_function
def mask_of(bits: int) -> int:
    """The mask of a code that begins at bit 0; of 3 bits, without the third one, which is elsewhere."""
    return 3 if bits == 3 else (1 << bits) - 1


@triton.constexpr_function
def _inputs(bits: int) -> int:
    """The operands of 32 bits of a tile: two halfwords are one, and two numbers of int32 are two."""
    return {1: 3, 2: 3, 3: 6, 4: 1, 8: 1}[bits]


@triton.constexpr_function
def _constraints(bits, table):
    return ",".join(["=&r"] * nibbles_of(bits) + ["r"] * (_inputs(bits) + 2 + (8 if table else 0)))


@triton.constexpr_function
def _repeated(dtype, count):
    return (dtype,) * count


@cache
def instructions(bits: int, *, codebook: bool) -> str:
    """Write the PTX of `numbers`; its operands are the tiles, then the inputs, of 32 bits for two halfwords."""
    asm, count = _Text(), nibbles_of(bits)
    byte = count + _inputs(bits)
    code = _aligned(asm, "code", count) if bits < 4 else f"${count}"
    if codebook:
        _choose(asm, bits, code, byte)
    elif bits == 8:
        asm("mad.lo.u32 t, ${}, 0x101, 0x4240", byte)
        asm("prmt.b32 $0, {}, 0, t", code)
    else:
        asm("shl.b32 t, ${}, 3", byte)
        asm("shr.b32 t, {}, t", code)
        for n in range(count):
            asm("and.b32 ${}, t, {}", n, f"0x{(mask_of(bits) << 4 * n) * 0x10001:08x}")
    return asm.whole()


def _aligned(asm: "_Text", name: str, operand: int) -> str:
    """Shift two halfwords, each by its own shift; bits that enter one from the other are above its codes."""
    asm("shr.b32 t, ${}, ${}", operand, operand + 1)
    asm("shr.b32 u, ${}, ${}", operand, operand + 2)
    asm("prmt.b32 {}, t, u, 0x7610", name)
    return name


def _choose(asm: "_Text", bits: int, code: str, byte: int) -> None:
    low, more_low, high, more_high = (f"${byte + 2 + 2 * i}" for i in range(4))
    asm("mov.b32 zero, 0")
    if bits == 4:
        asm("shr.b32 t, {}, 3", code)
        asm("and.b32 t, t, 0x11111111")
        asm("mul.lo.u32 t, t, 7")
        asm("lop3.b32 index, {}, t, 0x77777777, {}", code, _lut(lambda a, b, c: ~(a ^ b) & c))
        asm("shl.b32 u, {}, 4", code)  # signs of both nibbles are then the first bits of bytes
    else:
        asm("and.b32 index, {}, {}", code, f"0x{0x11111111 * mask_of(bits):08x}")
    if bits == 3:
        third = _aligned(asm, "third", nibbles_of(bits) + 3)
        asm("shl.b32 t, {}, 2", third)
        asm("lop3.b32 index, t, 0x44444444, index, {}", _lut(lambda a, b, c: (a & b) | c))
    asm("mad.lo.u32 t, ${}, 0x0011, 0x4420", byte)
    asm("prmt.b32 t, index, zero, t")
    asm("prmt.b32 low, {}, {}, t", low, more_low)
    asm("prmt.b32 high, {}, {}, t", high, more_high)
    if bits == 4:
        asm("mad.lo.u32 t, ${}, 0x1111, 0x2604", byte)
        asm("prmt.b32 t, {}, u, t", code)
        asm("lop3.b32 high, high, t, 0x80808080, {}", _lut(lambda a, b, c: a ^ (~b & c)))
    asm("prmt.b32 $0, low, high, 0x6240")
    asm("prmt.b32 $1, low, high, 0x7351")


class _Text:
    """Collects lines of PTX, with registers of their own."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __call__(self, line: str, *given: object) -> None:
        self._lines.append(line.format(*given) + ";")

    def whole(self) -> str:
        names = "t, u, code, third, index, low, high, zero"
        return "\n".join(["{", f".reg .b32 {names};", *self._lines, "}"])


def _lut(function: Callable[[int, int, int], int]) -> int:
    """The constant for which `lop3` computes a function of three bits."""
    return function(0xF0, 0xCC, 0xAA) & 0xFF


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
