"""`SessionTable`: the sessions that an engine knows, and `Pins`: what is kept, within a share for each client."""

import logging
import math
import re
import time
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import Any, Literal

import numpy as np

from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Tokens
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.fields import shared
from kvboost_hf.server.engine.belongings import Beginnings, Belongings
from kvboost_hf.server.engine.model_runner import ModelRunner
from kvboost_hf.server.engine.task import SessionRecord, Task, session_id
from kvboost_hf.server.fair_share import FairCache
from kvboost_hf.server.jobs import Job, Keep, Session, SessionChange

_log = logging.getLogger("kvboost_hf.server")
_MOST_SESSIONS = 2048  # sessions of all clients
_MOST_PINS = 1024  # pins of one client
_TRIES = 3  # to do what another server has told
_ROOT = re.compile(r"[0-9a-f]{40}")


class SessionTable:
    """Sessions of all clients, within a bound: the client with the most forgets the one that it used least recently.

    Servers that share a tier tell each other which sessions there are, what is pinned of them and which were dropped.
    Clients are named there by a hash.

    For the engine's thread alone.

    Sessions of `clients` at other servers are listed before they ask here.
    """

    def __init__(
        self, runner: ModelRunner, clock: Callable[[], float] = time.time, clients: Iterable[bytes] = ()
    ) -> None:
        self.pins = Pins(runner, clock)
        self._runner, self._clock = runner, clock
        self._sessions: FairCache[bytes, SessionRecord] = FairCache(_MOST_SESSIONS)  # by client and id
        self._clients = {_name(client): client for client in clients}
        self._failed: list[tuple[dict[str, Any], int]] = []  # notices, and how often they were tried
        self._strange: OrderedDict[tuple[str, str], list[dict[str, Any]]] = OrderedDict()  # of clients not known yet

    def __len__(self) -> int:
        return len(self._sessions)

    # What happens to tasks

    def enter(self, task: Task) -> None:
        """A piece of a task's prompt was computed: it belongs to a session from now on."""
        if task.session is None:
            task.session = self._use(task)
        self._note(task)

    def begin(self, task: Task) -> None:
        """The prompt of a task was computed: count it, and pin what is to be pinned of it."""
        session, cache, report = task.session, task.cache, task.report
        assert session is not None
        assert cache is not None
        assert report is not None
        session.requests += 1
        session.prompt_tokens += report.prompt_tokens
        session.cached_tokens += report.reused_tokens
        session.tokens = len(task.job.ids)
        keeps = (*task.job.keep, *([session.keep] if session.keep is not None else []))
        priority = task.job.priority if session.priority is None else session.priority
        pinned = self.pins.keep(task.job, keeps, cache, session.id, priority)
        task.pinned = pinned if task.job.keep else None

    def end(self, task: Task) -> None:
        """A task has ended; what its cache holds is stored."""
        if task.session is not None and task.report is not None:
            task.session.tokens = len(task.job.ids) + len(task.ids)
            self._note(task)

    def _use(self, task: Task) -> SessionRecord:
        job, now = task.job, self._clock()
        session = self._record(job.client, session_id(job, self._runner.store.chunker), now)
        self._sessions.get(job.client, session.id)  # it is used
        session.last_used = now
        return session

    def _record(self, client: bytes, id: str, now: float) -> SessionRecord:
        self._meet(client)
        if (found := self._sessions.peek(client, id)) is None:
            self.restore(found := SessionRecord(id, client, now, now))
        return found

    def restore(self, session: SessionRecord) -> None:
        """Enter a session, also one that was dropped."""
        self._sessions.put(session.client, session.id, session)

    def _note(self, task: Task) -> None:
        cache = task.cache
        if task.session is not None and cache is not None and cache.root is not None:
            store, session = self._runner.store, task.session
            found = [session.note_text(cache.root, task.job.ids, store.chunker, cache.content_keys)]
            found += [session.note_text(each, task.job.ids, store.chunker, frozenset()) for each in cache.head_roots]
            if any(found):
                self._tell_session(session)

    # What other servers are told, and tell

    def _tell_session(self, session: SessionRecord) -> None:
        heads = [b64encode(head).decode() for head in session.heads]
        roots, pieces = sorted(root.hex() for root in session.roots), session.has_pieces
        known = {"since": session.first_seen, "roots": roots, "heads": heads, "pieces": pieces}
        self._announce("session", session.client, session.id, known, soon=True)

    def tell_dropped(self, client: bytes, id: str, roots: Iterable[bytes]) -> None:
        """Have others drop a session, before returning. Any thread may call it."""
        self._announce("drop", client, id, {"roots": sorted(root.hex() for root in roots)})

    def _announce(self, kind: str, client: bytes, id: str, more: Mapping[str, Any], *, soon: bool = False) -> None:
        store = self._runner.store
        if store.is_shared:
            store.announce({"kind": kind, "client": _name(client), "session": id, **more}, soon=soon)

    def hear(self, tasks: Sequence[Task]) -> None:
        """Do what other servers have told since the last time, also to tasks under way.

        A notice that fails is tried twice more, the next times, and holds none of the others up.
        """
        told = [*self._failed, *((notice, 1) for notice in self._runner.store.hear(take=True))]
        self._failed = []
        for notice, times in told:
            try:
                self._take(notice, tasks)
            except Exception:
                _log.exception("What another server has told could not be done.")
                self._failed += [(notice, times + 1)] if times < _TRIES else []

    def _take(self, notice: dict[str, Any], tasks: Sequence[Task]) -> None:
        """Do what a notice says, or keep it until its client is known."""
        match notice:
            case {"kind": "session" | "keep" | "drop", "client": str(name), "session": str(id)}:
                if name in self._clients:
                    self._heed(self._clients[name], id, notice, tasks)
                else:
                    self._strange.setdefault((name, id), []).append(notice)
                    if len(self._strange) > _MOST_SESSIONS:
                        self._strange.popitem(last=False)

    def _meet(self, client: bytes) -> None:
        """Do what was told of a client before it was known."""
        name = _name(client)
        if name not in self._clients:
            self._clients[name] = client
            for each in [each for each in self._strange if each[0] == name]:
                for notice in self._strange.pop(each):
                    self._heed(client, each[1], notice, ())

    def _heed(self, client: bytes, id: str, notice: dict[str, Any], tasks: Sequence[Task]) -> None:
        store = self._runner.store
        match notice:
            case {"kind": "session", "since": int() | float() as since, "roots": list(roots), "heads": list(heads)}:
                session = self._record(client, id, min(since, self._clock()))
                for root in filter(None, map(_key, roots)):
                    for head in filter(None, map(_decoded, heads)):
                        pieces = notice.get("pieces") is True
                        session.note(root, np.frombuffer(head, np.int64), pieces=pieces)
            case {"kind": "keep", "keep": keep, "priority": int() | None as priority}:
                self._record(client, id, self._clock())
                self._change(client, id, SessionChange(keep=_keep(keep), priority=priority))
            case {"kind": "drop", "roots": list(roots)}:
                own, heads_of_all = self.drop(client, id, [root for root in map(_key, roots) if root], tasks)
                held = store.held(own.under(heads_of_all))
                store.discard(own.keys(held, heads_of_all, lost=False))

    # What clients ask

    def of(self, client: bytes | None, id: str | None) -> list[SessionRecord]:
        """Sessions of a client, or of all; one of them, or all. Those used last come first."""
        if client is not None:
            self._meet(client)
        found = [each for each in self._sessions if client in (None, each.client) and id in (None, each.id)]
        return sorted(found, key=lambda each: -each.last_used)

    def change(self, client: bytes, id: str, change: SessionChange) -> SessionRecord | None:
        """Change what is kept of a session, here and at other servers; None if there is none."""
        self._meet(client)
        session = self._change(client, id, change)
        if session is not None:
            keep = asdict(change.keep) if isinstance(change.keep, Keep) else change.keep
            self._announce("keep", client, id, {"keep": keep, "priority": change.priority})
        return session

    def _change(self, client: bytes, id: str, change: SessionChange) -> SessionRecord | None:
        session = self._sessions.peek(client, id)
        if session is None:
            return None
        store = self._runner.store
        if change.priority is not None:
            session.priority = change.priority
            self.pins.set_priority(client, id, change.priority)
        if change.keep is False:
            session.keep = None
            self.pins.release(client, id)
        elif change.keep is not None:
            session.keep = change.keep
            own, heads = session.belongings, self.heads(client)
            keys = own.keys(store.held(own.under(heads)), heads, lost=False)
            self.pins.keep_session(client, id, keys, change.keep, session.priority or 0)
        return session

    def drop(
        self, client: bytes, id: str, roots: Iterable[bytes], tasks: Sequence[Task]
    ) -> tuple[Belongings, Beginnings]:
        """Forget a session; what its tasks under way hold is not stored.

        Returns what is to be removed, with all that is stored under `roots`, and how prompts of the client begin.
        """
        self._meet(client)
        session, heads, roots = self._sessions.peek(client, id), self.heads(client), frozenset(roots)
        if session is None:
            return Belongings(id, roots), heads
        self._sessions.pop(client, id)
        self.pins.release(client, id)
        for task in tasks:
            if task.session is session:
                task.unwanted = True
                if task.cache is not None:
                    self._runner.keep_nothing(task.cache)
        own = session.belongings
        return replace(own, roots=own.roots | roots), heads

    def heads(self, client: bytes | None) -> Beginnings:
        """How the prompts of a client begin, or those of all."""
        heads = Beginnings()
        for session in self._sessions:
            if client in (None, session.client):
                session.add_to(heads)
        return heads

    def figures(self, session: SessionRecord, nbytes: int) -> Session:
        """The figures of a session, for its client."""
        pins = self.pins.of(session.client, session.id)
        until = max((pin.until for pin in pins), default=math.inf)
        told = shared(Session, session) | {"nbytes": nbytes, "priority": session.priority or 0, "pinned": bool(pins)}
        ttl_s = session.keep.ttl_s if session.keep is not None else None
        return Session(**told, ttl_s=ttl_s, pinned_until=until if until < math.inf else None)


@dataclass(slots=True, eq=False)
class Pin:
    """A beginning of prompts, or all K/V of a session, that a client has asked to keep."""

    holder: bytes  # names it to the store
    session: str  # the id of the session that the pin belongs to
    root: bytes  # where the text begins; empty for a whole session
    ttl_s: float | None  # seconds after its last use; None for no limit
    priority: int  # those with the largest number give way first
    used: float  # when it was last used
    tokens: int = 0  # how many tokens the text has; 0 for a whole session
    digest: bytes = b""  # a hash of root and tokens

    @property
    def until(self) -> float:
        """When it ends, unless it is used before."""
        return math.inf if self.ttl_s is None else self.used + self.ttl_s


class Pins:
    """The pins of each client. For the engine's thread alone."""

    def __init__(self, runner: ModelRunner, clock: Callable[[], float] = time.time) -> None:
        self._runner, self._clock = runner, clock
        self._pins: dict[bytes, list[Pin]] = {}  # by client, the newest last
        self._next = math.inf  # nothing ends before
        self._holders = count(1)

    def __len__(self) -> int:
        return sum(map(len, self._pins.values()))

    def of(self, client: bytes, session: str) -> list[Pin]:
        """The pins of a session."""
        return [pin for pin in self._pins.get(client, ()) if pin.session == session]

    def keep(self, job: Job, keeps: Collection[Keep], cache: ChunkReuseCache, session: str, priority: int) -> bool:
        """Renew the pins that a prompt begins with, and make new ones; tells whether all that was asked is pinned.

        What is longer than the client's share, has no room, or has moved K/V in it, is not pinned at all.
        """
        root, tokens = cache.root, np.asarray(job.ids, dtype=np.int64)
        if root is None:
            return not keeps
        begun = self._renew(job.client, root, tokens, session)
        if keeps:
            cache.store_all()  # what came from lower tiers may not be in host memory yet
        made = [self._new(session, root, keep.ttl_s, priority) for keep in keeps]
        return all(
            [self._keep_one(job.client, pin, keep, tokens, begun) for pin, keep in zip(made, keeps, strict=True)]
        )

    def _keep_one(self, client: bytes, pin: Pin, keep: Keep, tokens: Tokens, begun: list[Pin]) -> bool:
        """Pin a beginning of a prompt, in place of shorter ones among those that the prompt has `begun` with."""
        wanted = len(tokens) if keep.tokens is None else min(keep.tokens, len(tokens))
        records, held = self._runner.store.beginning(pin.root, tokens, wanted)
        if held <= wanted - HEAD_TOKENS:  # fewer tokens than that are never stored
            return False
        keys = [record.key for record in records]
        if keep.share is None:
            return self._runner.store.pin(keys, b"")
        pin.tokens, pin.digest = wanted, _digests(pin.root, tokens, [wanted])[0]
        old = [each for each in begun if each.tokens <= wanted and each.until <= pin.until]
        added = self._add(client, pin, keys, keep.share, old)
        begun += [pin] if added else []
        return added

    def keep_session(self, client: bytes, session: str, keys: Collection[bytes], keep: Keep, priority: int) -> bool:
        """Pin K/V of a session, in place of its pins; returns whether all of it is pinned."""
        self.release(client, session)
        assert keep.share is not None
        pin = self._new(session, b"", keep.ttl_s, priority)
        return self._add(client, pin, keys, keep.share, ())

    def _renew(self, client: bytes, root: bytes, tokens: Tokens, session: str) -> list[Pin]:
        """Note the use of the pins that a prompt begins with, which are returned, and of that of its whole session."""
        pins, now = self._pins.get(client, []), self._clock()
        alike = [pin for pin in pins if pin.root == root and pin.tokens <= len(tokens)]
        lengths = sorted({pin.tokens for pin in alike})
        found = dict(zip(lengths, _digests(root, tokens, lengths), strict=True))
        begun = [pin for pin in alike if found[pin.tokens] == pin.digest]
        for pin in (*begun, *(pin for pin in pins if pin.session == session and not pin.tokens)):
            pin.used = now
        return begun

    def set_priority(self, client: bytes, session: str, priority: int) -> None:
        """Change which pins of a client give way first."""
        for pin in self.of(client, session):
            pin.priority = priority

    def release(self, client: bytes, session: str) -> None:
        """Let go of the pins of a session."""
        for pin in self.of(client, session):
            self._remove(client, pin)

    def expire(self) -> None:
        """Let go of the pins that have ended."""
        if (now := self._clock()) < self._next:
            return
        for client, pins in list(self._pins.items()):
            for pin in [pin for pin in pins if pin.until <= now]:
                self._remove(client, pin)
        self._next = min((pin.until for pins in self._pins.values() for pin in pins), default=math.inf)

    def _new(self, session: str, root: bytes, ttl_s: float | None, priority: int) -> Pin:
        return Pin(next(self._holders).to_bytes(8, "little"), session, root, ttl_s, priority, self._clock())

    def _add(
        self,
        client: bytes,
        pin: Pin,
        keys: Collection[bytes],
        share: float,
        replaced: Collection[Pin],
    ) -> bool:
        """Pin records. The client's other pins give way where all of them would exceed its share."""
        store = self._runner.store
        pins, limit = self._pins.setdefault(client, []), share * store.max_bytes
        if not store.pin(keys, pin.holder):
            return False
        lasting = [each for each in pins if each.priority < pin.priority and each not in replaced]
        if _bytes(store, [*lasting, pin]) > limit:
            store.let_go(pin.holder)
            return False
        pins.append(pin)
        for each in [each for each in pins if each in replaced]:
            self._remove(client, each)
        order = sorted((each for each in pins if each not in (*lasting, pin)), key=lambda each: each.used)
        order.sort(key=lambda each: -each.priority)
        while order and (_bytes(store, pins) > limit or len(pins) > _MOST_PINS):
            self._remove(client, order.pop(0))
        self._next = min(self._next, pin.until)
        return True

    def _remove(self, client: bytes, pin: Pin) -> None:
        pins = self._pins[client]
        pins.remove(pin)
        if not pins:
            del self._pins[client]
        self._runner.store.let_go(pin.holder)


def _name(client: bytes) -> str:
    """Names a client to those who know it."""
    return blake2b(client, digest_size=20, person=b"kvboost client").hexdigest()


def _key(text: object) -> bytes | None:
    return bytes.fromhex(text) if isinstance(text, str) and _ROOT.fullmatch(text) else None


def _decoded(text: object) -> bytes | None:
    """Token ids as they were told; None for what is none."""
    try:
        ids = b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        return None
    return ids if ids and len(ids) % 8 == 0 else None


def _keep(told: object) -> Keep | Literal[False] | None:
    match told:
        case {"ttl_s": int() | float() | None as ttl_s, "share": int() | float() as share} if 0 < share <= 1:
            return Keep(ttl_s=ttl_s, share=share)
    return False if told is False else None


def _bytes(store: ChunkStore, pins: Collection[Pin]) -> int:
    return store.pinned_bytes(pin.holder for pin in pins)


def _digests(root: bytes, tokens: Tokens, lengths: Collection[int]) -> list[bytes]:
    """Digests of a root and so many first tokens each; the lengths ascend."""
    found, running, start = [], blake2b(root, digest_size=20), 0
    for stop in lengths:
        running.update(tokens[start:stop].tobytes())
        found.append(running.copy().digest())
        start = stop
    return found
