"""Dequantizes halfwords of four 4-bit weights in registers, two halfwords at a time.

On NVIDIA's GPUs a register holds two halfwords, and an instruction makes two numbers. Codes become the last bits of
normal numbers, from which zeros in the same form are taken away: `1024 + code` in float16, 16 times the code in every
other nibble, and `128 + code` in bfloat16. All of these, and the differences, are exact, and none is so small that it
could be taken for 0. No sum loses bits to codes from which zeros are taken away only then, and rows with infinities
become what plain weights make of them.

Elsewhere, and with float32, operations on single numbers say the same. Tests compare both on every halfword.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def weights(codes, zeros, scales, dtype: tl.constexpr, PTX: tl.constexpr):
    """Four tiles of `dtype`, one for each nibble of a tile of halfwords.

    Args:
        codes: int16 [k, halfwords].
        zeros: int16 [1, halfwords].
        scales: Four of float16 [1, halfwords] to multiply by, or None: then weights are codes less zeros.
        dtype: Of the tiles.
        PTX: As `instructions` gives it, or None.
    """
    found: tl.tuple = ()
    if PTX is not None:
        numbers = _in_place(codes, dtype, PTX)
        lowest = _in_place(tl.broadcast_to(zeros, codes.shape), dtype, PTX)
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
def _in_place(halfwords, dtype: tl.constexpr, PTX: tl.constexpr):
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
