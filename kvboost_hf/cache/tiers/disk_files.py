"""The files of the disk tier: one per blob, one per blob that is being written, and one of notices.

Links are not followed, in whatever place: what is no folder or file of ours counts as not being there.

Whether a process will ever finish the file that it writes is told by its signature: a wrong answer costs the blob.
"""

import errno
import fcntl
import logging
import os
import re
import shlex
import stat
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4
from weakref import WeakSet

from kvboost_hf.cache.tiers.base import Heard

_log = logging.getLogger(__name__)

_INDEX, _BLOBS = "index.sqlite3", "blobs"  # what is in the folder of a tier
_SUFFIX, _UNFINISHED = ".safetensors", ".tmp"
_NAME = re.compile(rf"([0-9a-f]{{40}})(?:\{_SUFFIX}|\.([0-9a-f]{{32}})\{_UNFINISHED})")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})  # the last two, where there is a link
_MAX_MAPPED = 128  # each mapping holds a file descriptor; beyond, blobs are copied


class BlobFiles:
    """Blobs by key, at `<folder>/<2 hex digits>/<key>.safetensors`, readable for their owner only.

    A blob is written under a name of its own, with a `token` that nobody else has, and then renamed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._mapped: WeakSet[mmap] = WeakSet()

    def create(self, key: bytes, token: str) -> None:
        """An empty file for a blob that is to be written."""
        name = _name(key, token)
        for folder in (self._folder, os.path.join(self._folder, name[:2])):
            if os.path.islink(folder):
                os.unlink(folder)
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
                os.chmod(folder, 0o700)  # whatever the umask
        with self._opened(key) as folder_fd:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)
            os.fchmod(file, 0o600)
            os.close(file)

    def write(self, key: bytes, token: str, parts: Iterable[bytes | memoryview]) -> bool:
        """Write a blob, and give it its name; False if what was created has been removed."""
        name = _name(key, token)
        with _IfThere(), self._opened(key) as folder:
            with open(os.open(name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=folder), "wb") as file:
                file.writelines(parts)
            os.replace(name, _name(key), src_dir_fd=folder, dst_dir_fd=folder)
            return True
        return False

    def remove(self, key: bytes) -> None:
        """Remove a blob."""
        with _IfThere(), self._opened(key) as folder:
            os.unlink(_name(key), dir_fd=folder)

    def remove_unfinished(self, key: bytes, token: str) -> None:
        """Remove what is being written: whoever writes it fails."""
        with _IfThere(), self._opened(key) as folder:
            os.unlink(_name(key, token), dir_fd=folder)

    def status(self, key: bytes) -> os.stat_result | None:
        """Status of the file of a blob, or None if there is none."""
        with _IfThere(), self._opened(key) as folder:
            found = os.stat(_name(key), dir_fd=folder, follow_symlinks=False)
            return found if stat.S_ISREG(found.st_mode) else None
        return None

    def read(self, key: bytes, nbytes: int) -> memoryview | None:
        """A blob, mapped copy-on-write, or None if there is none of that size."""
        name, flags = _name(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would block
        opened: list[int] = []
        try:
            opened.append(os.open(self._folder, _FOLDER))
            opened.append(os.open(name[:2], _FOLDER, dir_fd=opened[-1]))
            with open(os.open(name, flags, dir_fd=opened[-1]), "rb", buffering=0) as file:
                return self._content(file, nbytes)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
        finally:
            for folder in opened:
                os.close(folder)
        return None

    def _content(self, file: FileIO, nbytes: int) -> memoryview | None:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
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

    def names(self, first: int | None = None) -> Iterator[tuple[bytes, str | None]]:
        """The keys of all files, or of those with a `first` byte, each with its token if it is being written.

        Other files are passed over.
        """
        for folder in _scan(self._folder) if first is None else (f"{first:02x}",):
            for name in _scan(os.path.join(self._folder, folder)):
                found = _NAME.fullmatch(name)
                if found is not None and name[:2] == folder:
                    yield bytes.fromhex(found[1]), found[2]

    @contextmanager
    def _opened(self, key: bytes) -> Iterator[int]:
        """The folder that the files of a key are in."""
        outer = os.open(self._folder, _FOLDER)
        try:
            inner = os.open(_name(key)[:2], _FOLDER, dir_fd=outer)
        finally:
            os.close(outer)
        try:
            yield inner
        finally:
            os.close(inner)


def is_file_name(key: object, token: object) -> bool:
    """Whether these are parts of the name of a file as it is written here."""
    return type(key) is bytes and isinstance(token, str | None) and _NAME.fullmatch(_name(key, token)) is not None


def _name(key: bytes, token: str | None = None) -> str:
    return f"{key.hex()}{_SUFFIX if token is None else f'.{token}{_UNFINISHED}'}"


def _scan(folder: str) -> list[str]:
    with _IfThere():
        opened = os.open(folder, _FOLDER)
        try:
            return os.listdir(opened)
        finally:
            os.close(opened)
    return []


class _IfThere:
    """Leave the block where a file or folder is not there."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, OSError) and error.errno in _ABSENT


_EXPIRES_NS = 120 * 10**9

in_flight: set[str] = set()  # tokens of what this process is writing


def signature() -> tuple[str, int, int]:
    """This host, this process, and now."""
    return os.uname().nodename, os.getpid(), time.time_ns()


def is_dead(token: str, host: str, pid: int, since: int) -> bool:
    """Whether the writer that signed so was killed, or is stuck."""
    this_host, this_pid, now = signature()
    if not -_EXPIRES_NS < now - since < _EXPIRES_NS:
        return True
    if host != this_host:
        return False
    if pid == this_pid:
        return token not in in_flight  # another one had this number before
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


class _Place(NamedTuple):
    """A place in a file."""

    # Device, inode, size and time of change of the file; None where there was none.
    seen: tuple[int, int, int, int] | None
    lineage: bytes = b""  # names all files that followed one another
    offset: int = 0  # bytes of all lines before the place, in all of these files


_HEADER = re.compile(rb"kvboost_hf notices 1 ([0-9a-f]{32}) ([0-9]{20})\n")
_HEADER_BYTES = len(f"kvboost_hf notices 1 {0:032} {0:020}\n")
_MAX_FILE_BYTES = 8 * 2**20


class NoticeFile:
    """Notices in a file for its owner only, a line each, which processes of one machine share.

    A line has a checksum. When the file is longer than `max_bytes`, its last half takes its place.
    """

    def __init__(self, path: Path, max_bytes: int = _MAX_FILE_BYTES) -> None:
        self._path, self._max_bytes = str(path), max_bytes

    def append(self, notice: bytes) -> None:
        """Add a notice. Raises OSError."""
        with self._locked() as file:
            size = os.fstat(file).st_size
            header = _HEADER.fullmatch(os.pread(file, _HEADER_BYTES, 0))
            start = b""
            if header is None:
                os.ftruncate(file, 0)
                start = _header(uuid4().hex.encode(), 0)
            elif os.pread(file, 1, size - 1) != b"\n":
                start = b"\n"  # whoever wrote there was killed
            line = start + b"%08x %s\n" % (zlib.crc32(notice), notice)
            if os.write(file, line) < len(line):  # the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
            if header is not None and size > self._max_bytes:
                self._shorten(file, header[1], int(header[2]))

    def read(self, since: _Place | None) -> Heard:
        """Notices since a place, or all for None. Raises OSError."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return Heard(_Place(None), complete=since is None or since.seen is None)
        seen = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if since is not None and since.seen == seen:
            return Heard(since)
        with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            header = _HEADER.fullmatch(file.read(_HEADER_BYTES))
            if header is None:  # being made, or made by somebody else
                return Heard(since or _Place(None), complete=since is None or since.seen is None)
            lineage, base = header[1], int(header[2])
            known = since is None or since.lineage in (b"", lineage)
            offset = base if since is None or not known else since.offset
            end = base + os.fstat(file.fileno()).st_size - _HEADER_BYTES
            complete = known and base <= offset <= end
            offset = offset if complete else base
            file.seek(_HEADER_BYTES + offset - base)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        notices = []
        for line in data.splitlines():
            notice = line[9:]
            if line == b"%08x %s" % (zlib.crc32(notice), notice):
                notices.append(notice)
            else:  # it may have told of anything
                complete = False
        return Heard(_Place(seen, lineage, offset + len(data)), notices, complete or since is None)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, which nobody else writes to or replaces meanwhile."""
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                own = os.fstat(file)
                try:
                    there = os.stat(self._path, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino):
                    yield file
                    return
            finally:
                os.close(file)

    def _shorten(self, file: int, lineage: bytes, base: int) -> None:
        lines = os.pread(file, os.fstat(file).st_size, 0)[_HEADER_BYTES:]
        cut = lines.find(b"\n", len(lines) // 2) + 1
        beside = f"{self._path}.tmp"  # nobody else writes one; one that is there is of a process that was killed
        with suppress(FileNotFoundError):
            os.unlink(beside)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.write(_header(lineage, base + cut) + lines[cut:])
        os.replace(beside, self._path)


def _header(lineage: bytes, base: int) -> bytes:
    return b"kvboost_hf notices 1 %s %020d\n" % (lineage, base)


def is_writable(folder: Path) -> bool:
    """Make the folder if it is missing; tells whether it can be written to.

    ValueError: it cannot be made, can neither be written to nor be read, or is open to others.
    """
    try:
        if not folder.is_dir():
            folder.mkdir(0o700, parents=True)
            folder.chmod(0o700)
    except OSError as error:
        raise ValueError(
            f"`path` must be a folder, or one that can be made, got {str(folder)!r} ({error.strerror}). "
            "Pass another one, or change who may write there."
        ) from error
    _require_own(folder)
    index, blobs = folder / _INDEX, folder / _BLOBS
    for place, rights in ((folder, os.R_OK | os.X_OK), (blobs, os.R_OK | os.X_OK), (index, os.R_OK)):
        if os.path.exists(place) and not os.access(place, rights):
            raise ValueError(
                f"`path` must be a folder whose files this user ({os.geteuid()}) can read, got {str(folder)!r}, where "
                f"{str(place)!r} cannot be read. Pass another one, or change who may read it."
            )
    if os.access(folder, os.W_OK) and (not index.exists() or os.access(index, os.W_OK)):
        return True
    if not index.is_file():
        raise ValueError(
            f"`path` must be a folder that can be written to, or one that holds blobs, got {str(folder)!r}. "
            "Pass another one, or change who may write there."
        )
    return False


def holds_blobs(folder: str | os.PathLike[str]) -> bool:
    """Whether a disk tier was ever in a folder, as far as this user can tell."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (_INDEX, _BLOBS)) or not os.access(
        folder, os.X_OK
    )


def _require_own(folder: Path) -> None:
    """Refuse (ValueError) a folder that others than this user and root may write to; a group is only warned of."""
    status, user = folder.stat(), os.geteuid()
    if user != 0 and status.st_uid not in (user, 0):
        raise ValueError(
            f"`path` must be a folder of the user who runs this ({user}), got {str(folder)!r}, which belongs to user "
            f"{status.st_uid}: whoever writes there decides what a model reads. Pass another one, or change its owner."
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_IWOTH:
        raise ValueError(
            f"`path` must be a folder that not everybody may write to, got {str(folder)!r} with mode {mode:04o}: "
            f"whoever writes there decides what a model reads. Run `chmod 700 {shlex.quote(str(folder))}`."
        )
    if mode & stat.S_IWGRP:
        _log.warning(
            "Disk tier %s may be written to by its group (mode %04o), which can decide what a model reads.",
            folder,
            mode,
        )
