"""A chunk or states as one blob, and back: the safetensors format, with a checksum for every part of it.

What the blob is found by, how its tensors belong together and all checksums are in the metadata of the safetensors
header, which has a checksum of its own. Tensors are checked one leading entry at a time, so that one layer can be read
without the others. Checksums are 64-bit XXH3: they find damage, not malice.

Against malice a blob carries a seal, which only whoever has the key can make: an HMAC-SHA256 over the key of the blob
and all its bytes, whose header repeats its whole entry. It stands behind the blob. What other tiers keep
beside blobs, to find them by, is not sealed: whoever reads a blob compares it with the entry in it.
"""

import hmac
import json
import os
import stat
import struct
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from logging import getLogger
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from kvboost_hf.cache.tiers.base import Entry, Failures, Heard, Kind, MadeWith, NoticeBoard, Tier

if TYPE_CHECKING:
    import torch  # which takes a second, and whoever only looks at blobs needs none of it

_FORMAT = "kvboost_hf 1"
_DTYPES = {  # by name in the format: the name in torch, and bytes
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_NAMES = {f"torch.{dtype}": name for name, (dtype, _) in _DTYPES.items()}
_ALIGNMENT = 64
_UNCHECKED = "0" * 32  # stands where the checksum of the header goes
_MAX_HEADER_BYTES = 16 * 2**20  # more than a million tokens
_MAX_DIMENSIONS = 8
_MAX_COUNT = 2**48  # of tokens, bytes, entries
_MAX_CHARACTERS = 1024  # of what a blob was made with
_DIGESTS = ("key", "model", "root", "parent", "head")
_PACKED = b"KVE1"  # with which entries began before they were JSON
_NUMBERS = struct.Struct("<4sqq7I")  # that, start, bytes of the blob, and the length of each field

_log = getLogger(__name__)
_PURPOSE = b"kvboost_hf sealed blob 1"  # a key that is used elsewhere, too, makes no seals there
_SEAL_BYTES = 32
_NOTICE = b"notice"  # in place of the key of a blob
_LEAST_BYTES, _MOST_BYTES = 32, 4096  # of a key
_REMEDY = "Make one with `(umask 077; openssl rand -out FILE 32)`."


class DamagedBlobError(ValueError):
    """A blob is not what was written."""


def dump(entry: Entry, tensors: Mapping[str, "torch.Tensor"], layout: Any) -> tuple[Entry, list[bytes | memoryview]]:
    """Make a blob: returns the entry with its bytes, and its parts.

    The tensors are in host memory, contiguous, of at least one dimension; they are not copied. `layout` says how they
    belong together. TypeError: it is no JSON, or a tensor has a dtype that the format does not know.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that all of them are aligned
    header: dict[str, Any] = {}
    sums: dict[str, list[int]] = {}
    parts: list[memoryview] = []
    at = 0
    for name, tensor in ordered:
        if str(tensor.dtype) not in _NAMES:
            raise TypeError(f"safetensors has no {tensor.dtype}.")
        parts.append(_memory(tensor))
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": _NAMES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": offsets}
        sums[name] = [xxhash.xxh3_64_intdigest(_memory(part)) for part in tensor]
        at += tensor.nbytes
    metadata = {"entry": json.dumps(_entry_as_json(entry)), "layout": json.dumps(layout), "sums": json.dumps(sums)}
    text = json.dumps({"__metadata__": {"check": _UNCHECKED, "format": _FORMAT, **metadata}, **header}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    text = text.replace(_UNCHECKED.encode(), xxhash.xxh3_128_hexdigest(text).encode(), 1)
    return replace(entry, nbytes=8 + len(text) + at), [len(text).to_bytes(8, "little") + text, *parts]


class _Header(NamedTuple):
    """Header of a blob, in the form that `dump` gives it."""

    tensors: dict[str, Any]
    sums: dict[str, list[int]]
    layout: Any
    layout_text: str
    entry: Entry
    start: int  # of the tensors


class Blob:
    """A blob, read where it is: its tensors are views of `data`, and hold on to it.

    Its tensors lie in it as their shapes say, one behind the other, and each has as many checksums as leading entries.
    Whether they are those that somebody expects is for whoever reads them to tell. DamagedBlobError: its header is not
    what `dump` writes, or its size is another than the header tells.
    """

    def __init__(self, data: memoryview) -> None:
        self._header, self._sums, self.layout, self.layout_text, self.entry, self._start = _read_header(data)
        self.was_checked = False  # all of it, once
        if self.entry.nbytes != len(data):
            raise DamagedBlobError(f"A blob of {self.entry.nbytes} bytes has {len(data)}.")
        self._data = (
            data if not data.readonly else memoryview(bytearray(data))
        )  # tensors are views that may be written

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._header)

    def require(self, name: str, dtype: "torch.dtype", shape: Sequence[int]) -> "torch.Tensor":
        """A tensor that is known to have this dtype and shape; its contents are unchecked.

        DamagedBlobError: there is none, or it is another.
        """
        spec = self._header.get(name)
        if spec is None or spec["dtype"] != _NAMES.get(str(dtype)) or spec["shape"] != list(shape):
            raise DamagedBlobError(f"A blob should have a tensor {name!r} of {dtype} {list(shape)}, got {spec}.")
        return self.tensor(name)

    def tensor(self, name: str) -> "torch.Tensor":
        """A tensor, unchecked."""
        import torch

        spec = self._header[name]
        dtype, shape = getattr(torch, _DTYPES[spec["dtype"]][0]), spec["shape"]
        start, stop = spec["data_offsets"]
        if start == stop:
            return torch.empty(shape, dtype=dtype, device="cpu")
        part = self._data[self._start + start : self._start + stop]
        return torch.frombuffer(part, dtype=dtype).view(shape)

    def check(self, name: str, indices: Iterable[int]) -> None:
        """Compare leading entries of a tensor with their checksums. DamagedBlobError: one differs."""
        sums, (start, stop) = self._sums[name], self._header[name]["data_offsets"]
        size = (stop - start) // max(1, len(sums))
        for index in indices:
            at = self._start + start + index * size
            if xxhash.xxh3_64_intdigest(self._data[at : at + size]) != sums[index]:
                raise DamagedBlobError(f"Entry {index} of tensor {name!r} of a blob does not have its checksum.")

    def check_all(self) -> None:
        """Compare all of it with its checksums. DamagedBlobError: something differs."""
        for name, sums in self._sums.items():
            self.check(name, range(len(sums)))
        self.was_checked = True


def read_entry(blob: memoryview) -> Entry:
    """The entry of a blob. More may follow on the blob, such as the seal of a `SealedTier`.

    DamagedBlobError: that part of the blob is damaged, it is cut short, or it is none.
    """
    entry = _read_header(blob).entry
    if entry.nbytes > len(blob):
        raise DamagedBlobError(f"A blob of {entry.nbytes} bytes has {len(blob)}.")
    return entry


def _read_header(data: memoryview) -> _Header:
    try:
        size = int.from_bytes(data[:8], "little")
        start = 8 + size
        if size > _MAX_HEADER_BYTES or start > len(data) or start % _ALIGNMENT:
            raise DamagedBlobError(f"No blob of {len(data)} bytes has a header of {size}.")
        text = bytes(data[8:start])
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        unchecked = text.replace(metadata["check"].encode(), _UNCHECKED.encode(), 1)
        if metadata["format"] != _FORMAT or metadata["check"] != xxhash.xxh3_128_hexdigest(unchecked):
            raise DamagedBlobError("The header of a blob does not have its checksum.")
        sums = json.loads(metadata["sums"])
        end = _end_of(header, sums)
        entry = _entry_from_json(json.loads(metadata["entry"]), start + end)
        layout = metadata["layout"]
        return _Header(header, sums, json.loads(layout), layout, entry, start)
    except DamagedBlobError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # Not the error's own text, which may quote what was read.
        raise DamagedBlobError(f"Not a blob, or a damaged one ({type(error).__name__}).") from error


def _end_of(header: dict[str, Any], sums: dict[str, list[int]]) -> int:
    """The bytes of all tensors, which must be where `dump` would have put them."""
    if header.keys() != sums.keys():
        raise DamagedBlobError("The checksums of a blob are not those of its tensors.")
    end = 0
    for (start, stop), name in sorted([(spec["data_offsets"], name) for name, spec in header.items()]):
        shape, size = header[name]["shape"], _DTYPES[header[name]["dtype"]][1]
        counts = [start, stop, *shape]
        if not 0 < len(shape) <= _MAX_DIMENSIONS or set(map(type, counts)) != {int}:
            raise DamagedBlobError(f"Tensor {name!r} of a blob has no shape.")
        if min(counts) < 0 or max(counts) >= _MAX_COUNT:
            raise DamagedBlobError(f"Tensor {name!r} of a blob has no shape.")
        if type(sums[name]) is not list:
            raise DamagedBlobError(f"Tensor {name!r} of a blob has no checksums.")
        if start != end or start % size or stop - start != prod(shape) * size or len(sums[name]) != shape[0]:
            raise DamagedBlobError(f"Tensor {name!r} of a blob is not where its shape says.")
        end = stop
    return end


def _memory(tensor: "torch.Tensor") -> memoryview:
    import torch

    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


# Entries: as JSON in the headers of blobs, and beside blobs where a tier has no index of its own


def pack_entry(entry: Entry) -> bytes:
    """All of an entry."""
    return json.dumps({**_entry_as_json(entry), "nbytes": entry.nbytes}).encode()


def unpack_entry(packed: bytes) -> Entry:
    """The entry that `pack_entry` has packed, now or in an earlier release. ValueError: it is something else."""
    if packed.startswith(_PACKED):
        return _unpack_numbers(packed)
    try:
        entry = json.loads(packed)
        if not _is_count(entry["nbytes"]):
            raise DamagedBlobError("An entry does not tell the size of its blob.")
        return _entry_from_json(entry, entry["nbytes"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"An entry is JSON, or begins with {_PACKED!r}, got {packed[:4]!r}.") from error


def _unpack_numbers(packed: bytes) -> Entry:
    """An entry as it was written before it was JSON: numbers, among them the length of each field, and the fields."""
    if len(packed) < _NUMBERS.size:
        raise ValueError(f"An entry begins with {_PACKED!r} and {_NUMBERS.size} bytes of numbers, got {packed[:4]!r}.")
    _, start, nbytes, *lengths = _NUMBERS.unpack_from(packed)
    if _NUMBERS.size + sum(lengths) != len(packed):
        raise ValueError(f"This entry has {_NUMBERS.size + sum(lengths)} bytes, got {len(packed)}.")
    fields, at = [], _NUMBERS.size
    for length in lengths:
        fields.append(packed[at : at + length])
        at += length
    key, kind, model, root, parent, head, tokens = fields
    numbers = np.frombuffer(tokens, "<i8").astype(np.int64, copy=False)
    return Entry(key, Kind(kind.decode()), model, root, parent, head, start, numbers, nbytes)


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    digests = {name: getattr(entry, name).hex() for name in _DIGESTS}
    tokens = b64encode(entry.tokens.astype("<i8").tobytes()).decode()
    made = {"made_with": asdict(entry.made_with)} if entry.made_with is not None else {}
    return {**digests, "kind": entry.kind.value, "start": entry.start, "tokens": tokens, **made}


def _entry_from_json(entry: dict[str, Any], nbytes: int) -> Entry:
    digests = [bytes.fromhex(entry[name]) for name in _DIGESTS]
    tokens = np.frombuffer(b64decode(entry["tokens"], validate=True), dtype="<i8").astype(np.int64)
    if not _is_count(entry["start"]):
        raise DamagedBlobError("What a blob is found by has no place in its text.")
    key, model, root, parent, head = digests
    made = _made_with(entry["made_with"]) if "made_with" in entry else None
    return Entry(key, Kind(entry["kind"]), model, root, parent, head, entry["start"], tokens, nbytes, made)


def _made_with(given: dict[str, Any]) -> MadeWith:
    made = MadeWith(**given)
    for told in (made.codec, made.regime, made.attention, made.versions):
        if type(told) is not str or len(told) > _MAX_CHARACTERS:
            raise DamagedBlobError("What a blob was made with is no text, or a long one.")
    return made


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def require_key(key: bytes) -> None:
    """Raise ValueError for a key that is too short, or no bytes."""
    if not isinstance(key, bytes) or len(key) < _LEAST_BYTES:
        got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(f"`tier_key` must be {_LEAST_BYTES} bytes or more, got {got}. {_REMEDY}")


class SealedTier:
    """A `Tier` on another one. What does not have its seal is deleted, and looks like a miss.

    Args:
        tier: Keeps the blobs, and their seals. Whoever shares it needs the same key: others' blobs are deleted.
        key: 32 bytes or more, known to nobody who may not write K/V.

    Raises:
        ValueError: for a key that is too short, or no bytes.
    """

    def __init__(self, tier: Tier, key: bytes) -> None:
        require_key(key)
        self.name, self.location = tier.name, tier.location
        self._tier, self._key = tier, key
        self._forged = Failures(_log, f"Tier {tier.name} at {tier.location}", (DamagedBlobError,))

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        return {key: _without_seal(entry) for key, entry in self._tier.find(keys).items()}

    def find_alike(self, heads: Sequence[bytes]) -> list[Entry]:
        return [_without_seal(entry) for entry in self._tier.find_alike(heads)]

    def entries(self, root: bytes | None = None) -> Iterator[Entry]:
        return map(_without_seal, self._tier.entries(root))

    def read(self, key: bytes) -> memoryview | None:
        """The blob in a copy, for what was compared with its seal must not change any more."""
        data = self._tier.read(key)
        if data is None:
            return None
        copied = memoryview(bytearray(data))
        blob, seal = copied[:-_SEAL_BYTES], copied[-_SEAL_BYTES:]
        if len(copied) < _SEAL_BYTES or not hmac.compare_digest(seal, self._seal(key, [blob])):
            error = DamagedBlobError("It does not have the seal of `tier_key`.")
            self._forged.note("read a blob, which is deleted", error)
            self._tier.delete([key])
            return None
        return blob

    def write(self, entry: Entry, blob: Sequence[bytes | memoryview]) -> bool:
        seal = self._seal(entry.key, blob)
        return self._tier.write(replace(entry, nbytes=entry.nbytes + _SEAL_BYTES), [*blob, seal])

    def touch(self, keys: Sequence[bytes]) -> None:
        self._tier.touch(keys)

    def delete(self, keys: Iterable[bytes]) -> bool:
        return self._tier.delete(keys)

    def clear(self, model: bytes) -> bool | None:
        return self._tier.clear(model)

    def hits(self) -> Mapping[bytes, int]:
        return self._tier.hits()

    def close(self) -> None:
        self._tier.close()

    def announce(self, notice: bytes) -> bool:
        if not isinstance(self._tier, NoticeBoard):
            return True
        return self._tier.announce(self._seal(_NOTICE, [notice]).hex().encode() + notice)

    def heard(self, since: Any) -> Heard | None:
        """Notices with this seal; what others have written there is nothing."""
        heard = self._tier.heard(since) if isinstance(self._tier, NoticeBoard) else Heard(None)
        if heard is None:
            return None
        split = [(each[: 2 * _SEAL_BYTES], each[2 * _SEAL_BYTES :]) for each in heard.notices]
        sealed = [
            notice for seal, notice in split if hmac.compare_digest(seal, self._seal(_NOTICE, [notice]).hex().encode())
        ]
        return replace(heard, notices=sealed)

    def stats(self) -> Mapping[str, int | float | str]:
        """`forged` counts blobs without their seal, and so does `errors`."""
        stats = self._tier.stats()
        return {**stats, "errors": int(stats["errors"]) + self._forged.count, "forged": self._forged.count}

    def _seal(self, key: bytes, blob: Iterable[bytes | memoryview]) -> bytes:
        made = hmac.new(self._key, _PURPOSE, "sha256")
        made.update(len(key).to_bytes(8, "little") + key)
        for part in blob:
            made.update(part)
        return made.digest()


def read_tier_key(path: str | os.PathLike[str]) -> bytes:
    """The key in a file, byte for byte.

    Args:
        path: A file of 32 to 4,096 bytes that nobody else can read.

    Raises:
        ValueError: if others can read it, or it has fewer bytes or more.
        OSError: if it cannot be read.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"The key of tiers must be in a file, got {os.fspath(path)!r}, which is none. {_REMEDY}")
        mode = stat.S_IMODE(status.st_mode)
        if sys.platform != "win32" and mode & (stat.S_IRWXG | stat.S_IRWXO):  # Windows tells nothing by it
            raise ValueError(
                f"The file with the key of tiers must be open to its owner only, got {os.fspath(path)!r} with mode "
                f"{mode:04o}. Run `chmod 600` on it, and make another key if somebody may have read this one."
            )
        key = file.read(_MOST_BYTES + 1)
    if not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
        raise ValueError(
            f"The file with the key of tiers must have {_LEAST_BYTES} to {_MOST_BYTES} bytes, got {status.st_size} in "
            f"{os.fspath(path)!r}. {_REMEDY}"
        )
    return key


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; a pipe would wait for somebody to write."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _without_seal(entry: Entry) -> Entry:
    return replace(entry, nbytes=entry.nbytes - _SEAL_BYTES)
