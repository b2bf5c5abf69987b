"""The instructions that make numbers of codes on a GPU, run here, against what Triton's interpreter makes of them."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvboost_hf.attention.triton.halfwords import count_of, instructions, load_table, numbers
from kvboost_hf.cache.codecs.lloyd_max import centroids

ALL = 1 << 16


@triton.jit
def interpreted(
    halfwords, shifts, thirds, third_shifts, codebook, out,
    BITS: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, SIZE)
    table = None
    if codebook is not None:
        table = load_table(codebook, BITS, out.dtype.element_ty, False)
    given = tl.load(halfwords + at), tl.load(shifts + at), tl.load(thirds + at), tl.load(third_shifts + at)
    found = numbers(given, table, BITS, out.dtype.element_ty, None)
    for i in tl.static_range(COUNT):
        tl.store(out + i * SIZE + at, found[i])


def run(text: str, operands: list[np.ndarray]) -> None:
    """Run PTX of 32 bits on arrays; `operands` are $0, $1 and on."""
    registers: dict[str, np.ndarray] = {f"${i}": each for i, each in enumerate(operands)}

    def read(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.array([int(name, 0)], dtype=np.uint32)

    for line in text.strip("{}\n").splitlines():
        name, *given = re.findall(r"[\w.$]+", line)
        if name == ".reg":
            continue
        values = [read(each).astype(np.uint32) for each in given[1:]]
        registers[given[0]] = OPERATIONS[name](*values)
    operands[:] = [registers[f"${i}"] for i in range(len(operands))]


def choose(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    eight, found = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(selector)
    for byte in range(4):
        nibble = selector >> np.uint32(4 * byte) & np.uint32(15)
        assert (nibble < 8).all(), "it would be a sign"
        own = (eight >> (nibble * np.uint32(8)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
        found = found | own << np.uint32(8 * byte)
    return found


def combine(a: np.ndarray, b: np.ndarray, c: np.ndarray, lut: np.ndarray) -> np.ndarray:
    found = np.zeros_like(a)
    for case in range(8):
        if int(lut[0]) >> case & 1:
            x, y, z = (each if case >> bit & 1 else ~each for bit, each in ((2, a), (1, b), (0, c)))
            found = found | x & y & z
    return found


def fused(dtype: torch.dtype, *given: np.ndarray, least: float = float("-inf")) -> np.ndarray:
    a, b, c = (halves(np.atleast_1d(each), dtype).double() for each in given)
    return (a * b + c).clamp(min=least).to(dtype).view(torch.int16).numpy().view(np.uint32)[..., 0]


def halves(words: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """[words, 2] numbers."""
    return torch.from_numpy(np.ascontiguousarray(words)[:, None].view(np.int16).copy()).view(dtype)


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "mul.lo.u32": lambda a, b: a * b,
    "prmt.b32": choose,
    "lop3.b32": combine,
    "fma.rn.bf16x2": lambda *given: fused(torch.bfloat16, *given),
    "fma.rn.relu.bf16x2": lambda *given: fused(torch.bfloat16, *given, least=0.0),
    "neg.bf16x2": lambda a: a ^ np.uint32(0x80008000),
    "fma.rn.f16x2": lambda *given: fused(torch.float16, *given),
}


def made(
    bits: int, dtype: torch.dtype, table: torch.Tensor | None, damage: tuple[str, str] = ("", "")
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers [tiles, halfwords] of all halfwords by the instructions, and by the interpreter."""
    draw = torch.Generator().manual_seed(bits)
    words, thirds = (torch.randperm(ALL, generator=draw).to(torch.int16) for _ in range(2))
    shifts, third_shifts = (torch.randint(n, (ALL,), generator=draw).int() for n in (4, 4))
    shifts = shifts // 2 * 2 if bits in (2, 3) else shifts
    count = count_of(bits)
    expected = torch.empty(count, ALL, dtype=dtype)
    interpreted[(1,)](words, shifts, thirds, third_shifts, table, expected, bits, count, ALL)

    given = [words.numpy().view(np.uint32)]
    given += [each for each in shifts.numpy().view(np.uint32).reshape(-1, 2).T] if bits < 4 else []
    if bits == 3:
        given += [thirds.numpy().view(np.uint32), *third_shifts.numpy().view(np.uint32).reshape(-1, 2).T]
    if table is not None:
        used = table[8:] if bits == 4 else table
        stored = used.repeat(8 // len(used)).to(dtype).view(torch.uint8).view(8, 2).T  # lower bytes, upper ones
        given += [word for word in stored.reshape(4, 4).numpy().view(np.uint32) for _ in range(2)]
    operands = [np.zeros(1, np.uint32)] * count + given
    text = instructions(bits, dtype, codebook=table is not None)
    assert damage[0] in text
    run(text.replace(*damage) if damage[0] else text, operands)
    found = torch.stack([halves(each, dtype).flatten() for each in operands[:count]])
    return found, expected


def codebook(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Rounded, which Triton's interpreter does by cutting off."""
    return centroids(bits, torch.device("cpu")).to(dtype).float()


dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@dtypes
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_even_steps(bits: int, dtype: torch.dtype) -> None:
    found, expected = made(bits, dtype, None)
    assert torch.equal(found, expected)
    assert torch.equal(found.unique(), torch.arange(2**bits).to(dtype))


@dtypes
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codebooks(bits: int, dtype: torch.dtype) -> None:
    table = codebook(bits, dtype)
    found, expected = made(bits, dtype, table)
    assert torch.equal(found, expected)
    assert torch.equal(found.unique(), table.to(dtype))


@pytest.mark.parametrize("damage", [("29521", "25152"), ("0x80808080", "0x80808000"), ("t, 7;", "t, 6;")], ids=str)
def test_damage_is_found(damage: tuple[str, str]) -> None:
    found, expected = made(4, torch.bfloat16, codebook(4, torch.bfloat16), damage)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("damage", [("relu.", ""), ("neg.bf16x2 t, t", "mov.b32 t, t"), ("21329", "21072")], ids=str)
def test_damage_to_8_bits_is_found(damage: tuple[str, str]) -> None:
    found, expected = made(8, torch.bfloat16, None, damage)
    assert not torch.equal(found, expected)
