"""The tiers below host memory as one: where to find a blob, how long reading it takes, and the thread that writes."""

import json
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from kvboost_hf import forks
from kvboost_hf.cache.planning.chunks import KEY_BYTES
from kvboost_hf.cache.tiers.base import Entry, Failures, Kind, NoticeBoard, Tier, capacity
from kvboost_hf.cache.tiers.record import Blob, DamagedBlobError, dump

_log = logging.getLogger("kvboost_hf")

_MAX_WAITING = 512 * 2**20  # bytes that may wait to be written
_PROBE_BYTES = 2 * 2**20
_PROBE_KEY = b"kvboost_hf/the/probe"  # the same for all: one that was left behind is taken away by the next
_PROBED = 16  # blobs that are looked at for one that is large enough to be timed
_LEAST_BYTES = 2**16  # less says more of latency
_MAX_COUNT = 2**48  # of tokens or bytes
_MAX_OWED = 65_536  # deletions and notices
_REMEMBERED = 65_536  # ids of notices
_WEIGHT = 0.2  # of the newest measurement in a running average


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A blob in a tier."""

    entry: Entry
    tier: "MeasuredTier"


class MeasuredTier:
    """A tier, and how fast it was found to be."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.latency = 0.0  # seconds for a look-up
        self.seconds_per_byte = 0.0
        self._failures = Failures(_log, f"Tier {tier.name} at {tier.location}", (DamagedBlobError,))
        self._board = tier if isinstance(tier, NoticeBoard) else None
        self._place: Any = None  # of the last notice that was heard
        self._owed: deque[Callable[[], bool]] = deque(maxlen=_MAX_OWED)  # what it did not take, in order
        self.doomed = set[bytes]()  # keys, and names of models, whose deletion it did not take: nobody is to find them
        self._settling = forks.lock()
        self._measure()

    def read(self, entry: Entry) -> Blob | None:
        """The blob of an entry, its header checked; None if it is not there (any more).

        DamagedBlobError: it is no blob, or that of another entry. Whoever asked is to delete it.
        """
        data = self.tier.read(entry.key)
        if data is None:
            return None
        blob = Blob(data)
        found = blob.entry
        alike = (found.key, found.kind, found.model, found.root, found.parent, found.head, found.start) == (
            entry.key, entry.kind, entry.model, entry.root, entry.parent, entry.head, entry.start
        )  # fmt: skip
        if not alike or not np.array_equal(found.tokens, entry.tokens):
            raise DamagedBlobError("A blob is not of the entry that it was found by.")
        return blob

    @property
    def owes(self) -> bool:
        """Whether it has not taken what it was told to delete or to announce."""
        return bool(self._owed)

    def delete(self, keys: Collection[bytes]) -> None:
        """Give blobs up, as soon as the tier answers; from now on they are not found."""
        self._give_up(keys, lambda: self.tier.delete(keys))

    def clear(self, model: bytes) -> None:
        """Give all of a model up, as soon as the tier answers; from now on it is not found."""
        self._give_up((model,), lambda: self.tier.clear(model))

    def _give_up(self, names: Collection[bytes], attempt: Callable[[], bool | None]) -> None:
        def is_done() -> bool:
            done = attempt() is not False
            if done:
                self.doomed.difference_update(names)
            return done

        self.doomed.update(names)
        self._have(is_done)

    def announce(self, notice: bytes) -> None:
        """Have a notice heard by all who share the tier, as soon as it answers."""
        if (board := self._board) is not None:
            self._have(lambda: board.announce(notice))

    def _have(self, *work: Callable[[], bool]) -> None:
        with self._settling:
            self._owed += work
            while self._owed and self._owed[0]():
                self._owed.popleft()

    def hear(self) -> tuple[Sequence[bytes], bool]:
        """Notices since the last call, and whether none was missed; none of a tier that does not answer, or raises."""
        heard = None
        try:
            if self._owed:
                self._have()
            heard = self._board.heard(self._place) if self._board is not None else None
        except Exception as error:
            self._failures.note("hear of others", error)
        if heard is None:
            return (), True
        self._place = heard.place
        return heard.notices, heard.complete

    def note_damage(self, error: DamagedBlobError) -> None:
        """Count a blob that could not be read among the errors of the tier; whoever found out deletes it."""
        self._failures.note("read a blob, which is deleted", error)

    def stats(self) -> dict[str, Any]:
        """The figures of the tier. `errors` also counts blobs that could not be read."""
        stats = self.tier.stats()
        return {**stats, "errors": int(stats["errors"]) + self._failures.count}

    def took(self, *blobs: tuple[int, float]) -> None:
        """Note the bytes of blobs, and the seconds that each took, from asking for it to its last byte."""
        for nbytes, seconds in blobs:
            if nbytes >= _LEAST_BYTES:
                per_byte = max(0.0, seconds - self.latency) / nbytes
                self.seconds_per_byte += _WEIGHT * (per_byte - self.seconds_per_byte)

    def _measure(self) -> None:
        """Read a blob: one that is there, or one that is written for it, if nothing has to go."""
        start = time.perf_counter()
        self.tier.find([os.urandom(20)])
        self.latency = time.perf_counter() - start
        entry = next((each for each in islice(self.tier.entries(), _PROBED) if each.nbytes >= _LEAST_BYTES), None)
        if entry is not None:
            self._time(entry)
            return
        stats = self.tier.stats()
        if int(stats["bytes"]) + 2 * _PROBE_BYTES > capacity(stats):
            return
        tokens = np.zeros(1, dtype=np.int64)
        entry = Entry(_PROBE_KEY, Kind.CONTENT, b"probe", b"probe", b"probe", b"", 0, tokens, 0)
        entry, parts = dump(entry, {"probe": torch.zeros(1, _PROBE_BYTES, dtype=torch.uint8, device="cpu")}, None)
        self.tier.write(entry, parts)
        self._time(entry)
        self.tier.delete([_PROBE_KEY])

    def _time(self, entry: Entry) -> None:
        start = time.perf_counter()
        try:
            blob = self.read(entry)
            if blob is None:
                return
            blob.check_all()
        except DamagedBlobError as error:
            self.note_damage(error)
            self.tier.delete([entry.key])
        else:
            self.seconds_per_byte = (time.perf_counter() - start) / blob.entry.nbytes


class Told:
    """Writes notices, and reads those of others: each once, on however many boards it is.

    Not safe to use from several threads at once.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()  # ids

    def write(self, notice: Mapping[str, Any]) -> bytes:
        """A notice of this process."""
        id = uuid4().hex
        self._note(id)
        return json.dumps({**notice, "id": id}).encode()

    def read(self, written: bytes) -> dict[str, Any] | None:
        """A notice of somebody else; None for one that is known, or was not written by `write`."""
        try:
            notice = json.loads(written)
        except (ValueError, RecursionError):
            return None
        id = notice.pop("id", None) if isinstance(notice, dict) else None
        if not isinstance(id, str) or id in self._known:
            return None
        self._note(id)
        return dict(notice)

    def _note(self, id: str) -> None:
        self._known[id] = None
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


class LowerTiers:
    """All tiers below host memory, the nearest first.

    What is written to them is written by a thread of its own. What waits to be written is bounded; what does not fit
    is not written (yet), and whoever offered it is told. `close()` closes those that were `opened` for it, too.
    `write` leaves out those that are written when the store is closed, whose names are in `at_close`.
    """

    def __init__(
        self, tiers: Sequence[Tier], opened: Sequence[Tier] = (), at_close: Collection[str] = frozenset()
    ) -> None:
        self._opened, self.at_close = opened, at_close
        self.tiers = [MeasuredTier(tier) for tier in tiers]
        self._lock = forks.lock()
        self._start_thread()
        forks.in_child(self._start_thread)
        self._closed = False
        self._told, self._telling = Told(), forks.lock()
        self.refused = 0  # writes for which too much was waiting

    def _start_thread(self) -> None:
        """Have a thread; in a forked process another one, where nothing is left of what the last one was to do."""
        self._executor = ThreadPoolExecutor(1, "kvboost_hf-tiers", self._note_thread)
        self._thread: int | None = None
        self._last: Future[None] | None = None
        self._waiting = 0

    def __bool__(self) -> bool:
        return bool(self.tiers)

    # Looking up

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """Which of `keys` there are, and the nearest tier that has each."""
        found: dict[bytes, Found] = {}
        for tier in self.tiers:
            if rest := [key for key in keys if key not in found]:
                entries = tier.tier.find(rest)
                found |= {key: Found(entry, tier) for key, entry in entries.items() if _is_usable(entry, key, tier)}
        return found

    def find_alike(self, heads: Sequence[bytes]) -> list[Found]:
        """Blobs that begin with one of `heads`, each in the nearest tier that has it."""
        found: dict[bytes, Found] = {}
        for tier in self.tiers:
            for entry in tier.tier.find_alike(heads):
                if entry.head in heads and _is_usable(entry, entry.key, tier):
                    found.setdefault(entry.key, Found(entry, tier))
        return list(found.values())

    def entries(self, root: bytes | None = None) -> Iterator[Found]:
        """All that there is under roots that begin so, or at all, in the nearest tier that has it."""
        seen: set[bytes] = set()
        for tier in self.tiers:
            for entry in tier.tier.entries(root):
                known = entry.key in seen or not entry.root.startswith(root or b"")
                if not known and _is_usable(entry, entry.key, tier):
                    seen.add(entry.key)
                    yield Found(entry, tier)

    # Writing, by the thread

    def write(
        self,
        nbytes: int,
        make: Callable[[], tuple[Entry, list[bytes | memoryview]]],
        above: Any = None,
        on_failed: Callable[[], object] = lambda: None,
    ) -> bool:
        """Write what `make` makes to every tier, or those above one of them; tells whether it will be tried.

        It is about `nbytes` bytes. The thread calls `make`, and `on_failed` if no tier has taken it.
        """
        tiers = self.tiers if above is None else self.tiers[: self.tiers.index(above)]
        tiers = [tier for tier in tiers if tier.tier.name not in self.at_close]
        if not tiers:
            return above is not None
        with self._lock:
            if self._closed:
                return False
            if self._waiting and self._waiting + nbytes > _MAX_WAITING:
                self.refused += 1
                return False
            self._waiting += nbytes

        def job() -> None:
            try:
                entry, parts = make()
                if not any([tier.tier.write(entry, parts) for tier in tiers]):
                    on_failed()
            finally:
                with self._lock:
                    self._waiting -= nbytes

        self.run(job)
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were used."""
        self._each(lambda tier: tier.touch(keys))

    def delete(self, keys: Iterable[bytes]) -> None:
        """Give these up in every tier."""
        doomed = list(keys)

        def delete() -> None:
            for tier in self.tiers:
                tier.delete(doomed)

        self.run(delete)

    @property
    def owing(self) -> list[str]:
        """Names of the tiers that have not taken all that they were told to delete or to announce."""
        return [tier.tier.name for tier in self.tiers if tier.owes]

    # Notices

    def announce(self, notice: Mapping[str, Any]) -> None:
        """Have a notice heard by all who share a tier, before returning, or as soon as the tier answers."""
        with self._telling:
            written = self._told.write(notice)
            for tier in self.tiers:
                tier.announce(written)

    def hear(self) -> tuple[list[dict[str, Any]], bool]:
        """Notices of others since the last call, and whether none was missed."""
        notices, complete = [], True
        with self._telling:
            for tier in self.tiers:
                found, whole = tier.hear()
                complete = complete and whole
                if found:
                    notices += [notice for each in found if (notice := self._told.read(each)) is not None]
        return notices, complete

    def clear(self, model: bytes) -> None:
        """Give up all of a model, before returning."""

        def clear() -> None:
            for tier in self.tiers:
                tier.clear(model)

        self.run(clear)
        self.flush()

    def _each(self, job: Callable[[Tier], None]) -> None:
        def jobs() -> None:
            for tier in self.tiers:
                job(tier.tier)

        self.run(jobs)

    def run(self, job: Callable[[], Any]) -> None:
        """Let the thread do something, after all that it was given before."""
        with self._lock:
            if self._closed:
                return
            with suppress(RuntimeError):  # no more is taken once the main thread has ended
                self._last = self._executor.submit(_logged, job)
                return
        _logged(job)

    def flush(self) -> None:
        """Wait until all that was given to the thread is done, and what these jobs gave it in turn."""
        if threading.get_ident() == self._thread:
            return
        waited: Future[None] | None = None
        for _ in range(3):  # what comes back is written to nearer tiers, and evicts what is written then
            with self._lock:
                last = self._last
            if last is None or last is waited:
                return
            last.exception()
            waited = last

    def close(self) -> None:
        """Finish what is waiting, and let go of the tiers."""
        self.flush()
        own = threading.get_ident() == self._thread  # a job was the last to hold on to the store
        with self._lock:
            self._closed = True
            if own:
                self._executor.submit(self._close_opened)
        self._executor.shutdown(wait=not own)
        if not own:
            self._close_opened()

    def _close_opened(self) -> None:
        for tier in self._opened:
            tier.close()

    def _note_thread(self) -> None:
        self._thread = threading.get_ident()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Of each tier by its name, with how fast it was found to be."""
        return {
            tier.tier.name: {
                **tier.stats(),
                "latency_s": tier.latency,
                "bytes_per_s": 1 / tier.seconds_per_byte if tier.seconds_per_byte else 0.0,
                "waiting_bytes": self._waiting,
            }
            for tier in self.tiers
        }


def _is_usable(entry: Entry, key: bytes, tier: MeasuredTier) -> bool:
    """Whether an entry can be planned with: whoever writes to a tier may write anything there."""
    if key in tier.doomed or entry.model in tier.doomed:
        return False
    counts = 0 <= entry.start < _MAX_COUNT and 0 < entry.nbytes < _MAX_COUNT
    return counts and entry.key == key and len(entry.key) == KEY_BYTES and len(entry.tokens) > 0


def _logged(job: Callable[[], Any]) -> None:
    try:
        job()
    except Exception:
        _log.exception("Something went wrong in the thread that writes to the tiers; what it wrote is lost.")
