"""The rows of the disk tier's index, and what is asked of them.

A row is there before its file is: while `token` is set, somebody is writing the file, and the row holds the room for
it. All functions work in the transaction of whoever calls them.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.disk_writers import signature

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
_ROW_BYTES = 512  # of a row and its places in the indexes, tokens not counted
_SAME_USE_NS = 600 * 10**9


def charge(entry: Entry, nbytes: int) -> int:
    """What a blob takes of the budget: its bytes, and those of its row."""
    return nbytes + entry.tokens.nbytes + _ROW_BYTES


def charged(db: sqlite3.Connection) -> int:
    """What all blobs take of the budget, those included that are being written."""
    return int(db.execute("SELECT total FROM charged").fetchone()[0])


def add(db: sqlite3.Connection, entry: Entry, nbytes: int, used: int, token: str | None = None) -> None:
    """Add a row; with a `token`, of a file that this process is writing.

    What is written soon after the chunk that it continues was used counts as used with it, and not later: so the end
    of a long prompt is given up before its beginning.
    """
    found = db.execute("SELECT last_used FROM blobs WHERE key = ?", (entry.parent,)).fetchone()
    if found is not None and used - _SAME_USE_NS <= found[0] <= used:
        used = found[0]
    tokens = np.ascontiguousarray(entry.tokens, np.int64).tobytes()
    told = (
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
        (*told, charge(entry, nbytes), used, *writer),
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
    latest = db.execute("SELECT last_used FROM blobs WHERE token IS NULL ORDER BY last_used DESC LIMIT 1").fetchone()
    return max(time.time_ns(), latest[0] + 1 if latest is not None else 0)


def to_give_up(db: sqlite3.Connection) -> Iterator[tuple[bytes, int]]:
    """Keys and charges, the first to go first: not used for longest, then the later part of a text."""
    query = "SELECT key, charge FROM blobs WHERE token IS NULL ORDER BY last_used, start DESC, number DESC"
    yield from db.execute(query)


def being_written(
    db: sqlite3.Connection, key: bytes | None = None
) -> list[tuple[bytes, int, tuple[str, str, int, int]]]:
    """Key, bytes, and whose it is, of all that is being written, or of one key."""
    query = "SELECT key, nbytes, token, host, pid, since FROM blobs WHERE token IS NOT NULL"
    found = db.execute(query) if key is None else db.execute(f"{query} AND key = ?", (key,))
    return [(key, nbytes, writer) for key, nbytes, *writer in found]


def mark_ready(db: sqlite3.Connection, key: bytes, token: str) -> bool:
    """The file is there; tells whether the row was."""
    unset = "UPDATE blobs SET token = NULL, host = NULL, pid = NULL, since = NULL WHERE key = ? AND token = ?"
    return db.execute(unset, (key, token)).rowcount == 1


def size(db: sqlite3.Connection, key: bytes) -> int | None:
    """Bytes of a blob that is there."""
    found = db.execute("SELECT nbytes FROM blobs WHERE key = ? AND token IS NULL", (key,)).fetchone()
    return found[0] if found is not None else None


def count(db: sqlite3.Connection) -> int:
    """How many blobs are there."""
    return int(db.execute("SELECT count(*) FROM blobs WHERE token IS NULL").fetchone()[0])


def uses(db: sqlite3.Connection) -> dict[bytes, int]:
    """How often each blob was used, if it was."""
    return dict(db.execute("SELECT key, uses FROM blobs WHERE token IS NULL AND uses > 0"))


def tokens(db: sqlite3.Connection, where: str, values: Sequence[object]) -> list[tuple[bytes, str | None]]:
    """Keys, and the token of what is being written, of all rows."""
    return db.execute(f"SELECT key, token FROM blobs WHERE {where}", values).fetchall()


def entries(db: sqlite3.Connection, where: str, values: Sequence[object]) -> list[tuple[int, Entry]]:
    """Numbers and entries of the blobs that are there; `where` may end in an order and a limit."""
    query = f"SELECT number, {_COLUMNS} FROM blobs WHERE token IS NULL AND {where}"
    return [(number, _entry(row)) for number, *row in db.execute(query, values)]


def _entry(row: Iterable[object]) -> Entry:
    """The entry of a row.

    Raises:
        sqlite3.DatabaseError: if it cannot be one.
    """
    key, kind, model, root, parent, head, start, tokens, nbytes = row
    try:
        numbers = np.frombuffer(tokens, np.int64)  # type: ignore[call-overload]
        return Entry(key, Kind(kind), model, root, parent, head, start, numbers, nbytes)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise damage(f"A row of the index cannot be read: {error}") from error


def damage(message: str) -> sqlite3.DatabaseError:
    """An error as SQLite raises it for a damaged file."""
    error = sqlite3.DatabaseError(message)
    error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_CORRUPT, "SQLITE_CORRUPT"
    return error
