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
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shutil import disk_usage
from threading import Thread, current_thread
from typing import Any
from uuid import uuid4
from weakref import ref

from kvboost_hf import forks
from kvboost_hf.cache.planning.chunks import KEY_BYTES
from kvboost_hf.cache.tiers import disk_index as index
from kvboost_hf.cache.tiers.base import Entry, Failures, Heard, is_no_space
from kvboost_hf.cache.tiers.disk_files import BlobFiles, NoticeFile, in_flight, is_dead, is_writable
from kvboost_hf.cache.tiers.disk_files import holds_blobs as holds_blobs
from kvboost_hf.cache.tiers.disk_index import DiskIndex
from kvboost_hf.cache.tiers.record import read_entry

_log = logging.getLogger(__name__)
_AT_ONCE = 500  # keys in one query, rows in one page, files removed in one transaction
_MAX_ALIKE = 256
_FULL_S = 60.0  # for which nothing is given up where others have taken the room of what was
_ROOM_BYTES = 2**18  # for SQLite's log, where the disk is full
_MANY = 4096  # files, beyond which an open tier settles in a thread
_LOG_SHARE = 16  # a small tier is on a small file system, which the usual 4 MB of SQLite's log would fill
_BLOBS, _NOTICES = "blobs", "notices"


class DiskTier:
    """A `Tier` in a folder.

    The budget holds at every instant, whoever writes: room is made and reserved before a file is written. Processes
    with different budgets each make room for their own. Where the disk is full before, room is made for each blob. A
    folder that cannot be written to is read.

    Args:
        path: A folder; it is made if it is missing.
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
        name: str = "disk",
    ) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
            raise ValueError(f"`max_bytes` must be a positive int, got {max_bytes!r}.")
        if not str(path):
            raise ValueError("`path` must name a folder, got an empty text. Pass '.' for the current folder.")
        folder = Path(path).expanduser().absolute()
        self.name, self.location, self.max_bytes = name, str(folder), max_bytes
        read_only = not is_writable(folder)
        self._evictions = 0
        self._sizes: dict[bytes, int] = {}  # of the blobs that were looked up last: they are read next
        self._failures = Failures(_log, f"Disk tier {folder}", (OSError, sqlite3.Error))
        self._files = BlobFiles(folder / _BLOBS)
        self._notices = NoticeFile(folder / _NOTICES)
        self._full_since = float("-inf")  # when giving others up made no room
        self._settling: Thread | None = None
        self._starting = forks.lock()  # that thread
        self._unknown_bytes: int | None = None  # of blobs that a partial index lacks; None until they are counted
        log_bytes = max_bytes // _LOG_SHARE
        self._index = DiskIndex(folder, self._refill, read_only=read_only, max_log_bytes=log_bytes)
        with self._failures.caught("open"):
            if read_only:
                _log.warning("Disk tier %s cannot be written to: it is only read.", folder)
            elif self._are_many:
                with self._index.transaction() as db:
                    self._make_room(db, 0)
                self._settle_later()
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
                is_partial = len(found) < len(keys) and index.is_partial(db)
            if is_partial and not self._index.read_only:
                found |= self._take_in([key for key in keys if key not in found])
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
        """All that is kept, as far as it is known, or all that is kept under roots that begin so."""
        if root is not None:
            self._wait_until_whole()
        values: tuple[bytes, ...] = ()
        where, values = ("", ()) if root is None else ("root = ? AND ", (root,))
        if root is not None and len(root) < KEY_BYTES:
            where, values = "root BETWEEN ? AND ? AND ", (root, root.ljust(KEY_BYTES, b"\xff"))
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
        chunks = used = free = 0
        with self._failures.caught("count"), self._index.connected() as db:
            chunks, used, free = index.count(db), index.charged(db), disk_usage(self.location).free
        return {
            "chunks": chunks,
            "bytes": used,
            "max_bytes": self.max_bytes,
            "free_bytes": free,
            "evictions": self._evictions,
            "errors": self._failures.count,
            "location": os.fsencode(self.location).decode(errors="replace"),  # it is to be JSON
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
        try:
            with self._failures.caught("write"):
                kept = self._write_making_room(entry, blob, token)
        finally:
            in_flight.discard(token)
        return kept

    def _write_making_room(self, entry: Entry, blob: Sequence[bytes | memoryview], token: str) -> bool:
        """Write a blob; where the disk is full, give others up for it and write it once more."""
        try:
            return self._write_or_undo(entry, blob, token)
        except self._failures.kinds as error:
            since, now = self._full_since, time.monotonic()
            if not is_no_space(error) or now - since < _FULL_S or not self._give_up_for(entry):
                raise
        self._full_since = now
        self._undo(entry.key, token)  # for which there was no room either
        kept = self._write_or_undo(entry, blob, token)
        self._full_since = since
        return kept

    def _write_or_undo(self, entry: Entry, blob: Sequence[bytes | memoryview], token: str) -> bool:
        try:
            return self._write(entry, blob, token)
        except BaseException:
            self._undo(entry.key, token)
            raise

    def _give_up_for(self, entry: Entry) -> bool:
        """Give up what takes as much as a blob and its row, on a disk that is full before the budget is reached.

        Tells whether anything was.
        """
        short = index.charge(entry, entry.nbytes) + _ROOM_BYTES
        victims = []
        with self._index.transaction() as db:
            for key, charge in () if index.is_partial(db) else index.to_give_up(db):
                if short <= 0 or key == entry.parent:
                    break
                victims.append(key)
                short -= charge if self._files.status(key) is not None else 0
            for key in victims:
                self._remove(db, key, None)
        self._evictions += len(victims)
        with self._index.connected() as db:
            index.empty_log(db)
        return bool(victims)

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
        if index.is_partial(db):  # nothing is given up for what nobody has counted yet
            return self._unknown_bytes is not None and short + self._unknown_bytes <= 0
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
                known = dict(index.tokens(db, f"key IN ({', '.join('?' * len(some))})", some))
                for key in some if index.is_partial(db) else known:
                    self._remove(db, key, known.get(key))
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

    def clear(self, model: bytes) -> bool:
        done = False
        if not self._index.read_only:
            self._wait_until_whole()
            with self._failures.caught("clear"):
                while self._clear_some(model):
                    pass
                done = True
        return done

    def _clear_some(self, model: bytes) -> bool:
        with self._index.transaction() as db:
            found = index.tokens(db, "model = ? LIMIT ?", (model, _AT_ONCE))
            for key, token in found:
                self._remove(db, key, token)
        return bool(found)

    def close(self) -> None:
        self._index.close()
        if self._settling is not None and self._settling is not current_thread():
            self._settling.join()

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

    def _refill(self, db: sqlite3.Connection) -> None:
        """Take all blobs into a new index: at once, or, where there are many, soon; whoever is writing one fails."""
        if self._are_many:
            self._unknown_bytes = None
            index.note_partial(db, partial=True)
            self._settle_later()
            return
        for key, token in self._files.names():
            if token is not None:
                self._files.remove_unfinished(key, token)
        for some in _batches(self._in_order(key for key, token in self._files.names() if token is None)):
            self._add(db, self._read_entries(some))
        self._make_room(db, 0)

    @property
    def _are_many(self) -> bool:
        """Whether there are so many files that nobody is to wait until all were looked at."""
        return next(islice(self._files.names(), _MANY, None), None) is not None

    def _settle_later(self) -> None:
        """Have a thread put right what does not agree. Until then a blob without a row is found by its name."""
        with self._starting:
            if self._settling is None or not self._settling.is_alive():
                thread = Thread(target=_settle, args=(ref(self),), name="kvboost_hf-disk", daemon=True)
                thread.start()
                self._settling = thread  # not before: whoever waits for it cannot join one that has not begun

    def _settle(self) -> None:
        """Put right what does not agree, after others were killed; locks only if there is something, and not for long.

        Blobs are taken in in the order in which they were written, some in each transaction: whoever is killed
        meanwhile, or opens the folder, goes on from there.
        """
        lost, unfinished, unknown = list[bytes](), list[tuple[bytes, str]](), list[bytes]()
        is_writing = False
        for first in range(256):
            files = set(self._files.names(first))
            with self._index.connected() as db:
                known = set(index.tokens(db, "key >= ? AND key < ?", (bytes([first]), bytes([first]) + b"\xff" * 20)))
            lost += [key for key, token in known - files if token is None]
            unfinished += [(key, token) for key, token in files - known if token is not None]
            unknown += [key for key, token in files - known if token is None]
            is_writing |= any(token is not None for _, token in known)
        with self._index.connected() as db:
            too_much, is_partial = index.charged(db) > self.max_bytes, index.is_partial(db)
        if not (lost or unfinished or unknown or is_writing or too_much or is_partial):
            return
        ordered = self._in_order(unknown)
        most = {key: nbytes + index.most_of_row(nbytes) for key, nbytes in ordered.items()}
        self._unknown_bytes = sum(most.values())
        with self._index.transaction() as db:
            self._settle_dead(db)
            for key in lost:
                if self._files.status(key) is None and index.size(db, key) is not None:
                    index.remove(db, key)
            for key, token in unfinished:
                if (key, token) not in index.tokens(db, "key = ?", (key,)):
                    self._files.remove_unfinished(key, token)
        for some in _batches(ordered):
            entries = self._read_entries(some)
            with self._index.transaction() as db:
                self._add(db, entries)
            self._unknown_bytes -= sum(most[key] for key in some)
        self._unknown_bytes = None
        with self._index.transaction() as db:
            index.note_partial(db, partial=False)
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

    def _in_order(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Bytes of the blobs that are there, those first that were written first."""
        found = [(status.st_mtime_ns, key, status.st_size) for key in keys if (status := self._files.status(key))]
        return {key: nbytes for _, key, nbytes in sorted(found)}

    def _read_entries(self, keys: Iterable[bytes]) -> list[tuple[int, Entry, int]]:
        """When it was written, what it is found by, and bytes, of each blob; what is no blob is removed."""
        found = []
        for key in keys:
            with self._failures.caught("take in"):
                status = self._files.status(key)
                blob = self._files.read(key, status.st_size) if status is not None else None
                if status is None or blob is None:
                    continue
                entry = None
                with suppress(ValueError):
                    entry = read_entry(blob)
                if entry is None or entry.key != key:
                    self._files.remove(key)
                else:
                    found.append((status.st_mtime_ns, entry, status.st_size))
        return found

    def _add(self, db: sqlite3.Connection, entries: Iterable[tuple[int, Entry, int]]) -> None:
        """Add rows of blobs that have none."""
        for written, entry, nbytes in entries:
            if not index.tokens(db, "key = ?", (entry.key,)) and self._files.status(entry.key) is not None:
                index.add(db, entry, nbytes, min(written, time.time_ns()))

    def _take_in(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """Take in those blobs now, by their names, that a partial index does not have yet."""
        self._settle_later()
        entries = self._read_entries(keys)
        with self._index.transaction() as db:
            self._add(db, entries)
        return {entry.key: replace(entry, nbytes=nbytes) for _, entry, nbytes in entries}

    def _wait_until_whole(self) -> None:
        """Wait until the index has all blobs: what is listed to be deleted must not leave any out."""
        with self._failures.caught("settle"):
            with self._index.connected() as db:
                is_partial = index.is_partial(db)
            if is_partial and not self._index.read_only:
                self._settle_later()
                if self._settling is not None and self._settling is not current_thread():
                    self._settling.join()


def _settle(tier: "ref[DiskTier]") -> None:
    """What the thread does."""
    held = tier()
    if held is None:
        return
    try:
        held._settle()
    except held._failures.kinds as error:
        if not held._index.is_closed:  # else the next one that opens the folder goes on
            held._failures.note("settle", error)


def _batches(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    left = iter(dict.fromkeys(keys))
    while some := list(islice(left, _AT_ONCE)):
        yield some
