"""The files of the disk tier: one per blob, and one per blob that is being written."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from weakref import WeakSet

_SUFFIX, _UNFINISHED = ".safetensors", ".tmp"
_MAX_MAPPED = 128  # each mapping holds a file descriptor; beyond, blobs are copied


class BlobFiles:
    """Blobs by key, at `<folder>/<2 hex digits>/<key>.safetensors`, readable for their owner only.

    A blob is written under a name of its own, with a `token` that nobody else has, and then renamed.

    Args:
        folder: Where to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._mapped: WeakSet[mmap] = WeakSet()

    def create(self, key: bytes, token: str) -> None:
        """An empty file for a blob that is to be written."""
        path = self._path(key, token)
        for folder in (self._folder, os.path.dirname(path)):
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
                os.chmod(folder, 0o700)  # whatever the umask
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(file, 0o600)
        os.close(file)

    def write(self, key: bytes, token: str, parts: Iterable[bytes | memoryview]) -> bool:
        """Write a blob, and give it its name; False if what was created has been removed."""
        path = self._path(key, token)
        try:
            with open(os.open(path, os.O_WRONLY), "wb") as file:
                file.writelines(parts)
            os.replace(path, self._path(key))
        except FileNotFoundError:
            return False
        return True

    def remove(self, key: bytes) -> None:
        """Remove a blob."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def remove_unfinished(self, key: bytes, token: str) -> None:
        """Remove what is being written: whoever writes it fails."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(key, token))

    def status(self, key: bytes) -> os.stat_result | None:
        """What the file system says of a blob, or None if there is none."""
        try:
            return os.stat(self._path(key))
        except FileNotFoundError:
            return None

    def read(self, key: bytes, nbytes: int) -> memoryview | None:
        """A blob, mapped copy-on-write, or None if there is none of that size."""
        try:
            file = open(self._path(key), "rb", buffering=0)
        except FileNotFoundError:
            return None
        with file:
            if os.fstat(file.fileno()).st_size != nbytes:
                return None
            if nbytes and len(self._mapped) < _MAX_MAPPED:
                mapped = mmap(file.fileno(), nbytes, access=ACCESS_COPY)
                self._mapped.add(mapped)
                return memoryview(mapped)
            copied = bytearray(nbytes)
            at = 0
            while at < nbytes:
                count = file.readinto(memoryview(copied)[at:])
                if not count:
                    return None
                at += count
            return memoryview(copied)

    def names(self) -> Iterator[tuple[bytes, str | None]]:
        """The keys of all files, each with its token if it is being written."""
        for folder in _scan(self._folder):
            for name in _scan(os.path.join(self._folder, folder)):
                stem, dot, token = name.partition(".")
                try:
                    key = bytes.fromhex(stem)
                except ValueError:
                    continue
                if dot + token == _SUFFIX:
                    yield key, None
                elif token.endswith(_UNFINISHED):
                    yield key, token.removesuffix(_UNFINISHED)

    def _path(self, key: bytes, token: str | None = None) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}{_SUFFIX if token is None else f'.{token}{_UNFINISHED}'}"


def _scan(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
