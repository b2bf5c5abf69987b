"""Blobs whose contents follow from their keys, so that whoever reads one can tell whether it is right."""

from hashlib import blake2b, shake_128

import numpy as np
import torch

from tests.internals.cache import Blob, Entry, Kind, dump

Made = tuple[Entry, list[bytes | memoryview]]


def key_of(n: int) -> bytes:
    return blake2b(str(n).encode(), digest_size=20).digest()


def make_blob(
    n: int,
    size: int = 1000,
    *,
    parent: bytes = b"nothing",
    start: int = 0,
    root: bytes = b"root",
    head: bytes = b"head",
    model: bytes = b"model",
    kind: Kind = Kind.CHUNK,
) -> Made:
    key = key_of(n)
    entry = Entry(key, kind, model, root, parent, head, start, np.arange(n, n + 16), 0)
    contents = torch.from_numpy(np.frombuffer(shake_128(key).digest(size), np.uint8).copy())[None]
    return dump(entry, {"contents": contents}, None)


def is_right(key: bytes, blob: memoryview) -> bool:
    """Whether a blob is what `make_blob` made for this key."""
    read = Blob(blob)
    read.check_all()
    contents = read.tensor("contents").numpy().tobytes()
    return read.entry.key == key and contents == shake_128(key).digest(len(contents))
