"""The index of the disk tier: a connection that notices damage, loss and forks.

The index can always be made anew from the blobs, so that a damaged one is moved aside. Whoever works on it holds a
shared lock of the folder meanwhile; whoever puts another one in its place holds it alone. Other processes notice that
the file is another one, and connect again.

A row is there before its file is: while `token` is set, somebody is writing the file, and the row holds the room for
it. Functions of rows work in the transaction of whoever calls them. SQLite takes values of any type in any column, and
whoever can write to the folder can have written them: each value is looked at, for names of files are made of keys and
tokens. What we would not have written counts as damage, after which the index is made anew from the blobs.
"""

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvboost_hf import forks
from kvboost_hf.cache.planning.chunks import KEY_BYTES
from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.disk_files import is_file_name, signature

_log = logging.getLogger(__name__)
_BUSY_S = 5.0  # how long to wait for another process's transaction

VERSION = 0x4B560001  # unlike that of any other database
SCHEMA = (
    """CREATE TABLE blobs (
        number INTEGER PRIMARY KEY,  -- newest last
        key BLOB NOT NULL UNIQUE,
        kind TEXT NOT NULL,
        model BLOB NOT NULL,
        root BLOB NOT NULL,
        parent BLOB NOT NULL,
        head BLOB NOT NULL,
        start INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        nbytes INTEGER NOT NULL,
        charge INTEGER NOT NULL,  -- what it takes of the budget
        uses INTEGER NOT NULL DEFAULT 0,
        last_used INTEGER NOT NULL,  -- in nanoseconds
        token TEXT,  -- of the file that is being written, if it is
        host TEXT,  -- who writes it, and since when
        pid INTEGER,
        since INTEGER
    )""",
    "CREATE INDEX blobs_to_give_up ON blobs (last_used, start DESC, number DESC) WHERE token IS NULL",
    "CREATE INDEX blobs_being_written ON blobs (key) WHERE token IS NOT NULL",
    "CREATE INDEX blobs_by_head ON blobs (head)",
    "CREATE INDEX blobs_by_root ON blobs (root)",
    "CREATE INDEX blobs_by_model ON blobs (model)",
    "CREATE TABLE charged (total INTEGER NOT NULL)",
    "INSERT INTO charged VALUES (0)",
    """CREATE TRIGGER blobs_added AFTER INSERT ON blobs
        BEGIN UPDATE charged SET total = total + new.charge; END""",
    """CREATE TRIGGER blobs_removed AFTER DELETE ON blobs
        BEGIN UPDATE charged SET total = total - old.charge; END""",
)
_COLUMNS = "key, kind, model, root, parent, head, start, tokens, nbytes"
_ENTRY_TYPES = (int, bytes, str, bytes, bytes, bytes, bytes, int, bytes, int)
_MAX_COUNT = 2**62  # SQLite takes twice as much, and uses are counted on from it
_ROW_BYTES = 512  # of a row and its places in the indexes, tokens not counted
_MOST_TOKEN_BYTES = 2**16  # of a chunk
_SAME_USE_NS = 600 * 10**9
_PAGE_BYTES, _LEAST_LOG_PAGES, _MOST_LOG_PAGES = 4096, 16, 1000  # SQLite's own, and that of its log
_PARTIAL = 0x4B56  # a mark of an index that does not have all blobs yet


class DiskIndex:
    """An SQLite database in a folder that exists.

    `refill` is called with the connection, in a transaction, when the index is new: adds what is there, or notes that
    it is partial. SQLite's log beside it takes `max_log_bytes` at most, and some pages of the last transaction.
    """

    def __init__(
        self, folder: Path, refill: Callable[[sqlite3.Connection], None], *, read_only: bool, max_log_bytes: int
    ) -> None:
        self.read_only = read_only
        self._log_pages = min(max(_LEAST_LOG_PAGES, max_log_bytes // _PAGE_BYTES), _MOST_LOG_PAGES)
        self._folder, self._path, self._refill = folder, folder / "index.sqlite3", refill
        self.is_closed = False
        # SQLite keeps book of its locks by process, so that a process that was forked beside an open connection could
        # never lock that file again. It is closed before, between two transactions, and opened when it is needed.
        self._lock = forks.rlock(before=self._disconnect)
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # what `_db` is connected to
        self._folder_lock: int | None = None

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """The connection, to read in."""
        with self._lock:
            if self.is_closed:
                raise sqlite3.ProgrammingError("It is closed.")
            self._lock_folder()
            if self._db is not None and self._file != _identity(self._path):
                self._disconnect()  # from the folder, too: it may be another one
                self._lock_folder()
            try:
                yield self._db or self._connect()
            except sqlite3.DatabaseError as error:
                if _is_damage(error) and not self.read_only:
                    self._replace(error)
                raise
            finally:
                if self._db is None or self._folder_lock is None:
                    self._disconnect()
                else:
                    fcntl.flock(self._folder_lock, fcntl.LOCK_UN)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, to write in: all or nothing of what is done inside."""
        with self.connected() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                self._roll_back(db)
                raise

    def close(self) -> None:
        """Disconnect for good."""
        with self._lock:
            self.is_closed = True
            self._disconnect()

    def __del__(self) -> None:
        self._disconnect()

    def _lock_folder(self) -> None:
        if self._folder_lock is None:
            self._folder_lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._folder_lock, fcntl.LOCK_SH)

    def _connect(self) -> sqlite3.Connection:
        self._remove_links()
        if self.read_only:
            return self._open_read_only()
        if _identity(self._path) is None:
            self._replace(None)
        try:
            try:
                return self._open()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._replace(error)
                return self._open()
        except BaseException:
            self._disconnect_index()  # nobody has looked at all of it
            raise

    def _remove_links(self) -> None:
        """Nothing of the index is a link, and SQLite would write to whatever one leads to."""
        for suffix in ("", "-wal", "-shm", "-journal"):
            path = Path(f"{self._path}{suffix}")
            if path.is_symlink():
                if self.read_only:
                    raise sqlite3.OperationalError(f"{path} is a link.")
                _log.warning("%s is a link, which is removed.", path)
                path.unlink(missing_ok=True)

    def _open(self) -> sqlite3.Connection:
        self._db = db = sqlite3.connect(
            f"{self._path.as_uri()}?mode=rw", uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._file = _identity(self._path)
        db.text_factory = _as_text
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA wal_autocheckpoint={self._log_pages}")
        db.execute("PRAGMA synchronous=NORMAL")  # a power failure may undo the last transactions, and harms nothing
        if _version(db) != VERSION:
            self._fill(db)
        _require_schema(db)
        return db

    def _fill(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        try:
            if _version(db) != VERSION:  # nobody else has filled it meanwhile
                if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise damage(f"It has version {_version(db)}, not {VERSION}.")
                for statement in SCHEMA:
                    db.execute(statement)
                self._refill(db)
                db.execute(f"PRAGMA user_version={VERSION}")
            db.execute("COMMIT")
        except BaseException:
            self._roll_back(db)
            raise

    def _open_read_only(self) -> sqlite3.Connection:
        """SQLite can read beside a writer only if it may make files; where it may not, there is no writer either."""
        for option in ("mode=ro", "immutable=1"):
            uri = f"{self._path.as_uri()}?{option}"
            db = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            db.text_factory = _as_text
            try:
                if (version := _version(db)) != VERSION:
                    raise sqlite3.DatabaseError(
                        f"The index has version {version}, not {VERSION}, and cannot be remade."
                    )
                _require_schema(db)
            except BaseException as error:
                db.close()
                if isinstance(error, sqlite3.OperationalError):
                    continue
                raise
            self._db, self._file = db, _identity(self._path)
            return db
        raise sqlite3.OperationalError("The index cannot be opened.")

    def _replace(self, reason: Exception | None) -> None:
        """Put an empty index in the place of the one that is connected, or of none, unless somebody else just did."""
        assert self._folder_lock is not None
        fcntl.flock(self._folder_lock, fcntl.LOCK_EX)
        try:
            if _identity(self._path) == self._file:  # None, where none is there and none is connected
                if reason is not None:
                    aside = self._path.with_suffix(".damaged")
                    _log.warning("%s is made anew from the blobs; moved to %s: %s", self._path, aside.name, reason)
                    os.replace(self._path, aside)
                for suffix in ("-wal", "-shm"):
                    Path(f"{self._path}{suffix}").unlink(missing_ok=True)
                # Only where there was none: to close a file of SQLite's would drop the locks of this process.
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                os.fchmod(file, 0o600)
                os.close(file)
        finally:
            self._disconnect_index()
            fcntl.flock(self._folder_lock, fcntl.LOCK_SH)

    def _roll_back(self, db: sqlite3.Connection) -> None:
        try:
            if db.in_transaction:
                db.execute("ROLLBACK")
        except sqlite3.Error:
            self._disconnect_index()

    def _disconnect_index(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
        self._db = self._file = None

    def _disconnect(self) -> None:
        self._disconnect_index()
        if self._folder_lock is not None:
            os.close(self._folder_lock)
        self._folder_lock = None


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _as_text(raw: bytes) -> str:
    """Text that is none is not what anybody here has written, and will be found to be that."""
    return raw.decode(errors="replace")


def _require_schema(db: sqlite3.Connection) -> None:
    """Refuse tables, views and triggers of others by a DatabaseError: they would run in our queries."""
    query = "SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite~_%' ESCAPE '~'"
    if {sql for (sql,) in db.execute(query)} != {sql for sql in SCHEMA if sql.startswith("CREATE")}:
        raise damage("Its tables are not ours.")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_partial(db: sqlite3.Connection) -> bool:
    """Whether blobs may be there without a row, since the index was lost and is being made anew."""
    return bool(db.execute("PRAGMA application_id").fetchone()[0] == _PARTIAL)


def note_partial(db: sqlite3.Connection, *, partial: bool) -> None:
    """Note that blobs may be there without a row, or that none are any more; other releases look at all files."""
    db.execute(f"PRAGMA application_id={_PARTIAL if partial else 0}")


def empty_log(db: sqlite3.Connection) -> None:
    """Have SQLite's log take no room, if nobody else needs it now."""
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def charge(entry: Entry, nbytes: int) -> int:
    """Bytes that a blob takes of the budget: its own, and those of its row."""
    return nbytes + entry.tokens.nbytes + _ROW_BYTES


def most_of_row(nbytes: int) -> int:
    """Bytes of the budget that the row of a blob of so many bytes takes at most: the tokens are in the blob, too."""
    return _ROW_BYTES + min(nbytes, _MOST_TOKEN_BYTES)


def charged(db: sqlite3.Connection) -> int:
    """Bytes that all blobs take of the budget, those included that are being written."""
    totals = list(_rows(db, "SELECT total FROM charged", (), _is_count))
    if len(totals) != 1:
        raise damage("It does not tell what is charged.")
    total: int = totals[0][0]  # one row, of one number
    return total


def add(db: sqlite3.Connection, entry: Entry, nbytes: int, used: int, token: str | None = None) -> None:
    """Add a row; with a `token`, of a file that this process is writing.

    What is written soon after the chunk that it continues was used counts as used with it, and not later: so the end
    of a long prompt is given up before its beginning.
    """
    for (parent_used,) in _rows(db, "SELECT last_used FROM blobs WHERE key = ?", (entry.parent,), _is_count):
        if used - _SAME_USE_NS <= parent_used <= used:
            used = parent_used
    tokens = np.ascontiguousarray(entry.tokens, np.int64).tobytes()
    columns = (
        entry.key,
        entry.kind.value,
        entry.model,
        entry.root,
        entry.parent,
        entry.head,
        entry.start,
        tokens,
        nbytes,
    )
    writer = (token, *signature()) if token is not None else (None, None, None, None)
    db.execute(
        f"INSERT INTO blobs ({_COLUMNS}, charge, last_used, token, host, pid, since) VALUES ({'?, ' * 14}?)",
        (*columns, charge(entry, nbytes), used, *writer),
    )


def touch(db: sqlite3.Connection, keys: Iterable[bytes]) -> None:
    """Note one use of each, all at the same time."""
    used = now(db)
    update = "UPDATE blobs SET uses = uses + 1, last_used = ? WHERE key = ?"
    db.executemany(update, [(used, key) for key in dict.fromkeys(keys)])


def remove(db: sqlite3.Connection, key: bytes) -> None:
    """Remove a row."""
    db.execute("DELETE FROM blobs WHERE key = ?", (key,))


def now(db: sqlite3.Connection) -> int:
    """A time later than that of any use; nanoseconds."""
    query = "SELECT last_used FROM blobs WHERE token IS NULL ORDER BY last_used DESC LIMIT 1"
    latest: list[int] = [used for (used,) in _rows(db, query, (), _is_count)]
    return max(time.time_ns(), *(used + 1 for used in latest), 0)


def to_give_up(db: sqlite3.Connection) -> Iterator[tuple[bytes, int]]:
    """Keys and charges, the first to go first: not used for longest, then the later part of a text."""
    query = "SELECT key, charge FROM blobs WHERE token IS NULL ORDER BY last_used, start DESC, number DESC"
    yield from _rows(db, query, (), _is_key, _is_count)


def being_written(
    db: sqlite3.Connection, key: bytes | None = None
) -> list[tuple[bytes, int, tuple[str, str, int, int]]]:
    """Key, bytes, and whose it is, of all that is being written, or of one key."""
    query = "SELECT key, nbytes, token, host, pid, since FROM blobs WHERE token IS NOT NULL"
    where, values = (query, ()) if key is None else (f"{query} AND key = ?", (key,))
    found = _rows(db, where, values, _is_key, _is_count, _is_token, _is_text, _is_process, _is_count)
    return [(key, nbytes, (token, host, pid, since)) for key, nbytes, token, host, pid, since in found]


def mark_ready(db: sqlite3.Connection, key: bytes, token: str) -> bool:
    """The file is there; tells whether the row was."""
    unset = "UPDATE blobs SET token = NULL, host = NULL, pid = NULL, since = NULL WHERE key = ? AND token = ?"
    return db.execute(unset, (key, token)).rowcount == 1


def size(db: sqlite3.Connection, key: bytes) -> int | None:
    """Bytes of a blob that is there."""
    for (nbytes,) in _rows(db, "SELECT nbytes FROM blobs WHERE key = ? AND token IS NULL", (key,), _is_count):
        return int(nbytes)
    return None


def count(db: sqlite3.Connection) -> int:
    """Number of blobs."""
    return int(db.execute("SELECT count(*) FROM blobs WHERE token IS NULL").fetchone()[0])


def uses(db: sqlite3.Connection) -> dict[bytes, int]:
    """Number of uses of each blob that was used."""
    return dict(_rows(db, "SELECT key, uses FROM blobs WHERE token IS NULL AND uses > 0", (), _is_key, _is_count))


def tokens(db: sqlite3.Connection, where: str, values: Sequence[object]) -> list[tuple[bytes, str | None]]:
    """Keys, and the token of what is being written, of all rows."""
    return list(_rows(db, f"SELECT key, token FROM blobs WHERE {where}", values, _is_key, _is_token))


def entries(db: sqlite3.Connection, where: str, values: Sequence[object]) -> list[tuple[int, Entry]]:
    """Numbers and entries of the blobs that are there; `where` may end in an order and a limit.

    sqlite3.DatabaseError: a row cannot be an entry.
    """
    found: list[tuple[int, Entry]] = []
    query = f"SELECT number, {_COLUMNS} FROM blobs WHERE token IS NULL AND {where}"
    for row in db.execute(query, values):
        number, key, kind, model, root, parent, head, start, tokens, nbytes = row
        if tuple(map(type, row)) != _ENTRY_TYPES or len(key) != KEY_BYTES or min(number, start, nbytes) < 0:
            raise damage("A row of the index has a value that nobody here has written.")
        if max(number, start, nbytes) >= _MAX_COUNT:
            raise damage("A row of the index has a value that nobody here has written.")
        try:
            numbers = np.frombuffer(tokens, np.int64)
            found.append((number, Entry(key, Kind(kind), model, root, parent, head, start, numbers, nbytes)))
        except ValueError as error:
            raise damage("A row of the index cannot be read.") from error
    return found


def _rows(
    db: sqlite3.Connection, query: str, values: Sequence[object], *columns: Callable[[Any], bool]
) -> Iterator[tuple[Any, ...]]:
    """The rows that a query finds; a value that its column may not have is a `sqlite3.DatabaseError`."""
    for row in db.execute(query, values):
        if not all(may_be(value) for may_be, value in zip(columns, row, strict=True)):
            raise damage("A row of the index has a value that nobody here has written.")
        yield row


def _is_key(value: object) -> bool:
    return is_file_name(value, None)


def _is_token(value: object) -> bool:
    return is_file_name(bytes(KEY_BYTES), value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_process(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_text(value: object) -> bool:
    return type(value) is str


def damage(message: str) -> sqlite3.DatabaseError:
    """An error as SQLite raises it for a damaged file."""
    error = sqlite3.DatabaseError(message)
    error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_CORRUPT, "SQLITE_CORRUPT"
    return error
