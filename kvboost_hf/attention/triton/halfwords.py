"""Decodes codes into numbers in registers, two at a time.

A row of codes is read in halfwords. Codes of 4 bits or fewer have one nibble each: column c of a tile has the halfword
c % n of a row of n, moved by `c // n` codes, so that all of them together are `head_dim / 4` columns. As `CodePlanes`
packs them, nibble i of byte b in column c is then dimension `i * head_dim / 2 + 2 * c + b`, whatever the bits; with 8
bits, byte b is `2 * c + b`. A tile becomes one tile of numbers for each nibble and byte, of its shape and layout: a
product of matrices takes one after the other, and no number moves to another lane.

On a GPU a register holds two halfwords, and an instruction makes two numbers of 16 bits:

- Even steps: a code in the last bits of 128 (bfloat16) or 1024 (float16) is that number plus the code. One of 8 bits
  reaches into the exponent of bfloat16: the number x is 128 + code below 128, and twice the code from there on. The
  code is `x / 2 - max(128 - x / 2, 0)`, without rounding.
- Codebooks: `prmt` takes four of eight bytes, chosen by four codes of 3 bits: the lower bytes of the numbers, then the
  upper ones. The numbers of 4 bits are as far below 0 as above, so that one of the bits is a sign.

In Triton's interpreter and with float32, operations on single numbers say the same; tests compare both on every
halfword.
"""

import struct
from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl

FUSED = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
FUSED_HALF = tl.constexpr("fma.rn.f16x2 $0, $1, $2, $3;")


@triton.jit
def numbers(given, table, BITS: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """Decode a tile of halfwords into `count_of` tiles; tile i is of nibble `i // 2` of byte `i % 2`.

    Args:
        given: The halfwords, int16; with fewer than 4 bits also how far up codes begin in their nibbles, int32; with 3
            bits also the halfwords with the third ones, and how far up these begin.
        table: As `load_table` gives it, or None: then a number is its code.
    """
    found: tl.tuple = ()
    if PTX is not None:
        if table is not None:
            given += table
        found = tl.inline_asm_elementwise(
            PTX, _constraints(BITS, table is not None), given, _repeated(dtype, count_of(BITS)), is_pure=True, pack=2
        )
    else:
        for i in tl.static_range(count_of(BITS)):
            codes = given[0].to(tl.int32) >> bit_of(i)
            if BITS < 4:
                codes = codes >> given[1]
            codes &= mask_of(BITS)
            if BITS == 3:
                codes += ((given[2].to(tl.int32) >> bit_of(i) >> given[3]) & 1) * 4
            if table is None:
                found += (codes.to(tl.float32).to(dtype),)
            else:
                found += (_look_up(codes, table, BITS).to(dtype),)
    return found


@triton.jit
def scaled(x, step, least, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Compute `x * step + least`, rounded once."""
    if PACKED:
        found = tl.inline_asm_elementwise(
            FUSED_HALF if dtype == tl.float16 else FUSED, "=r,r,r,r", [x, step, least], x.dtype, is_pure=True, pack=2
        )
    else:
        found = (x.to(tl.float32) * step.to(tl.float32) + least.to(tl.float32)).to(dtype)
    return found


@triton.jit
def halves(words, upper: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Take the numbers in the lower or the upper halves of words of two."""
    if PACKED:
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;" if upper else "prmt.b32 $0, $1, $2, 0x5410;",
            "=r,r,r", [words], _repeated(dtype, 1), is_pure=True, pack=2,
        )[0]  # fmt: skip
    else:
        found = (words >> (16 if upper else 0)).to(tl.int16).to(dtype, bitcast=True)
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
def count_of(bits: int) -> int:
    """The codes of a column."""
    return 2 if bits == 8 else 4


@triton.constexpr_function
def bit_of(i: int) -> int:
    """The bit of a halfword at which the code of tile i of `numbers` begins."""
    return i // 2 * 4 + i % 2 * 8


@triton.constexpr_function
def mask_of(bits: int) -> int:
    """The mask of a code that begins at bit 0; of 3 bits, without the third one, which is elsewhere."""
    return 3 if bits == 3 else (1 << bits) - 1


@triton.constexpr_function
def _constraints(bits, table):
    return ",".join(["=&r"] * count_of(bits) + ["r"] * ({1: 3, 2: 3, 3: 6, 4: 1, 8: 1}[bits] + (8 if table else 0)))


@triton.constexpr_function
def _repeated(dtype, count):
    return (dtype,) * count


@cache
def instructions(bits: int, dtype: torch.dtype, *, codebook: bool) -> str:
    """Write the PTX of `numbers`; its operands are the tiles, then the inputs, of 32 bits for two halfwords."""
    asm, count, half = _Text(), count_of(bits), dtype == torch.float16
    code = _aligned(asm, "code", count) if bits < 4 else f"${count}"
    if codebook:
        _choose(asm, bits, code)
        return asm.whole()
    magic, base, fma = (0x6400, 1024, "f16x2") if half else (0x4300, 128, "bf16x2")
    asm("mov.b32 one, {}", _twice(_bits(1, half)))
    asm("mov.b32 magic, {}", _twice(magic))
    asm("mov.b32 away, {}", _twice(_bits(-base, half)))
    if bits == 8:
        _read_bytes(asm, code, half=half)
        return asm.whole()
    for i in range(count):
        own = code
        if bit_of(i):
            asm("shr.b32 t, {}, {}", code, bit_of(i))
            own = "t"
        asm("lop3.b32 ${}, {}, {}, magic, {}", i, own, _twice(mask_of(bits)), _lut(lambda a, b, c: (a & b) | c))
        asm("fma.rn.{} ${}, ${}, one, away", fma, i, i)
    return asm.whole()


def _read_bytes(asm: "_Text", code: str, *, half: bool) -> None:
    """Write what takes codes of 8 bits out of halfwords; registers `one`, `magic` and `away` are set."""
    if not half:
        asm("mov.b32 by_half, {}", _twice(_bits(0.5, half)))
        asm("mov.b32 by_minus_half, {}", _twice(_bits(-0.5, half)))
        asm("mov.b32 base, {}", _twice(_bits(128, half)))
    for byte in range(2):
        asm("prmt.b32 ${}, {}, magic, {}", byte, code, 0x5351 if byte else 0x5250)
        if half:
            asm("fma.rn.f16x2 ${}, ${}, one, away", byte, byte)
        else:
            asm("fma.rn.relu.bf16x2 t, ${}, by_minus_half, base", byte)
            asm("neg.bf16x2 t, t")
            asm("fma.rn.bf16x2 ${}, ${}, by_half, t", byte, byte)


def _aligned(asm: "_Text", name: str, operand: int) -> str:
    """Shift two halfwords, each by its own shift; bits that enter one from the other are above its codes."""
    asm("shr.b32 t, ${}, ${}", operand, operand + 1)
    asm("shr.b32 u, ${}, ${}", operand, operand + 2)
    asm("prmt.b32 {}, t, u, 0x7610", name)
    return name


def _choose(asm: "_Text", bits: int, code: str) -> None:
    first = count_of(bits) + {1: 3, 2: 3, 3: 6, 4: 1}[bits]
    low, more_low, high, more_high = (f"${first + 2 * i}" for i in range(4))
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
        third = _aligned(asm, "third", count_of(bits) + 3)
        asm("shl.b32 t, {}, 2", third)
        asm("lop3.b32 index, t, 0x44444444, index, {}", _lut(lambda a, b, c: (a & b) | c))
    for byte in range(2):
        asm("prmt.b32 t, index, zero, {}", 0x4431 if byte else 0x4420)
        asm("prmt.b32 low, {}, {}, t", low, more_low)
        asm("prmt.b32 high, {}, {}, t", high, more_high)
        if bits == 4:
            asm("prmt.b32 t, {}, u, {}", code, 0x3715 if byte else 0x2604)
            asm("lop3.b32 high, high, t, 0x80808080, {}", _lut(lambda a, b, c: a ^ (~b & c)))
        for nibble in range(2):
            asm("prmt.b32 ${}, low, high, {}", 2 * nibble + byte, 0x7351 if nibble else 0x6240)


class _Text:
    """Collects lines of PTX, with registers of their own."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __call__(self, line: str, *given: object) -> None:
        self._lines.append(line.format(*given) + ";")

    def whole(self) -> str:
        names = "t, u, code, third, index, low, high, zero, one, magic, away, by_half, by_minus_half, base"
        return "\n".join(["{", f".reg .b32 {names};", *self._lines, "}"])


def _twice(halfword: int) -> str:
    return f"0x{halfword * 0x10001:08x}"


def _bits(x: float, half: bool) -> int:
    """The 16 bits that store a number exactly."""
    return int.from_bytes(struct.pack("<e", x) if half else struct.pack("<f", x)[2:], "little")


def _lut(function: Callable[[int, int, int], int]) -> int:
    """The constant for which `lop3` computes a function of three bits."""
    return function(0xF0, 0xCC, 0xAA) & 0xFF
