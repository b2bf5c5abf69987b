"""An `Entry` as bytes, for places that keep it apart from its blob; and back."""

import struct

import numpy as np

from kvboost_hf.cache.tiers.base import Entry, Kind

_FORMAT = b"KVE1"
_NUMBERS = struct.Struct("<4sqq7I")  # format, start, bytes of the blob, and the length of each field


def pack_entry(entry: Entry) -> bytes:
    """All of an entry."""
    tokens = np.ascontiguousarray(entry.tokens, "<i8").tobytes()
    kind = entry.kind.value.encode()
    fields = (entry.key, kind, entry.model, entry.root, entry.parent, entry.head, tokens)
    return _NUMBERS.pack(_FORMAT, entry.start, entry.nbytes, *map(len, fields)) + b"".join(fields)


def unpack_entry(packed: bytes) -> Entry:
    """The entry that `pack_entry` has packed.

    Raises:
        ValueError: if it is not what `pack_entry` made, or only a part of it.
    """
    if len(packed) < _NUMBERS.size or not packed.startswith(_FORMAT):
        raise ValueError(f"An entry begins with {_FORMAT!r} and {_NUMBERS.size} bytes of numbers, got {packed[:4]!r}.")
    _, start, nbytes, *lengths = _NUMBERS.unpack_from(packed)
    if _NUMBERS.size + sum(lengths) != len(packed):
        raise ValueError(f"This entry has {_NUMBERS.size + sum(lengths)} bytes, got {len(packed)}.")
    fields, at = [], _NUMBERS.size
    for length in lengths:
        fields.append(packed[at : at + length])
        at += length
    key, kind, model, root, parent, head, tokens = fields
    return Entry(
        key=key,
        kind=Kind(kind.decode()),
        model=model,
        root=root,
        parent=parent,
        head=head,
        start=start,
        tokens=np.frombuffer(tokens, "<i8").astype(np.int64, copy=False),
        nbytes=nbytes,
    )
