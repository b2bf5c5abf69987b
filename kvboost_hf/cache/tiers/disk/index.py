"""The index of the disk tier: a connection that notices damage, loss and forks.

The index can always be made anew from the blobs, so that a damaged one is moved aside. Whoever works on it holds a
shared lock of the folder meanwhile; whoever puts another one in its place holds it alone. Other processes notice that
the file is another one, and connect again.
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvboost_hf import forks
from kvboost_hf.cache.tiers.disk.rows import SCHEMA, VERSION, damage

_log = logging.getLogger(__name__)
_BUSY_S = 5.0  # how long to wait for another process's transaction


class DiskIndex:
    """An SQLite database in a folder.

    Args:
        folder: Where to; it exists.
        refill: Called with the connection, in a transaction, when the index is new: adds what is there.
        read_only: Never write.
    """

    def __init__(self, folder: Path, refill: Callable[[sqlite3.Connection], None], *, read_only: bool) -> None:
        self.read_only = read_only
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
        with self._lock, self._folder_locked():
            try:
                yield self._db or self._connect()
            except sqlite3.DatabaseError as error:
                if _is_damage(error) and not self.read_only:
                    self._replace(error)
                raise

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

    @contextmanager
    def _folder_locked(self) -> Iterator[None]:
        if self.is_closed:
            raise sqlite3.ProgrammingError("It is closed.")
        self._lock_folder()
        if self._db is not None and self._file != _identity(self._path):
            self._disconnect()  # from the folder, too: it may be another one
            self._lock_folder()
        try:
            yield
        finally:
            if self._db is None or self._folder_lock is None:
                self._disconnect()
            else:
                fcntl.flock(self._folder_lock, fcntl.LOCK_UN)

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
    """Refuse tables, views and triggers of others: they would run in our queries.

    Raises:
        sqlite3.DatabaseError: if there are any.
    """
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
