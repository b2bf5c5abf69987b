"""A tier whose blobs carry a seal that only whoever has the key can make.

Checksums find damage, but anybody can make them. A seal is an HMAC-SHA256 over the key that a blob is found by and all
bytes of the blob, whose header repeats its whole entry: kind, model, root, parent, place and tokens. It stands behind
the blob. What other tiers keep beside blobs, to find them by, is not sealed: whoever reads a blob compares it with the
entry in it.
"""

import hmac
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import getLogger

from kvboost_hf.cache.tiers.base import Entry, Tier
from kvboost_hf.cache.tiers.failures import Failures
from kvboost_hf.cache.tiers.record import DamagedBlobError

_log = getLogger(__name__)
_PURPOSE = b"kvboost_hf sealed blob 1"  # a key that is used elsewhere, too, makes no seals there
_SEAL_BYTES = 32
_LEAST_BYTES, _MOST_BYTES = 32, 4096  # of a key
_REMEDY = "Make one with `(umask 077; openssl rand -out FILE 32)`."


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

    def delete(self, keys: Iterable[bytes]) -> None:
        self._tier.delete(keys)

    def clear(self, model: bytes) -> None:
        self._tier.clear(model)

    def stats(self) -> Mapping[str, int | float | str]:
        """`forged` counts blobs without their seal, and so does `errors`."""
        stats = self._tier.stats()
        return {**stats, "errors": int(stats["errors"]) + self._forged.count, "forged": self._forged.count}

    def hits(self) -> Mapping[bytes, int]:
        return self._tier.hits()

    def close(self) -> None:
        self._tier.close()

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
