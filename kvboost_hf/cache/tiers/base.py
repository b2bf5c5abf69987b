"""The protocol of storage tiers below host memory: keep blobs, and find them by key or by how they begin.

A tier knows nothing of models and tensors. It keeps blobs (see `record.py`), each with an `Entry` that says what it is
found by. Whatever goes wrong in it (a full disk, a server that is gone, a file that was cut short) is logged, and
looks like a miss: no method but the constructor raises. `Failures` counts what went wrong, and `Guard` leaves what has
failed alone for a while.
"""

import errno
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from time import monotonic
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable
from urllib.parse import parse_qs, unquote, urlsplit

from kvboost_hf import forks
from kvboost_hf.cache.planning.chunks import Tokens

_MAX_COOLDOWN_S = 30.0
_SILENCE_S = 60.0  # between two warnings of one kind
P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("kvboost_hf")
MAX_ALIKE = 256  # of what begins alike, so many are looked at
_BATCH = 256  # entries that are asked for at once


class Kind(Enum):
    """Kind of K/V in a blob."""

    CHUNK = "chunk"  # K/V that is found by prefix key, and by content
    CONTENT = "content"  # K/V that is found by content only
    STATES = "states"  # of linear attention, after some token


@dataclass(frozen=True, slots=True)
class MadeWith:
    """What K/V was computed and kept with, besides the model, its weights and a salt."""

    codec: str  # name of the codec of the store
    regime: str  # names the rotary frequencies and the codes of the live cache that it was computed with
    attention: str  # the attention implementation of the model
    versions: str  # those of PyTorch and transformers


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Index entry of a blob: enough to plan with, without reading the blob."""

    key: bytes  # the key of the entry, which no other entry has
    kind: Kind
    model: bytes  # names the model that it is of: its configuration and shapes, not its weights
    root: bytes  # the root that its history begins at
    parent: bytes  # key of the chunk that it was computed behind, or the root
    head: bytes  # what it shares with all that begin alike behind the same `parent`; empty for `Kind.CONTENT`
    start: int  # row token of its first token, when it was stored
    tokens: Tokens  # the tokens of the chunk; int64
    nbytes: int  # bytes of the blob
    # What it was made with. Told by blobs and not by every index; None where it is not known.
    made_with: MadeWith | None = None


@runtime_checkable
class Tier(Protocol):
    """A place to keep blobs. Safe to use from several threads; several processes may share what is behind it.

    Attributes:
        name: A short word for reports and `stats()`, such as `"disk"`.
        location: Where it is, for people; without secrets.
    """

    name: str
    location: str

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """Which of `keys` are kept, all in one round trip."""
        ...

    def find_alike(self, heads: Sequence[bytes]) -> list[Entry]:
        """Entries with one of these `Entry.head`: of each head the newest first, no more than 256."""
        ...

    def entries(self, root: bytes | None = None) -> Iterator[Entry]:
        """All that is kept, or what is kept under one root, or under all roots that begin with some bytes."""
        ...

    def read(self, key: bytes) -> memoryview | None:
        """The blob, or None if it is not there (any more). It stays readable whatever happens to the tier.

        It may be damaged: whoever reads it checks its checksums.
        """
        ...

    def write(self, entry: Entry, blob: Sequence[bytes | memoryview]) -> bool:
        """Keep a blob, given in parts to be joined; tells whether it is kept now. One that is there stays as it is.

        Others are given up for it where there is a budget: those that were not used for longest, what continues a
        chunk before the chunk itself.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """These have been used just now."""
        ...

    def delete(self, keys: Iterable[bytes]) -> bool:
        """Give these up; tells whether none of them is there any more."""
        ...

    def clear(self, model: bytes) -> bool | None:
        """Give up all that is kept of one model (`Entry.model`); False if some of it may still be there."""
        ...

    def stats(self) -> Mapping[str, int | float | str]:
        """At least `chunks` and `bytes`, and `max_bytes` where there is a budget; `errors` counts what went wrong.

        On a disk, `free_bytes` are those that it has left.
        """
        ...

    def hits(self) -> Mapping[bytes, int]:
        """Number of touches of each key, where that is known."""
        ...

    def close(self) -> None:
        """Let go of files, connections and threads. Nothing is given up."""
        ...


@dataclass(frozen=True, slots=True)
class Heard:
    """Notices since some place."""

    place: Any  # the place behind them, to go on from
    notices: Sequence[bytes] = ()  # in their order
    complete: bool = True  # whether all are there that ever followed the place which was asked for


@runtime_checkable
class NoticeBoard(Protocol):
    """A tier that keeps notices for all who share it: which K/V was removed, and which sessions there are.

    Notices are told by places in the order in which they came, and never by clocks. Whoever has not heard for so long
    that some are no longer kept is told so, and must take it that anything was removed. As of a `Tier`, no method
    raises for what fails outside.
    """

    def announce(self, notice: bytes) -> bool:
        """Keep a notice, text without line breaks of at most 1 MiB; tells whether all will hear it."""
        ...

    def heard(self, since: Any) -> Heard | None:
        """Notices since a place that was returned before, or all that are kept for None; None if nobody answers."""
        ...


def is_no_space(error: Exception) -> bool:
    """Whether a disk, or what a user may take of it, is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in full or getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"


def capacity(stats: Mapping[str, Any]) -> float:
    """Bytes that a tier can hold, by its `stats()`: its budget, or what its disk has for it if that is less."""
    budget = float(stats.get("max_bytes", "inf"))
    return min(budget, int(stats["bytes"]) + float(stats.get("free_bytes", "inf")))


class Failures:
    """Counts and logs the failures of a tier, or of what goes on without what has failed.

    Where all exceptions are to be expected, the log has where each was raised. `effect` tells people what comes of
    one.
    """

    def __init__(
        self,
        log: logging.Logger,
        place: str,
        kinds: tuple[type[Exception], ...],
        effect: str = "This looks like a miss",
    ) -> None:
        self.count = 0
        self.kinds = kinds
        self._log, self._place, self._effect = log, place, effect
        self._logged: dict[str, float] = {}

    @contextmanager
    def caught(self, doing: str) -> Iterator[None]:
        """Count what goes wrong inside, and leave the block."""
        try:
            yield
        except self.kinds as error:
            self.note(doing, error)

    def note(self, doing: str, error: Exception) -> None:
        """Count one failure; each kind is logged at once, and then once a minute."""
        self.count += 1
        kind = f"{type(error).__name__} {getattr(error, 'errno', None) or getattr(error, 'sqlite_errorname', '')}"
        last, now = self._logged.get(kind), time.monotonic()
        if last is None or now - last >= _SILENCE_S:
            self._logged[kind] = now
            self._log.warning(
                "%s: failed to %s: %s. %s; failures so far: %d.",
                self._place,
                doing,
                str(error).rstrip("."),
                self._effect,
                self.count,
                exc_info=error if Exception in self.kinds else None,
            )


class Guard:
    """Calls that may fail, and what they count for while they do.

    One failure is enough to leave the other side alone, for `cooldown_s` seconds, and twice as many after each further
    one, up to 30. Then one call finds out whether it is back, while all others go on without it. Where a foreign
    client does not tell what it raises, all exceptions are failures.
    """

    def __init__(
        self,
        place: str,
        *,
        failures: type[Exception] = Exception,
        secrets: Collection[str] = (),
        cooldown_s: float = 1.0,
    ) -> None:
        if not cooldown_s > 0:
            raise ValueError(f"`cooldown_s` must be more than 0 seconds, got {cooldown_s!r}.")
        self.errors = 0  # failures since the start
        self._place, self._failures, self._secrets = place, failures, sorted(secrets, key=len, reverse=True)
        self._cooldown_s, self._max_cooldown_s = cooldown_s, max(cooldown_s, _MAX_COOLDOWN_S)
        self._pause_s = 0.0  # between the last failure and the next attempt; 0 while all is well
        self._failed_at = self._retry_at = float("-inf")
        self._lock = forks.lock()

    @property
    def state(self) -> str:
        """`"open"` while calls go through, `"down"` since a failure."""
        return "down" if self._pause_s else "open"

    def call(self, otherwise: T, attempt: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `attempt(*args, **kwargs)`, or `otherwise` where it fails, or has failed a moment ago."""
        began = monotonic()
        with self._lock:
            if began < self._retry_at:
                return otherwise
            if self._pause_s:
                self._retry_at = began + self._pause_s
        try:
            result = attempt(*args, **kwargs)
        except self._failures as error:
            self._fail(error, began)
            return otherwise
        with self._lock:
            recovered = bool(self._pause_s) and began >= self._failed_at
            if recovered:
                self._pause_s, self._retry_at = 0.0, float("-inf")
        if recovered:
            _log.info("%s answers again.", self._place)
        return result

    def _fail(self, error: Exception, began: float) -> None:
        with self._lock:
            self.errors += 1
            first = not self._pause_s
            if began >= self._failed_at:  # what had begun before the last failure tells nothing new
                self._pause_s = min(self._pause_s * 2 or self._cooldown_s, self._max_cooldown_s)
                self._failed_at = monotonic()
                self._retry_at = self._failed_at + self._pause_s
        if first:
            text = f"{type(error).__name__}: {error}"
            for secret in self._secrets:
                text = text.replace(secret, "***")
            _log.warning("%s failed, and is left alone for a while (%s).", self._place, text)


def without_secrets(url: str) -> str:
    """An address as people may see it: without user, password and options."""
    return re.sub(r"//([^@]*:.*|[^/]*)@", "//", url).partition("?")[0]


def secrets_in(url: str) -> set[str]:
    """Secrets of an address, which `without_secrets` leaves out."""
    parts = urlsplit(url)
    values = [value for values in parse_qs(parts.query).values() for value in values]
    return {word for word in (parts.password, unquote(parts.password or ""), *values) if word}


class RemoteTier(ABC):
    """A `Tier` of methods that may fail, each behind a `Guard`, with a budget of `max_bytes`, or None.

    What a place raises that only refuses to be written to (`refusals`) has a guard of its own: it is still read from.
    ValueError: a budget or a cool-down that is not positive.
    """

    def __init__(
        self, name: str, url: str, max_bytes: int | None, cooldown_s: float, refusals: type[Exception]
    ) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(f"`max_bytes` must be a positive number of bytes, got {max_bytes}. None sets no limit.")
        self.name, self.location, self.max_bytes = name, without_secrets(url), max_bytes
        secrets = secrets_in(url)
        self._guard = Guard(f"The tier at {self.location}", secrets=secrets, cooldown_s=cooldown_s)
        self._writing = Guard(f"Writing to {self.location}", failures=refusals, secrets=secrets, cooldown_s=cooldown_s)
        self._counted = (0, 0)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        return self._guard.call({}, self._find, keys) if keys else {}

    def find_alike(self, heads: Sequence[bytes]) -> list[Entry]:
        return self._guard.call([], self._find_alike, heads) if heads else []

    def entries(self, root: bytes | None = None) -> Iterator[Entry]:
        keys = self._guard.call([], self._keys, root)
        for at in range(0, len(keys), _BATCH):
            yield from self.find(keys[at : at + _BATCH]).values()

    def read(self, key: bytes) -> memoryview | None:
        return self._guard.call(None, self._read, key)

    def write(self, entry: Entry, blob: Sequence[bytes | memoryview]) -> bool:
        parts = [memoryview(part).cast("B") for part in blob]
        assert sum(map(len, parts)) == entry.nbytes, "an entry tells the size of its blob"
        if self.max_bytes is not None and entry.nbytes > self.max_bytes:
            return False
        return self._guard.call(False, self._write, entry, parts)

    def touch(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._guard.call(None, self._touch, keys)

    def delete(self, keys: Iterable[bytes]) -> bool:
        every = list(keys)
        batches = [every[at : at + _BATCH] for at in range(0, len(every), _BATCH)]
        return all([self._guard.call(False, self._delete, batch) for batch in batches])

    def announce(self, notice: bytes) -> bool:
        return self._guard.call(False, self._announce, notice)

    def heard(self, since: Any) -> Heard | None:
        return self._guard.call(None, self._heard, since)

    def clear(self, model: bytes) -> bool:
        return self._guard.call(False, self._clear, model)

    def _clear(self, model: bytes) -> bool:
        keys, done = self._keys(b""), True  # under all roots: what is found is listed there
        for at in range(0, len(keys), _BATCH):
            found = self._find(keys[at : at + _BATCH]).values()
            doomed = [entry.key for entry in found if entry.model == model]
            done = (not doomed or self._delete(doomed)) and done
        return done

    def stats(self) -> Mapping[str, int | float | str]:
        """`chunks` and `bytes` are those last heard of while `state` is `"down"`."""
        self._counted = self._guard.call(self._counted, self._count)
        chunks, nbytes = self._counted
        known: dict[str, int | float | str] = {
            "chunks": chunks,
            "bytes": nbytes,
            "errors": self._guard.errors + self._writing.errors,
            "state": self._guard.state,
        }
        return known if self.max_bytes is None else {**known, "max_bytes": self.max_bytes}

    def hits(self) -> Mapping[bytes, int]:
        return {}

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]: ...

    @abstractmethod
    def _find_alike(self, heads: Sequence[bytes]) -> list[Entry]: ...

    @abstractmethod
    def _keys(self, root: bytes | None) -> list[bytes]:
        """Keys of `entries(root)`; some of them may be gone."""

    @abstractmethod
    def _read(self, key: bytes) -> memoryview | None: ...

    @abstractmethod
    def _write(self, entry: Entry, blob: Sequence[memoryview]) -> bool: ...

    @abstractmethod
    def _touch(self, keys: Sequence[bytes]) -> None: ...

    @abstractmethod
    def _delete(self, keys: Sequence[bytes]) -> bool: ...

    @abstractmethod
    def _announce(self, notice: bytes) -> bool: ...

    @abstractmethod
    def _heard(self, since: Any) -> Heard: ...

    @abstractmethod
    def _count(self) -> tuple[int, int]:
        """Number of blobs, and their bytes."""
