"""Blobs in files of a folder, which several processes may share, found by an index beside them.

Nothing is forced out to the device: a power failure may damage what was written last, and whoever reads a blob checks
its checksums. A process that is killed loses the blob that it was writing, and nothing else.
"""

import sys

if sys.platform == "win32":
    raise ImportError(
        "A disk tier needs a POSIX system, such as Linux, macOS or the Windows Subsystem for Linux. On Windows, use "
        "the tier file:///C:/FOLDER, which keeps K/V in files, too."
    )

import logging
import os
import shlex
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from kvboost_hf.cache.tiers import disk_index as index
from kvboost_hf.cache.tiers.base import Entry, Failures, Heard
from kvboost_hf.cache.tiers.disk_files import BlobFiles, NoticeFile, in_flight, is_dead
from kvboost_hf.cache.tiers.disk_index import DiskIndex
from kvboost_hf.cache.tiers.record import read_entry

_log = logging.getLogger(__name__)
_AT_ONCE = 500  # keys in one query, rows in one page, files removed in one transaction
_MAX_ALIKE = 256
_INDEX, _BLOBS, _NOTICES = "index.sqlite3", "blobs", "notices"


class DiskTier:
    """A `Tier` in a folder.

    The budget holds at every instant, whoever writes: room is made and reserved before a file is written. Processes
    with different budgets each make room for their own. A folder that cannot be written to is read.

    Args:
        path: A folder; it is made if it is missing.
        max_bytes: The budget of all blobs and their rows in the index.
        read_entry: Reads what a blob is found by, for blobs that are in the folder but not in the index.
        name: The name of the tier in reports and `stats()`.

    Raises:
        ValueError: for a path that can be no folder, one that cannot be read, or cannot be written to and has nothing
            to be read, a folder that everybody may write to or that belongs to another user (but root's, and for root
            any), or a budget that is no positive int.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int,
        *,
        read_entry: Callable[[memoryview], Entry] = read_entry,
        name: str = "disk",
    ) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
            raise ValueError(f"`max_bytes` must be a positive int, got {max_bytes!r}.")
        if not str(path):
            raise ValueError("`path` must name a folder, got an empty text. Pass '.' for the current folder.")
        folder = Path(path).expanduser().absolute()
        self.name, self.location, self.max_bytes = name, str(folder), max_bytes
        read_only = not _is_writable(folder)
        self._read_entry = read_entry
        self._evictions = 0
        self._sizes: dict[bytes, int] = {}  # of the blobs that were looked up last: they are read next
        self._failures = Failures(_log, f"Disk tier {folder}", (OSError, sqlite3.Error))
        self._files = BlobFiles(folder / _BLOBS)
        self._notices = NoticeFile(folder / _NOTICES)
        self._index = DiskIndex(folder, self._adopt_all, read_only=read_only)
        with self._failures.caught("open"):
            if read_only:
                _log.warning("Disk tier %s cannot be written to: it is only read.", folder)
            else:
                self._settle()

    # Looking up

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        found: dict[bytes, Entry] = {}
        try:
            with self._index.connected() as db:
                for some in _batches(keys):
                    where = f"key IN ({', '.join('?' * len(some))})"
                    found |= {entry.key: entry for _, entry in index.entries(db, where, some)}
        except self._failures.kinds as error:
            self._failures.note("look up", error)
        self._sizes = {key: entry.nbytes for key, entry in found.items()}
        return found

    def find_alike(self, heads: Sequence[bytes]) -> list[Entry]:
        found: list[tuple[int, Entry]] = []
        with self._failures.caught("look up"), self._index.connected() as db:
            for head in set(heads) - {b""}:
                found += index.entries(db, "head = ? ORDER BY number DESC LIMIT ?", (head, _MAX_ALIKE))
        return [entry for _, entry in sorted(found, key=lambda numbered: -numbered[0])]

    def entries(self, root: bytes | None = None) -> Iterator[Entry]:
        where, values = ("", ()) if root is None else ("root = ? AND ", (root,))
        last: int | None = 0
        while last is not None:
            page: list[tuple[int, Entry]] = []
            with self._failures.caught("list"), self._index.connected() as db:
                page = index.entries(db, f"{where}number > ? ORDER BY number LIMIT ?", (*values, last, _AT_ONCE))
            yield from (entry for _, entry in page)
            last = page[-1][0] if page else None

    def read(self, key: bytes) -> memoryview | None:
        blob = None
        try:
            if (nbytes := self._sizes.get(key)) is not None and not self._index.is_closed:
                blob = self._files.read(key, nbytes)
            if blob is not None:
                return blob
            with self._index.connected() as db:
                nbytes = index.size(db, key)
            if nbytes is not None:
                blob = self._files.read(key, nbytes)
                if blob is None and not self._index.read_only:
                    self._forget_lost(key)
        except self._failures.kinds as error:
            self._failures.note("read", error)
        return blob

    def stats(self) -> Mapping[str, int | float | str]:
        """`bytes` are those that count against `max_bytes`."""
        chunks = used = 0
        with self._failures.caught("count"), self._index.connected() as db:
            chunks, used = index.count(db), index.charged(db)
        return {
            "chunks": chunks,
            "bytes": used,
            "max_bytes": self.max_bytes,
            "evictions": self._evictions,
            "errors": self._failures.count,
            "location": self.location,
        }

    def hits(self) -> Mapping[bytes, int]:
        found: dict[bytes, int] = {}
        with self._failures.caught("count"), self._index.connected() as db:
            found = index.uses(db)
        return found

    # Taking in

    def write(self, entry: Entry, blob: Sequence[bytes | memoryview]) -> bool:
        """What `entry` continues is not given up for it."""
        if self._index.read_only:
            return False
        token = uuid4().hex
        in_flight.add(token)
        kept = False
        with self._failures.caught("write"):
            try:
                kept = self._write(entry, blob, token)
            except BaseException:
                self._undo(entry.key, token)
                raise
            finally:
                in_flight.discard(token)
        return kept

    def _write(self, entry: Entry, blob: Sequence[bytes | memoryview], token: str) -> bool:
        nbytes = sum(memoryview(part).nbytes for part in blob)
        with self._index.transaction() as db:
            self._settle_dead(db, entry.key)
            for _, other in index.tokens(db, "key = ?", (entry.key,)):
                return other is None  # or somebody else is writing it
            if not self._make_room(db, index.charge(entry, nbytes), keep=entry.parent):
                return False
            index.add(db, entry, nbytes, index.now(db), token)
            self._files.create(entry.key, token)
        if not self._files.write(entry.key, token, blob):
            return False  # given up by somebody else meanwhile
        with self._index.transaction() as db:
            return index.mark_ready(db, entry.key, token) or index.size(db, entry.key) is not None

    def _undo(self, key: bytes, token: str) -> None:
        """Give up what could not be written. Where this fails, too, it is done before the next write that needs it."""
        with suppress(OSError, sqlite3.Error):
            self._files.remove_unfinished(key, token)
            with self._index.transaction() as db:
                for _ in index.tokens(db, "key = ? AND token = ?", (key, token)):
                    self._remove(db, key, token)

    def _make_room(self, db: sqlite3.Connection, needed: int, keep: bytes | None = None) -> bool:
        short = index.charged(db) + needed - self.max_bytes
        if short > 0:
            self._settle_dead(db)
            short = index.charged(db) + needed - self.max_bytes
        victims = []
        for key, charge in index.to_give_up(db) if needed <= self.max_bytes else ():
            if short <= 0 or key == keep:
                break
            victims.append(key)
            short -= charge
        if short > 0:
            return False
        for key in victims:
            self._remove(db, key, None)
        self._evictions += len(victims)
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        if keys and not self._index.read_only:
            with self._failures.caught("note uses"), self._index.transaction() as db:
                index.touch(db, keys)

    # Giving up

    def delete(self, keys: Iterable[bytes]) -> bool:
        batches = list(_batches(keys))
        done = 0
        for some in () if self._index.read_only else batches:
            with self._failures.caught("delete"), self._index.transaction() as db:
                for key, token in index.tokens(db, f"key IN ({', '.join('?' * len(some))})", some):
                    self._remove(db, key, token)
                done += 1
        return done == len(batches)

    def announce(self, notice: bytes) -> bool:
        told = self._index.read_only  # whoever cannot write has removed nothing
        with self._failures.caught("announce"):
            if not self._index.read_only:
                self._notices.append(notice)
                told = True
        return told

    def heard(self, since: Any) -> Heard | None:
        try:
            return self._notices.read(since)
        except OSError as error:
            self._failures.note("read notices", error)
            return None

    def clear(self, model: bytes) -> None:
        if not self._index.read_only:
            with self._failures.caught("clear"):
                while self._clear_some(model):
                    pass

    def _clear_some(self, model: bytes) -> bool:
        with self._index.transaction() as db:
            found = index.tokens(db, "model = ? LIMIT ?", (model, _AT_ONCE))
            for key, token in found:
                self._remove(db, key, token)
        return bool(found)

    def close(self) -> None:
        self._index.close()

    def _remove(self, db: sqlite3.Connection, key: bytes, token: str | None) -> None:
        if token is not None:
            self._files.remove_unfinished(key, token)  # first: then nothing can be renamed any more
        self._files.remove(key)
        index.remove(db, key)

    def _forget_lost(self, key: bytes) -> None:
        """Give up a blob whose file is gone or cut short, unless it was written again just now."""
        with self._index.transaction() as db:
            nbytes, status = index.size(db, key), self._files.status(key)
            if nbytes is not None and (status is None or status.st_size != nbytes):
                self._remove(db, key, None)

    # What others left behind

    def _settle(self) -> None:
        """Put right what does not agree, after others were killed; takes the lock only if there is something."""
        files = set(self._files.names())
        with self._index.connected() as db:
            known = set(index.tokens(db, "TRUE", ()))
            too_much = index.charged(db) > self.max_bytes
        lost = {key for key, token in known - files if token is None}
        unknown = files - known
        if not (lost or unknown or too_much or any(token for _, token in known)):
            return
        with self._index.transaction() as db:
            self._settle_dead(db)
            for key in lost:
                if self._files.status(key) is None and index.size(db, key) is not None:
                    index.remove(db, key)
            for key, token in unknown:
                if token is not None and (key, token) not in index.tokens(db, "key = ?", (key,)):
                    self._files.remove_unfinished(key, token)
            self._adopt(
                db, [key for key, token in unknown if token is None and not index.tokens(db, "key = ?", (key,))]
            )
            self._make_room(db, 0)

    def _settle_dead(self, db: sqlite3.Connection, only: bytes | None = None) -> None:
        """Finish or undo what killed processes were writing; of all keys, or of one."""
        for key, nbytes, writer in index.being_written(db, only):
            if is_dead(*writer):
                self._files.remove_unfinished(key, writer[0])
                status = self._files.status(key)
                if status is not None and status.st_size == nbytes:
                    index.mark_ready(db, key, writer[0])
                else:
                    self._remove(db, key, writer[0])

    def _adopt_all(self, db: sqlite3.Connection) -> None:
        """Take in all blobs, for a new index; whoever is writing one fails."""
        for key, token in self._files.names():
            if token is not None:
                self._files.remove_unfinished(key, token)
        self._adopt(db, [key for key, token in self._files.names() if token is None])
        self._make_room(db, 0)

    def _adopt(self, db: sqlite3.Connection, keys: Iterable[bytes]) -> None:
        """Take in blobs that have no row, in the order in which they were written."""
        found = [(status.st_mtime_ns, key, status.st_size) for key in keys if (status := self._files.status(key))]
        for written, key, nbytes in sorted(found):
            entry = None
            with self._failures.caught("take in"):
                blob = self._files.read(key, nbytes)
                if blob is None:
                    continue
                with suppress(ValueError):
                    entry = self._read_entry(blob)
                if entry is None or entry.key != key:
                    self._files.remove(key)
                    continue
            if entry is not None:
                index.add(db, entry, nbytes, min(written, time.time_ns()))


def _is_writable(folder: Path) -> bool:
    """Make the folder if it is missing; tells whether it can be written to.

    Raises:
        ValueError: if it cannot be made, can neither be written to nor be read, or is open to others.
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
    """Refuse a folder that others than this user, and root, may put blobs into; a group is only warned of.

    Raises:
        ValueError: if they may.
    """
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


def _batches(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    left = iter(dict.fromkeys(keys))
    while some := list(islice(left, _AT_ONCE)):
        yield some
