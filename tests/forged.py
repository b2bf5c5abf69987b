"""Blobs that somebody has made who knows the format: other contents, with the checksums that belong to them."""

import json
import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from tests.internals.cache import record


class Forged:
    """A blob taken apart.

    Attributes:
        header: Tensors by name, as safetensors has them.
        entry: What it is found by.
        layout: How its tensors belong together.
        sums: Their checksums.
        body: The bytes of all tensors.
    """

    def __init__(self, data: bytes) -> None:
        start = 8 + int.from_bytes(data[:8], "little")
        self.header: dict[str, Any] = json.loads(data[8:start])
        self.told: dict[str, Any] = self.header.pop("__metadata__")
        self.entry, self.layout, self.sums = (json.loads(self.told.pop(name)) for name in ("entry", "layout", "sums"))
        self.body = bytearray(data[start:])

    @property
    def size(self) -> int:
        """Bytes of the blob, as its header tells."""
        return len(self.joined()) - len(self.body) + max(spec["data_offsets"][1] for spec in self.header.values())

    def sum_up(self) -> None:
        """Make the checksums of the tensors anew."""
        for name, spec in self.header.items():
            start, stop = spec["data_offsets"]
            entries = max(1, spec["shape"][0])
            parts = np.frombuffer(self.body[start:stop], np.uint8).reshape(entries, -1)
            self.sums[name] = [xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts]

    def replace(self, tensors: dict[str, torch.Tensor]) -> None:
        """Other tensors in place of all."""
        _, parts = record.dump(record.read_entry(memoryview(self.joined())), tensors, None)
        other = Forged(b"".join(parts))
        self.header, self.sums, self.body = other.header, other.sums, other.body

    def joined(self) -> bytes:
        """The blob, with the checksum of its header."""
        told = {"entry": json.dumps(self.entry), "layout": json.dumps(self.layout), "sums": json.dumps(self.sums)}
        told = {name: text for name, text in told.items() if text != "null"}
        text = json.dumps({"__metadata__": {**self.told, **told, "check": "0" * 32}, **self.header}).encode()
        text += b" " * (-(8 + len(text)) % 64)
        text = text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1)
        return len(text).to_bytes(8, "little") + text + bytes(self.body)


def tokens_of(entry: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The tokens that a forged entry tells."""
    return np.frombuffer(b64decode(entry["tokens"]), "<i8").astype(np.int64)


def with_tokens(entry: dict[str, Any], tokens: Any) -> None:
    """Have an entry tell others."""
    entry["tokens"] = b64encode(np.asarray(tokens, "<i8").tobytes()).decode()


def change_all(folder: Path, change: Callable[[bytes], bytes]) -> dict[Path, bytes]:
    """Put others in the place of all blobs of a disk tier, in files and index; returns them by their files."""
    made: dict[Path, bytes] = {}
    db = sqlite3.connect(folder / "index.sqlite3")
    for path in sorted((folder / "blobs").rglob("*.safetensors")):
        made[path] = change(path.read_bytes())
        path.write_bytes(made[path])
        db.execute("UPDATE blobs SET nbytes = ? WHERE key = ?", (len(made[path]), bytes.fromhex(path.stem)))
    db.commit()
    db.close()
    return made
