"""The format of blobs: others can read it, nothing that was damaged is taken for what was written."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.forged import Forged
from tests.internals.cache import Blob, DamagedBlobError, Entry, Kind, MadeWith, dump, read_entry, record

pytestmark = pytest.mark.daily

DTYPES = [getattr(torch, name.removeprefix("torch.")) for name in sorted(record._NAMES)]
ENTRY = Entry(b"k" * 20, Kind.CHUNK, b"model", b"root", b"parent", b"head", 7, np.arange(-2, 30), 0)


def joined(entry: Entry, tensors: dict[str, torch.Tensor], layout: object = None) -> tuple[Entry, bytes]:
    entry, parts = dump(entry, tensors, layout)
    data = b"".join(parts)
    assert len(data) == entry.nbytes
    return entry, data


def checked(data: bytes) -> Blob:
    """A blob with nothing left unread."""
    blob = Blob(memoryview(data))
    blob.check_all()
    return blob


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits, as far as the dtype allows."""
    draw = torch.Generator().manual_seed(0)
    octets = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), generator=draw)
    return octets.to(torch.uint8).view(dtype)[..., 0].contiguous()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.fixture
def mixed() -> dict[str, torch.Tensor]:
    """Odd sizes in an order that would not be aligned."""
    sizes = {torch.uint8: (3, 5), torch.float32: (2, 3), torch.bfloat16: (3, 1, 7), torch.int64: (1,)}
    return {f"0.{dtype}": of_dtype(dtype, *shape) for dtype, shape in sizes.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    tensor = of_dtype(dtype, 3, 2, 5)
    _, data = joined(ENTRY, {"codes": tensor})
    assert same_bits(checked(data).tensor("codes"), tensor)


def test_others_read_it(mixed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    _, data = joined(ENTRY, mixed)
    path = tmp_path / "blob.safetensors"
    path.write_bytes(data)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(mixed)
        assert file.metadata()["format"] == "kvboost_hf 1"
        for name, tensor in mixed.items():
            assert same_bits(file.get_tensor(name), tensor)


def test_tensors_are_aligned_views(mixed: dict[str, torch.Tensor]) -> None:
    _, data = joined(ENTRY, mixed)
    held = bytearray(data)
    blob = Blob(memoryview(held))
    for name, tensor in mixed.items():
        start = blob._start + blob._header[name]["data_offsets"][0]
        assert start % tensor.element_size() == 0
        held[start] ^= 1
        assert not same_bits(blob.tensor(name), tensor)


@pytest.mark.parametrize("kind", Kind)
def test_entry_and_layout_come_back(kind: Kind) -> None:
    entry = Entry(b"\x00\xff" * 10, kind, b"m", b"", b"p", b"", 2**40, np.array([2**62, -5, 0]), 0)
    layout = {"blocks": [{"shape": [1, 2, 3], "of": None}], "text": "ä\u2028"}
    written, data = joined(entry, {"codes": torch.zeros(1, 4)}, layout)
    found = read_entry(memoryview(data))
    for name in ("key", "kind", "model", "root", "parent", "head", "start", "nbytes"):
        assert getattr(found, name) == getattr(written, name)
    assert found.tokens.dtype == np.int64
    assert found.tokens.tolist() == entry.tokens.tolist()
    assert checked(data).layout == layout


def test_empty_tensors_and_none_at_all() -> None:
    for tensors in ({}, {"none": torch.empty(0, 3), "no width": torch.empty(2, 0, dtype=torch.int8)}):
        _, data = joined(ENTRY, tensors)
        blob = checked(data)
        assert all(same_bits(blob.tensor(name), tensor) for name, tensor in tensors.items())


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(TypeError, match=r"safetensors has no torch\.complex64"):
        dump(ENTRY, {"x": torch.zeros(1, dtype=torch.complex64)}, None)
    with pytest.raises(TypeError, match="not JSON serializable"):
        dump(ENTRY, {}, torch.float32)


def harmed(data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        for bits in (0x01, 0x20, 0x80, 0xFF):
            yield data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


def test_every_flipped_byte_is_noticed(mixed: dict[str, torch.Tensor]) -> None:
    _, data = joined(ENTRY, mixed, [1])
    unnoticed = []
    for other in harmed(data):
        try:
            checked(other)
        except DamagedBlobError:
            continue
        unnoticed.append(other)
    assert not unnoticed


def test_every_truncation_and_anything_added_is_noticed(mixed: dict[str, torch.Tensor]) -> None:
    _, data = joined(ENTRY, mixed)
    for other in [*(data[:stop] for stop in range(len(data))), data + b"\0", data + data]:
        with pytest.raises(DamagedBlobError):
            Blob(memoryview(other))


def test_what_a_blob_is_found_by_is_read_before_what_may_follow_it(mixed: dict[str, torch.Tensor]) -> None:
    """A seal follows; nothing of the blob may be missing."""
    written, data = joined(ENTRY, mixed)
    assert read_entry(memoryview(data + bytes(32))).nbytes == written.nbytes
    for stop in range(len(data)):
        with pytest.raises(DamagedBlobError):
            read_entry(memoryview(data[:stop]))


@given(data=st.binary(max_size=200), size=st.none() | st.integers(0, 2**64 - 1))
def test_anything_else_is_no_blob(data: bytes, size: int | None) -> None:
    head = size.to_bytes(8, "little") if size is not None else b""
    with pytest.raises(DamagedBlobError):
        Blob(memoryview(head + data))


def test_tensors_of_two_blobs_are_not_exchanged() -> None:
    """All blobs of a model have the same shapes: a header with the tensors of another must not pass."""
    _, one = joined(ENTRY, {"codes": torch.zeros(2, 50)})
    _, other = joined(ENTRY, {"codes": torch.ones(2, 50)})
    assert len(one) == len(other)
    with pytest.raises(DamagedBlobError):
        checked(one[:-400] + other[-400:])


def test_a_header_is_as_long_as_may_be_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    _, data = joined(ENTRY, {"codes": torch.zeros(4, 8)})
    size = int.from_bytes(data[:8], "little")
    monkeypatch.setattr(record, "_MAX_HEADER_BYTES", size)
    assert read_entry(memoryview(data)).key == ENTRY.key
    monkeypatch.setattr(record, "_MAX_HEADER_BYTES", size - 1)
    with pytest.raises(DamagedBlobError, match="has a header of"):
        read_entry(memoryview(data))


def test_damage_is_found_where_it_is() -> None:
    _, data = joined(ENTRY, {"codes": torch.zeros(4, 8)})
    blob = Blob(memoryview(data[:-40] + b"\1" + data[-39:]))
    for index in (0, 1, 3):
        blob.check("codes", [index])
    with pytest.raises(DamagedBlobError, match="Entry 2 of tensor 'codes'"):
        blob.check("codes", [2])


MADE_WITH = MadeWith("int8", "", "sdpa", "torch 2, transformers 5")


def test_an_entry_tells_what_it_was_made_with() -> None:
    _, data = joined(replace(ENTRY, made_with=MADE_WITH), {"codes": torch.zeros(1, 8)}, {})
    assert read_entry(memoryview(data)).made_with == MADE_WITH
    earlier = Forged(data)
    del earlier.entry["made_with"]
    assert read_entry(memoryview(earlier.joined())).made_with is None


TOLD = {"codec": "int8", "regime": "", "attention": "sdpa", "versions": ""}


@pytest.mark.parametrize(
    "made_with",
    [None, 1, [], {}, {"codec": "raw"}, TOLD | {"attention": 1}, TOLD | {"x": ""}, TOLD | {"regime": "a" * 5000}],
)
def test_what_it_was_made_with_is_text(made_with: Any) -> None:
    _, data = joined(replace(ENTRY, made_with=MADE_WITH), {"codes": torch.zeros(1, 8)}, {})
    forged = Forged(data)
    forged.entry["made_with"] = made_with
    with pytest.raises(DamagedBlobError):
        Blob(memoryview(forged.joined()))


@pytest.mark.parametrize(
    ("entry", "shape"),
    [
        (lambda most: replace(ENTRY, made_with=replace(MADE_WITH, versions="v" * (1024 + 1 - most))), (1, 8)),
        (lambda most: replace(ENTRY, start=2**48 - most), (1, 8)),
        (lambda most: ENTRY, (1,) * 8),
    ],
    ids=["characters", "tokens", "dimensions"],
)
def test_limits_are_read_and_nothing_beyond(entry: Any, shape: tuple[int, ...]) -> None:
    """Each limit exactly, and one more."""
    dimensions = len(shape) == 8
    _, data = joined(entry(1), {"codes": torch.zeros(shape)}, {})
    assert same_bits(checked(data).tensor("codes"), torch.zeros(shape))
    _, data = joined(entry(0), {"codes": torch.zeros((1,) * (9 if dimensions else 2))}, {})
    with pytest.raises(DamagedBlobError):
        Blob(memoryview(data))


def _unaligned(forged: Forged) -> None:
    forged.header["b"]["data_offsets"], forged.header["a"]["data_offsets"] = [0, 15], [15, 39]
    forged.sum_up()


def test_each_part_of_a_form_is_looked_at_by_itself() -> None:
    """Everything else is as it should be, checksums included: no other part would notice it."""

    def spec(**changes: Any) -> Any:
        return lambda forged: forged.header["a"].update(changes)

    def told(**changes: Any) -> Any:
        return lambda forged: forged.entry.update(changes)

    wrong: list[tuple[str, Any]] = [
        ("does not have its checksum", lambda forged: forged.told.update(format="kvboost_hf 2")),
        ("are not those of its tensors", lambda forged: forged.sums.update(c=[])),
        ("are not those of its tensors", lambda forged: forged.sums.pop("b")),
        *(("Tensor 'a' .* has no shape", spec(shape=shape)) for shape in ([], [2, 3.0], [2, -3], [2, 2**48])),
        ("Tensor 'a' .* has no shape", spec(data_offsets=[0, 24.0])),
        ("Tensor 'a' .* has no checksums", lambda forged: forged.sums.update(a="ab")),
        ("Tensor 'a' .* is not where its shape says", spec(shape=[2, 4])),
        ("Tensor 'a' .* is not where its shape says", spec(data_offsets=[4, 28])),
        ("Tensor 'a' .* is not where its shape says", lambda forged: forged.sums["a"].append(0)),
        ("Tensor 'b' .* is not where its shape says", lambda forged: forged.header["b"].update(data_offsets=[25, 40])),
        ("Tensor 'a' .* is not where its shape says", _unaligned),
        *(("no place in its text", told(start=start)) for start in (-1, True, 7.0, None, 2**48)),
        *(("no text, or a long one", told(made_with=TOLD | {name: 1})) for name in TOLD),
        ("Not a blob, or a damaged one", told(kind="other")),
    ]
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, 5, dtype=torch.uint8)}
    entry, data = joined(ENTRY, tensors, {})
    checked(Forged(data).joined())
    for says, change in wrong:
        forged = Forged(data)
        change(forged)
        with pytest.raises(DamagedBlobError, match=says):
            Blob(memoryview(forged.joined()))
    for other in (data + b"x", data[:-1]):
        with pytest.raises(DamagedBlobError, match=f"A blob of {len(data)} bytes has {len(other)}"):
            Blob(memoryview(other))
    blob = checked(data)
    for name, dtype, shape in (("c", torch.float32, (2, 3)), ("a", torch.int32, (2, 3)), ("a", torch.float32, (3, 2))):
        with pytest.raises(DamagedBlobError, match=f"should have a tensor '{name}'"):
            blob.require(name, dtype, shape)
    assert blob.require("a", torch.float32, (2, 3)).shape == (2, 3)
    for numbers in ({"nbytes": -1}, {"nbytes": True}, {"nbytes": 1.0}, {"nbytes": None}, {"start": -1}):
        told_of = json.loads(record.pack_entry(entry)) | numbers
        with pytest.raises(ValueError, match="An entry is JSON"):
            record.unpack_entry(json.dumps(told_of).encode())
