"""The instructions that make numbers of codes on a GPU, run here, against what Triton's interpreter makes of them."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.internals.cache import centroids
from tests.internals.triton import instructions, load_table, nibbles_of, numbers, unit_of

ALL = 1 << 16


@triton.jit
def interpreted(
    halfwords, shifts, thirds, third_shifts, codebook, out,
    BITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, SIZE)
    table = None
    if codebook is not None:
        table = load_table(codebook, BITS, out.dtype.element_ty, False)
    given = tl.load(halfwords + at), tl.load(shifts + at), tl.load(thirds + at), tl.load(third_shifts + at)
    for byte in tl.static_range(2):
        found = numbers(given, byte, table, BITS, out.dtype.element_ty, None)
        for nibble in tl.static_range(nibbles_of(BITS)):
            tl.store(out + (byte * nibbles_of(BITS) + nibble) * SIZE + at, found[nibble])


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


def halves(words: np.ndarray) -> torch.Tensor:
    """[words, 2] numbers."""
    return torch.from_numpy(np.ascontiguousarray(words)[:, None].view(np.int16).copy()).view(torch.float16)


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": choose,
    "lop3.b32": combine,
}


def made(
    bits: int, table: torch.Tensor | None, damage: tuple[str, str] = ("", "")
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers [tiles, halfwords] of all halfwords by the instructions, and by the interpreter."""
    draw = torch.Generator().manual_seed(bits)
    words, thirds = (torch.randperm(ALL, generator=draw).to(torch.int16) for _ in range(2))
    shifts, third_shifts = (torch.randint(n, (ALL,), generator=draw).int() for n in (4, 4))
    shifts = shifts // 2 * 2 if bits in (2, 3) else shifts
    count: int = nibbles_of(bits)
    expected = torch.empty(2 * count, ALL, dtype=torch.float16)
    interpreted[(1,)](words, shifts, thirds, third_shifts, table, expected, bits, ALL)

    given = [words.numpy().view(np.uint32)]
    given += [each for each in shifts.numpy().view(np.uint32).reshape(-1, 2).T] if bits < 4 else []
    if bits == 3:
        given += [thirds.numpy().view(np.uint32), *third_shifts.numpy().view(np.uint32).reshape(-1, 2).T]
    stored = []
    if table is not None:
        used = table[8:] if bits == 4 else table
        halfwords = used.repeat(8 // len(used)).half().view(torch.uint8).view(8, 2).T  # lower bytes, upper ones
        stored = [word for word in halfwords.reshape(4, 4).numpy().view(np.uint32) for _ in range(2)]
    text = instructions(bits, codebook=table is not None)
    assert damage[0] in text
    found = []
    for byte in range(2):
        chosen = [np.full_like(given[0], byte)] * 2
        operands = [np.zeros(1, np.uint32)] * count + given + chosen + stored
        run(text.replace(*damage) if damage[0] else text, operands)
        found += [halves(each).flatten() for each in operands[:count]]
    return torch.stack(found), expected


def codebook(bits: int) -> torch.Tensor:
    """Rounded, which Triton's interpreter does by cutting off."""
    return centroids(bits, torch.device("cpu")).half().float()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_even_steps(bits: int) -> None:
    found, expected = made(bits, None)
    assert torch.equal(found.double(), expected.double() * unit_of("a text"))
    codes = torch.arange(2**bits)
    assert torch.equal(expected.unique(), torch.cat([codes, 16 * codes]).unique() if bits < 8 else codes)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codebooks(bits: int) -> None:
    table = codebook(bits)
    found, expected = made(bits, table)
    assert torch.equal(found, expected)
    assert torch.equal(found.unique(), table.half())


DAMAGE = {
    4: [("0x7351", "0x6240"), ("0x80808080", "0x80808000"), ("t, 7;", "t, 6;"), ("0x1111", "0x0")],
    3: [("0x44444444", "0x04444444"), ("0x0011", "0x0")],
}


@pytest.mark.parametrize(("bits", "damage"), [(bits, each) for bits in DAMAGE for each in DAMAGE[bits]], ids=str)
def test_damage_to_codebooks_is_found(bits: int, damage: tuple[str, str]) -> None:
    found, expected = made(bits, codebook(bits), damage)
    assert not torch.equal(found, expected)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("bits", "damage"),
    [(8, ("0x4240", "0x4340")), (8, ("0x101", "0x1")), (4, ("0x00f000f0", "0x00f00070")), (2, (", 3;", ", 2;"))],
    ids=str,
)
def test_damage_to_even_steps_is_found(bits: int, damage: tuple[str, str]) -> None:
    found, expected = made(bits, None, damage)
    assert not torch.equal(found.double(), expected.double() * unit_of("a text"))
