"""Keeps streamed layers in files, one each, which later runs with the same checkpoint use again."""

import errno
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock

from kvboost_hf.offload.flat import FlatLayout

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger(__name__)
_INDEX, _VERSION, _LOCK = "streamed-layers.json", 1, "streamed-layers.lock"


class FileSource:
    """The bytes of a layer in a file.

    Args:
        path: The file, which contains the bytes of the layer only.
        nbytes: Its size.
        mtime_ns: Its time of last change.
    """

    host = None

    def __init__(self, path: Path, nbytes: int, mtime_ns: int) -> None:
        self.nbytes = nbytes
        self.path = str(path)
        self._mtime_ns = mtime_ns

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """See `Source.read_into`. The pages that were read are dropped from the page cache."""
        wanted, done = target.numpy().data, 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(start)
                while done < len(wanted) and (count := file.readinto(wanted[done:])):
                    done += count
                _forget_pages(file.fileno(), start, done)
                found = os.fstat(file.fileno())  # after reading, so that it was whole until then
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, f"A streamed layer is gone. {_REMEDY}", self.path) from error
        if found.st_size != self.nbytes or done < len(wanted):
            raise OSError(f"{self.path} must have {self.nbytes} bytes, has {found.st_size}. {_REMEDY}")
        if found.st_mtime_ns != self._mtime_ns:
            raise OSError(f"{self.path} was changed after it was written. {_REMEDY}")


_REMEDY = "Load the model again: that writes it anew."


class LayerFolder:
    """A folder with the layers of one checkpoint, and an index of them.

    A file is identified by its size and time of last change, not by its content.

    Args:
        folder: Created if it is missing. Layers of another checkpoint in it are removed.
        identity: Of the checkpoint; different for other bytes.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: str | Path, identity: str) -> None:
        self._folder, self._identity = Path(folder).expanduser(), identity
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if (self._folder / _INDEX).exists() and not self._entries():
                _log.warning("%s holds layers of another checkpoint. %s takes their place.", folder, identity)
                for path in (self._folder / _INDEX, *self._folder.glob("layer-[0-9]*.bin")):
                    path.unlink(missing_ok=True)

    def find(self, index: int, layout: FlatLayout) -> FileSource | None:
        """Layer `index`, if it was written with this layout and is unchanged since; else None."""
        path = self._path(index)
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        if self._entries().get(str(index)) != [layout.nbytes, _digest(layout), found.st_mtime_ns]:
            return None
        return FileSource(path, layout.nbytes, found.st_mtime_ns) if found.st_size == layout.nbytes else None

    def write(self, index: int, flat: torch.Tensor, layout: FlatLayout) -> FileSource:
        """Write layer `index`, unless `find` finds it.

        Args:
            index: Of the layer.
            flat: Its bytes, uint8 [layout.nbytes], on the CPU.
            layout: Offsets of its tensors.

        Raises:
            OSError: the disk is full, or cannot be written to; no partial file is left.
        """
        with self._locked():
            if (there := self.find(index, layout)) is not None:
                return there
            path = self._path(index)
            written = _replace(path, flat.numpy().data)
            entries = {**self._entries(), str(index): [layout.nbytes, _digest(layout), written.st_mtime_ns]}
            record = {"version": _VERSION, "identity": self._identity, "layers": entries}
            _replace(self._folder / _INDEX, memoryview(json.dumps(record).encode()))
        return FileSource(path, layout.nbytes, written.st_mtime_ns)

    def _entries(self) -> dict[str, object]:
        try:
            index = json.loads((self._folder / _INDEX).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        if not isinstance(index, dict) or (index.get("version"), index.get("identity")) != (_VERSION, self._identity):
            return {}
        return dict(index["layers"])

    def _path(self, index: int) -> Path:
        return self._folder / f"layer-{index:05}.bin"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes from writing to the folder."""
        if sys.platform == "win32":  # folders cannot be opened there
            with FileLock(self._folder / _LOCK):
                yield
            return
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def _digest(layout: FlatLayout) -> str:
    places = [(name, place.offset, place.shape, str(place.dtype)) for name, place in layout.places.items()]
    return hashlib.sha256(repr(places).encode()).hexdigest()


def _replace(path: Path, content: memoryview) -> os.stat_result:
    unfinished = path.with_suffix(".tmp")
    try:
        with open(unfinished, "wb", buffering=0, opener=_for_owner) as file:
            done = 0
            while done < len(content):
                done += file.write(content[done:])
            os.fsync(file.fileno())
            _forget_pages(file.fileno(), 0, done)
        written = os.stat(unfinished)  # on Windows its time of last change is known when it is closed
        os.replace(unfinished, path)
    except OSError as error:
        message = f"could not be written ({error.strerror}): it takes {len(content)} bytes, and {path.parent} has "
        message += f"{shutil.disk_usage(path.parent).free} free. Make room there, or choose another `disk_folder`"
        raise OSError(error.errno, message, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return written


def _forget_pages(file: int, start: int, nbytes: int) -> None:
    if sys.platform == "linux":
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
