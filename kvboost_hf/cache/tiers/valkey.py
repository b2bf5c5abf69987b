"""A tier on a Valkey or Redis server, which several machines may share.

A chunk is one hash: its entry, and its blob in pieces. So it comes and goes whole, whoever gives it up: this tier, the
server's own `maxmemory-policy`, or a time to live. Sorted sets and sets say what is kept; what they name may be gone,
and is dropped from them when it is met. A server may give up a set, too: a chunk that the set of its root does not
name could not be deleted with its root, and is not found any more.

    <prefix>:chunk:<key>    hash: "entry", and "0", "1", … in the order of the blob
    <prefix>:head:<head>    sorted set: keys by the time they were written
    <prefix>:root:<root>    set: keys
    <prefix>:used           sorted set: keys, each with the bytes of its blob, by their last use
    <prefix>:hits           sorted set: keys by the number of their uses
    <prefix>:bytes          the sum of the bytes in `used`
    <prefix>:notices        stream: notices, the newest 8,192 and some more
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvboost_hf.cache.planning.chunks import KEY_BYTES
from kvboost_hf.cache.tiers.base import MAX_ALIKE, Entry, Heard, RemoteTier, without_secrets
from kvboost_hf.cache.tiers.record import pack_entry, unpack_entry
from kvboost_hf.errors import how_to_install

_MAX_BLOB_BYTES = 512 * 2**20  # of one transaction the server takes no more than 1 GiB, unless it is told to
_PIECE_BYTES = 2**20  # what has to get through within one timeout
_MAX_NOTICES = 8192
_SCANNED = 1000  # keys that the server looks at in one request
_VICTIMS = 64  # that are looked at in one request
_SIZE_BYTES = 8
_SECONDS_PER_TOKEN = 1e-6  # by which a later chunk counts as used earlier, so that it goes first

Command = tuple[Any, ...]


class ValkeyTier(RemoteTier):
    """Blobs on a Valkey or Redis server. Not for clusters: a transaction has to stay on one server.

    Args:
        url: `redis://`, `rediss://`, `valkey://`, `valkeys://` or `unix://`, as the client knows them; options after a
            question mark go to the client.
        prefix: What all keys on the server begin with.
        ttl_s: Seconds after its last use at which the server gives a chunk up, or None.
        max_bytes: Budget for blobs, kept approximately: by last use, and by all clients that have one. With None the
            server's own `maxmemory-policy` rules.
        timeout_s: Seconds to connect in, to wait for any answer in, and to send each MiB in.
        cooldown_s: Seconds that a server is left alone for after a failure, twice as many after each further one, up
            to 30. While it is merely full, it is read from.

    Raises:
        ImportError: without the package `valkey`.
        ValueError: for a URL that the client does not know, or a number that is not positive. A server that does not
            answer is logged, for it may come back.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "kvboost_hf",
        ttl_s: float | None = None,
        max_bytes: int | None = None,
        timeout_s: float = 1.0,
        cooldown_s: float = 1.0,
    ) -> None:
        for name, seconds in (("timeout_s", timeout_s), ("ttl_s", 1 if ttl_s is None else ttl_s)):
            if not seconds > 0:
                raise ValueError(f"`{name}` must be more than 0 seconds, got {seconds!r}.")
        self._client = _client(url, timeout_s)
        super().__init__("valkey", url, max_bytes, cooldown_s, _refusal())
        self._prefix, self._ttl_ms = prefix, None if ttl_s is None else max(1, int(ttl_s * 1000))
        names = ("used", "hits", "bytes", "notices")
        self._used, self._hits, self._bytes, self._notices = (f"{prefix}:{name}" for name in names)
        self._guard.call(None, self._recount)

    def hits(self) -> Mapping[bytes, int]:
        return self._guard.call({}, self._all_hits)

    def close(self) -> None:
        self._client.close()

    def _find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        packed = self._ask(("HGET", self._name("chunk", key), "entry") for key in keys)
        found: dict[bytes, Entry] = {}
        for key, value in zip(keys, packed, strict=True):
            entry = _unpacked(value)
            if entry is not None and entry.key == key:
                found[key] = entry
            elif value is not None:  # not ours, or of another version: nothing else could ever be written there
                self._change([("UNLINK", self._name("chunk", key))])
        listed = self._ask(("SISMEMBER", self._name("root", entry.root), key) for key, entry in found.items())
        lost = [key for key, is_listed in zip(found, listed, strict=True) if not is_listed]
        self._change(("UNLINK", self._name("chunk", found.pop(key).key)) for key in lost)
        return found

    def _find_alike(self, heads: Sequence[bytes]) -> list[Entry]:
        names = [self._name("head", head) for head in heads]
        listed = self._ask(("ZREVRANGE", name, 0, MAX_ALIKE - 1) for name in names)
        found = self._find([key for keys in listed for key in keys])
        pairs = zip(names, listed, strict=True)
        self._change(("ZREM", name, key) for name, keys in pairs for key in keys if key not in found)
        return list(found.values())

    def _keys(self, root: bytes | None) -> list[bytes]:
        if root is None:
            members = self._ask([("ZRANGE", self._used, 0, -1)])[0]
            gone = self._gone([_key(member) for member in members])
            self._drop([member for member in members if _key(member) in gone])
            return [key for key in map(_key, members) if key not in gone]
        names = [self._name("root", root)] if len(root) == KEY_BYTES else self._roots(root)
        members = self._ask(("SMEMBERS", name) for name in names)
        gone = self._gone([key for keys in members for key in keys])
        listed = [(name, key) for name, keys in zip(names, members, strict=True) for key in keys]
        self._change(("SREM", name, key) for name, key in listed if key in gone)
        return [key for _, key in listed if key not in gone]

    def _roots(self, begin: bytes) -> list[str]:
        """The names of sets of roots that begin with some bytes."""
        found, cursor = set[str](), b"0"
        pattern = re.sub(r"([*?\[\]^\\-])", r"\\\1", self._name("root", begin))  # the prefix may be any
        while True:
            cursor, some = self._ask([("SCAN", cursor, "MATCH", f"{pattern}*", "COUNT", _SCANNED)])[0]
            found |= {each.decode() if isinstance(each, bytes) else each for each in some}
            if int(cursor) == 0:
                return sorted(found)

    def _gone(self, keys: Sequence[bytes]) -> set[bytes]:
        present = self._ask(("EXISTS", self._name("chunk", key)) for key in keys)
        return {key for key, is_present in zip(keys, present, strict=True) if not is_present}

    def _read(self, key: bytes) -> memoryview | None:
        fields = self._ask([("HGETALL", self._name("chunk", key))])[0]
        entry = _unpacked(fields.pop(b"entry", None))
        if entry is None:
            return None
        pieces = [fields.get(b"%d" % number, b"") for number in range(len(fields))]
        blob = b"".join(pieces)
        return memoryview(blob) if len(blob) == entry.nbytes else None

    def _write(self, entry: Entry, blob: Sequence[memoryview]) -> bool:
        if entry.nbytes > _MAX_BLOB_BYTES:
            return False
        name = self._name("chunk", entry.key)
        with self._client.pipeline() as pipe:
            pipe.watch(name)
            if pipe.hexists(name, "entry"):
                return True
            self._make_room(entry.nbytes)
            pipe.multi()
            for command in self._insertion(name, entry, blob) + self._expiries(entry):
                pipe.execute_command(*command)
            return self._writing.call(False, self._execute_unless_written, pipe, entry.nbytes)

    def _insertion(self, name: str, entry: Entry, blob: Sequence[memoryview]) -> list[Command]:
        pieces = (part[at : at + _PIECE_BYTES] for part in blob for at in range(0, len(part), _PIECE_BYTES))
        fields: list[Any] = ["entry", pack_entry(entry)]
        for number, piece in enumerate(pieces):
            fields += [number, piece]
        commands: list[Command] = [
            ("HSET", name, *fields),
            ("SADD", self._name("root", entry.root), entry.key),
            ("ZADD", self._used, _last_use(entry), _member(entry)),
            ("INCRBY", self._bytes, entry.nbytes),
        ]
        if entry.head:
            commands.append(("ZADD", self._name("head", entry.head), time.time(), entry.key))
        return commands

    def _touch(self, keys: Sequence[bytes]) -> None:
        commands: list[Command] = []
        for key, entry in self._find(keys).items():
            commands += [("ZADD", self._used, "XX", _last_use(entry), _member(entry)), ("ZINCRBY", self._hits, 1, key)]
            commands.append(("SADD", self._name("root", entry.root), key))  # else the server gives it up before them
            commands += self._expiries(entry)
        self._change(commands)

    def _delete(self, keys: Sequence[bytes]) -> bool:
        found = self._find(keys)
        return not found or self._drop([_member(entry) for entry in found.values()])

    def _announce(self, notice: bytes) -> bool:
        return bool(self._change([("XADD", self._notices, "MAXLEN", "~", _MAX_NOTICES, "*", "notice", notice)]))

    def _heard(self, since: bytes | None) -> Heard:
        """A place is the id of the last notice, which is still there if none behind it was given up."""
        complete, start = True, since or b"-"
        listed = self._ask([("XRANGE", self._notices, start, "+")])[0]
        if since and (not listed or listed[0][0] != since):
            complete, listed = False, self._ask([("XRANGE", self._notices, "-", "+")])[0]
        elif since == b"":  # there was none
            complete = len(listed) < _MAX_NOTICES
        new = listed[1:] if since and complete else listed
        return Heard(listed[-1][0] if listed else b"", [fields.get(b"notice", b"") for _, fields in new], complete)

    def _count(self) -> tuple[int, int]:
        """What the server gave up by itself counts until this tier meets it."""
        chunks, nbytes = self._ask([("ZCARD", self._used), ("GET", self._bytes)])
        if not _is_number(nbytes) or (chunks and nbytes is None):  # not ours, or given up by the server
            self._recount()
            nbytes = self._ask([("GET", self._bytes)])[0]
        return chunks, int(nbytes or 0)

    def _all_hits(self) -> dict[bytes, int]:
        counted = self._ask([("ZRANGE", self._hits, 0, -1, "WITHSCORES")])[0]
        return {key: int(count) for key, count in zip(counted[::2], counted[1::2], strict=True)}

    def _recount(self) -> None:
        """Set right what a client that died in `_drop` left wrong, or the server, or one that found foreign keys."""
        members, counted = self._ask([("ZRANGE", self._used, 0, -1), ("GET", self._bytes)], transaction=True)
        total = sum(map(_size, members))
        if not _is_number(counted):  # not ours
            self._change([("SET", self._bytes, total)])
        elif error := total - int(counted or 0):
            self._change([("INCRBY", self._bytes, error)])

    def _make_room(self, nbytes: int) -> None:
        """Give up chunks until `nbytes` more are within the budget, if there is one."""
        while self.max_bytes is not None and (excess := self._count()[1] + nbytes - self.max_bytes) > 0:
            victims = []
            for member in self._ask([("ZRANGE", self._used, 0, _VICTIMS - 1)])[0]:
                if excess > 0:
                    victims.append(member)
                    excess -= _size(member)
            if not victims:  # the server has given up the list, and not the sum
                self._recount()
                return
            if not self._drop(victims):
                return

    def _drop(self, members: Sequence[bytes]) -> bool:
        """Give chunks up, or forget what is gone, by what `used` has of them; tells whether that was done."""
        if not members:
            return False
        found = self._find([_key(member) for member in members])
        commands: list[Command] = [("ZREM", self._used, member) for member in members]
        for key in map(_key, members):
            commands += [("UNLINK", self._name("chunk", key)), ("ZREM", self._hits, key)]
            if (entry := found.get(key)) is not None:
                commands.append(("SREM", self._name("root", entry.root), key))
                commands.append(("ZREM", self._name("head", entry.head), key))
        removed = self._change(commands)[: len(members)]
        freed = sum(_size(member) for member, was_there in zip(members, removed, strict=False) if was_there)
        return bool(removed) and bool(self._change([("DECRBY", self._bytes, freed)]))

    def _expiries(self, entry: Entry) -> list[Command]:
        if self._ttl_ms is None:
            return []
        names = [self._name("chunk", entry.key), self._name("root", entry.root), self._name("head", entry.head)]
        return [("PEXPIRE", name, self._ttl_ms) for name in names]

    def _ask(self, commands: Iterable[Command], *, transaction: bool = False) -> list[Any]:
        """Answers to all commands, in one round trip."""
        with self._client.pipeline(transaction=transaction) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return self._execute(pipe)

    def _execute(self, pipe: Any) -> list[Any]:
        """Answers to all commands of a pipeline.

        A key of another type at a name of ours is removed, for nothing of ours could ever be written there: this call
        fails, and later ones do not.
        """
        from valkey.exceptions import ResponseError

        commands = [command for command, _ in pipe.command_stack]
        try:
            answers: list[Any] = pipe.execute(raise_on_error=False)
        except ResponseError as error:  # the client quotes the command: tokens and all
            raise ResponseError(str(error).rpartition("of pipeline caused error: ")[2]) from None
        pairs = zip(commands, answers, strict=True)
        if failed := [(command[1], error) for command, error in pairs if isinstance(error, ResponseError)]:
            if foreign := [name for name, error in failed if _is_foreign(error)]:
                self._client.unlink(*foreign)
                self._recount()
            raise failed[0][1]
        return answers

    def _execute_unless_written(self, pipe: Any, nbytes: int) -> bool:
        """Write a chunk, unless another client has just written it."""
        from valkey.exceptions import WatchError

        try:
            _, _, is_new, *_ = self._execute(pipe)
        except WatchError as error:
            if error.__context__ is not None:  # a lost connection, which the client reports like this, too
                raise
            return True
        if not is_new:  # the server had given it up by itself: it still counted
            self._change([("DECRBY", self._bytes, nbytes)])
        return True

    def _change(self, commands: Iterable[Command]) -> list[Any]:
        """Answers to all commands, none of which is done without the others; none where the server refuses."""
        listed = list(commands)  # of none, no answer could tell that the server writes again
        return self._writing.call([], self._ask, listed, transaction=True) if listed else []

    def _name(self, kind: str, key: bytes) -> str:
        return f"{self._prefix}:{kind}:{key.hex()}"


def _client(url: str, timeout_s: float) -> Any:
    try:
        import valkey
    except ImportError as error:
        raise ImportError(f"ValkeyTier needs the client: {how_to_install('valkey')}.") from error
    timeouts = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    try:
        client = valkey.Valkey.from_url(url, socket_read_size=_PIECE_BYTES, **timeouts)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # looks at the options; does not connect
    except (ValueError, TypeError, valkey.ValkeyError):
        raise ValueError(
            f"`url` must be the address of a Valkey or Redis server, got {without_secrets(url)!r} (password and "
            "options not shown). Example: 'redis://localhost:6379/0'."
        ) from None  # their messages may quote the password
    return client


def _is_foreign(error: Exception) -> bool:
    """Whether a key was of another type than a command needs."""
    return str(error).startswith("WRONGTYPE") or "is not an integer" in str(error)


def _is_number(counted: bytes | None) -> bool:
    return counted is None or counted.lstrip(b"-").isdigit()


def _refusal() -> type[Exception]:
    """Errors of a server that is there but will not write: full, a replica, out of disk."""
    from valkey.exceptions import ResponseError

    return ResponseError


def _unpacked(packed: bytes | None) -> Entry | None:
    try:
        return unpack_entry(packed) if packed is not None else None
    except ValueError:  # not ours, or of another version
        return None


def _last_use(entry: Entry) -> float:
    """Now, for something that begins at a prompt's first token."""
    return time.time() - entry.start * _SECONDS_PER_TOKEN


def _member(entry: Entry) -> bytes:
    return entry.key + entry.nbytes.to_bytes(_SIZE_BYTES, "little")


def _key(member: bytes) -> bytes:
    return member[:-_SIZE_BYTES]


def _size(member: bytes) -> int:
    return int.from_bytes(member[-_SIZE_BYTES:], "little")
