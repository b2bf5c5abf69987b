"""The rows of the disk tier's index, and what is asked of them.

A row is there before its file is: while `token` is set, somebody is writing the file, and the row holds the room for
it. All functions work in the transaction of whoever calls them.

SQLite takes values of any type in any column, and whoever can write to the folder can have written them. So each value
is looked at, and keys and tokens above all: names of files are made of them. What we would not have written counts as
damage to the index, which is then made anew from the blobs.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvboost_hf.cache.planning.chunks import KEY_BYTES
from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.disk.files import is_file_name, signature

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
_SAME_USE_NS = 600 * 10**9


def charge(entry: Entry, nbytes: int) -> int:
    """Bytes that a blob takes of the budget: its own, and those of its row."""
    return nbytes + entry.tokens.nbytes + _ROW_BYTES


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

    Raises:
        sqlite3.DatabaseError: if a row cannot be an entry.
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
    """The rows that a query finds, each value of which must be one that its column may have.

    Raises:
        sqlite3.DatabaseError: if one is not.
    """
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
