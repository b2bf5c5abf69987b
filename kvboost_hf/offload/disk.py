"""Keeps streamed layers in files, one each, which are named by their content and shared by whoever needs them.

    layer-<content>.bin         the bytes of a layer; whoever streams it holds a shared lock of it
    checkpoint-<origin>.json    which of these files the layers of a checkpoint are in

A file is never changed, and none is removed but by `prune`, for which nobody may hold a lock.
"""

import errno
import json
import logging
import os
import re
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from kvboost_hf.checksum import Content, contents
from kvboost_hf.offload.sources import FlatLayout

if sys.platform != "win32":
    import fcntl
    import resource

_log = logging.getLogger(__name__)
_VERSION, _LOCK = 2, "streamed-layers.lock"
LAYER = re.compile(r"layer-[0-9a-f]{32}\.bin")  # the name of a file
_OTHER_FILES = 16  # that loading and running a model open
_REMEDY = "Load the model again: that writes it anew."
Mark = list[int | str]  # size, times of the last change of content and of inode in ns, inode, hash of a sample
_PIECE_BYTES = 4096
_PIECES = 32


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that layers are loaded from."""

    model: str  # the name of the model, for people
    paths: tuple[str, ...]  # real paths of its files
    settings: str  # what the bytes of a layer depend on besides: the dtype, and the order of 4-bit codes

    def marks(self) -> dict[str, Mark]:
        """The marks of its files."""
        found = {}
        for path in self.paths:
            with open(path, "rb", buffering=0) as file:
                found[path] = mark_of(file)
        return found


class FileSource:
    """The bytes of a layer in a file, which stays open and locked, so that it lasts whatever becomes of its folder.

    Args:
        file: The file, which contains the bytes of the layer only.
        nbytes: The size of the layer in bytes.
        contents: The contents of the layer's tensors, by name and in order.
    """

    host = None

    def __init__(self, file: FileIO, nbytes: int, contents: Mapping[str, Content]) -> None:
        self.nbytes, self.contents = nbytes, contents
        self.path = os.fspath(file.name)
        self._file, self._mtime_ns = file, os.fstat(file.fileno()).st_mtime_ns
        self._reading = threading.Lock()
        self._closing = weakref.finalize(self, file.close)

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Read the file, and drop the pages that were read from the page cache."""
        wanted = target.numpy().data
        with self._reading:
            done = read_into(self._file, start, wanted)
            _forget_pages(self._file.fileno(), start, done)
            found = os.fstat(self._file.fileno())  # after reading, so that it was whole until then
        if found.st_size != self.nbytes or done < len(wanted):
            raise OSError(f"{self.path} must have {self.nbytes} bytes, has {found.st_size}. {_REMEDY}")
        if found.st_mtime_ns != self._mtime_ns:
            raise OSError(f"{self.path} was changed after it was written. {_REMEDY}")

    def close(self) -> None:
        self._closing()


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a layer of a checkpoint is."""

    file: str  # name of its file
    mark: Mark  # the mark of the file
    digests: dict[str, str]  # the digests of the layer's tensors, by name

    def contents(self, layout: FlatLayout) -> dict[str, Content]:
        """The contents of the layer's tensors."""
        places = layout.places.items()
        return {name: Content(at.shape, at.dtype, bytes.fromhex(self.digests[name])) for name, at in places}


class LayerFolder:
    """A folder with layers of any checkpoints, which other models, threads and processes may use, too.

    Args:
        folder: Created if it is missing.
        origin: The origin of the layers, so that they can be found before they are loaded; None if that is not known.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: str | Path, origin: Origin | None = None) -> None:
        self._folder = Path(folder).expanduser().absolute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            message = f"`disk_folder` must be a folder that can be made and read ({error.strerror}). Pass another one"
            raise OSError(error.errno, message, str(self._folder)) from error
        self._origin, self._marks = origin, origin.marks() if origin is not None else {}
        self._known = self._recorded()
        self._new: dict[str, _Entry] = {}

    def find(self, number: int, layout: FlatLayout) -> FileSource | None:
        """Layer `number` of the checkpoint, if it was written with this layout and nothing has changed; else None."""
        key = f"{number} {_digest(layout)}"
        entry = self._new.get(key) or self._known.get(key)
        if entry is None or entry.digests.keys() != layout.places.keys():
            return None
        found = entry.contents(layout)
        with self._locked():
            file = self._opened(entry.file)
        if file is None:
            return None
        if os.fstat(file.fileno()).st_size == layout.nbytes:
            mark = mark_of(file)
            if mark == entry.mark or _contents_of(file, layout) == found:  # it may have been copied here
                if mark != entry.mark:
                    self._new[key] = _Entry(entry.file, mark, entry.digests)
                return FileSource(file, layout.nbytes, found)
        file.close()
        return None

    def write(self, number: int, flat: torch.Tensor, layout: FlatLayout) -> FileSource:
        """Write layer `number`, unless there is a file with its content.

        Args:
            number: The number of the layer.
            flat: The bytes of the layer, uint8 [layout.nbytes], on the CPU.
            layout: Offsets of its tensors.

        Raises:
            OSError: the disk is full, or cannot be written to; no partial file is left.
        """
        found = dict(zip(layout.places, contents(layout.views(flat).values()), strict=True))
        digests = {name: each.digest.hex() for name, each in found.items()}
        name = f"layer-{_hash(_digest(layout), *digests.values())}.bin"
        with self._locked():
            file = self._opened(name)
            if file is not None and _contents_of(file, layout) != found:
                file.close()
                file = None
            if file is None:
                _replace(self._folder / name, flat.numpy().data)
                file = self._opened(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, f"A streamed layer is gone. {_REMEDY}", str(self._folder / name))
        self._new[f"{number} {_digest(layout)}"] = _Entry(name, mark_of(file), digests)
        return FileSource(file, layout.nbytes, found)

    def finish(self) -> None:
        """Note where the layers of the checkpoint are, for those who load it later.

        Raises:
            ValueError: the files of the checkpoint were changed since this object was made.
        """
        if self._origin is None:
            return
        try:
            now = self._origin.marks()
            if any(other_content(mark, now[path]) for path, mark in self._marks.items()):
                raise ValueError(
                    f"The files of {self._origin.model} were changed while it was loaded, and may be of two models. "
                    "Load it again."
                )
            if now != self._marks or not self._new:
                return
            with self._locked():
                self._known = {**self._recorded(), **self._new}
                layers = {key: [entry.file, entry.mark, entry.digests] for key, entry in self._known.items()}
                record = {"version": _VERSION, "model": self._origin.model, "files": self._marks, "layers": layers}
                _replace(self._record_path(self._origin), memoryview(json.dumps(record).encode()))
        except OSError as error:
            _log.warning("The next process reads the layers of %s once more: %s", self._origin.model, error)
        self._new = {}

    def _recorded(self) -> dict[str, _Entry]:
        """Where the layers of the checkpoint are, if its files are still those that they came from."""
        if self._origin is None:
            return {}
        record = read_record(self._record_path(self._origin))
        if record is None or record["files"] != self._marks:
            return {}
        return {key: _Entry(*fields) for key, fields in record["layers"].items()}

    def _record_path(self, origin: Origin) -> Path:
        return self._folder / f"checkpoint-{_hash(*origin.paths, origin.settings)}.json"

    def _opened(self, name: str) -> FileIO | None:
        """A file, locked against its removal; None if there is none."""
        try:
            file = open(self._folder / name, "rb", buffering=0)
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"cannot be read ({error.strerror}). Change who may read it, or choose another `disk_folder`"
            raise OSError(error.errno, message, str(self._folder / name)) from error
        if sys.platform != "win32":  # where open files cannot be removed
            with suppress(OSError):  # a file system without locks: `prune` leaves its files alone
                fcntl.flock(file, fcntl.LOCK_SH)
        return file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with locked_folder(self._folder):
            yield


def require_open_files(count: int) -> None:
    """Refuse to stream more layers from files than the process may open.

    Raises:
        OSError: so many files cannot be open at once.
    """
    if sys.platform == "win32":
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/dev/fd")) + _OTHER_FILES
    if limit != resource.RLIM_INFINITY and held + count > limit:
        raise OSError(
            errno.EMFILE,
            f"{count} layers in files need as many open files, and this process may have {limit}, {held} for other "
            f"things. Raise the limit: `ulimit -n {2 * (held + count)}`",
        )


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Exclude other threads and processes from changing a folder of layers."""
    if sys.platform == "win32":  # folders cannot be opened there
        with FileLock(folder / _LOCK):
            yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def read_record(path: Path) -> dict[str, Any] | None:
    """The record of a checkpoint; None if there is none, or it cannot be read or understood."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        _log.warning("%s cannot be read (%s): its layers are loaded once more.", path, error.strerror)
        return None
    return record if _is_record(record) else None


def _is_record(record: object) -> bool:
    """Whether JSON is a record as it is written here."""
    if not isinstance(record, dict) or record.get("version") != _VERSION:
        return False
    layers = record.get("layers")
    if not isinstance(record.get("model"), str) or not isinstance(record.get("files"), dict):
        return False
    return isinstance(layers, dict) and all(map(_is_entry, layers.values()))


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    file, mark, digests = entry
    named = isinstance(file, str) and LAYER.fullmatch(file) is not None  # nor does a record lead elsewhere
    return named and isinstance(mark, list) and isinstance(digests, dict) and all(map(_is_digest, digests.values()))


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{40}", text) is not None


def _contents_of(file: FileIO, layout: FlatLayout) -> dict[str, Content] | None:
    """The contents of the tensors in a file; None if it has another size."""
    flat = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
    if os.fstat(file.fileno()).st_size != layout.nbytes or read_into(file, 0, flat.numpy().data) < layout.nbytes:
        return None
    _forget_pages(file.fileno(), 0, layout.nbytes)
    return dict(zip(layout.places, contents(layout.views(flat).values()), strict=True))


def _digest(layout: FlatLayout) -> str:
    return _hash(*((name, at.offset, at.shape, str(at.dtype)) for name, at in layout.places.items()))


def _hash(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _replace(path: Path, content: memoryview) -> None:
    unfinished = path.with_suffix(".tmp")
    try:
        with open(unfinished, "wb", buffering=0, opener=_for_owner) as file:
            done = 0
            while done < len(content):
                done += file.write(content[done:])
            os.fsync(file.fileno())
            _forget_pages(file.fileno(), 0, done)
        os.replace(unfinished, path)
    except OSError as error:
        message = f"could not be written ({error.strerror})"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            message += ". Change who may write there, or choose another `disk_folder`"
        else:
            message += f": it takes {len(content)} bytes, and {path.parent} has {shutil.disk_usage(path.parent).free} "
            message += "free. Make room there, or choose another `disk_folder`"
        raise OSError(error.errno, message, str(path)) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _forget_pages(file: int, start: int, nbytes: int) -> None:
    if sys.platform == "linux":
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def mark_of(file: FileIO) -> Mark:
    """The mark of an open file: 132 KiB at the most are read of it.

    The sample notices most files that were put in the place of others with the same size, times and inode: one in
    which less than a 32nd part differs may be missed. File systems do not let users set the second time, so that this
    takes a file system without it, or a clock that was set back.
    """
    status = os.fstat(file.fileno())
    last = max(status.st_size - _PIECE_BYTES, 0)
    starts = sorted({last * number // _PIECES for number in range(_PIECES + 1)})
    digest = blake2b(digest_size=16)
    for start in starts:
        digest.update(read_at(file, start, _PIECE_BYTES))
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, digest.hexdigest()]


def other_content(before: Mark, now: Mark) -> bool:
    """Whether a file has other content, as far as marks tell; it may have been copied, or given other rights."""
    return [before[0], before[1], before[-1]] != [now[0], now[1], now[-1]]


def read_at(file: FileIO, start: int, nbytes: int) -> bytes:
    """Up to `nbytes` of a file."""
    found = bytearray(nbytes)
    return bytes(found[: read_into(file, start, memoryview(found))])


def read_into(file: FileIO, start: int, target: memoryview) -> int:
    """Fill `target` from `start` on as far as the file goes; returns the number of bytes.

    A forked process shares the position in a file with its parent, so that it is not used.
    """
    done = 0
    if sys.platform == "win32":  # which has neither forks nor this call
        file.seek(start)
        while done < len(target) and (count := file.readinto(target[done:])):
            done += count
        return done
    if not hasattr(os, "preadv"):  # macOS
        while done < len(target) and (found := os.pread(file.fileno(), len(target) - done, start + done)):
            target[done : done + len(found)] = found
            done += len(found)
        return done
    while done < len(target) and (count := os.preadv(file.fileno(), [target[done:]], start + done)):
        done += count
    return done
