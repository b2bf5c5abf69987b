"""`SessionTable`: the sessions that an engine knows, and what of them is kept."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvboost_hf.cache.store.removal import Belongings, Heads
from kvboost_hf.server.engine.model_runner import ModelRunner
from kvboost_hf.server.engine.pins import Pins
from kvboost_hf.server.engine.session_record import SessionRecord, session_id
from kvboost_hf.server.engine.task import Task
from kvboost_hf.server.jobs import Session, SessionChange

_MOST = 2048  # sessions of all clients


class SessionTable:
    """Sessions of all clients, within a bound: the client with the most forgets the one that it used least recently.

    For the engine's thread alone.

    Args:
        runner: Has the store.
        clock: Seconds since 1970.

    Attributes:
        pins: What is pinned.
    """

    def __init__(self, runner: ModelRunner, clock: Callable[[], float] = time.time) -> None:
        self.pins = Pins(clock)
        self._runner, self._clock = runner, clock
        self._sessions: dict[bytes, OrderedDict[str, SessionRecord]] = {}  # by client and id, the newest last

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))

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
        pinned = self.pins.keep(self._runner.store, task.job, keeps, cache, session.id, priority)
        task.pinned = pinned if task.job.keep else None

    def end(self, task: Task) -> None:
        """A task has ended; what its cache holds is stored."""
        if task.session is not None and task.report is not None:
            task.session.tokens = len(task.job.ids) + len(task.ids)
            self._note(task)

    def _use(self, task: Task) -> SessionRecord:
        job, now = task.job, self._clock()
        own, id = self._sessions.setdefault(job.client, OrderedDict()), session_id(job, self._runner.store.chunker)
        if id not in own:
            own[id] = SessionRecord(id, job.client, job.session is not None, now, now)
            if len(self) > _MOST:
                max(self._sessions.values(), key=len).popitem(last=False)
        own.move_to_end(id)
        own[id].last_used = now
        return own[id]

    def _note(self, task: Task) -> None:
        cache = task.cache
        if task.session is not None and cache is not None and cache.root is not None:
            task.session.note_text(cache.root, task.job.ids, self._runner.store.chunker, cache.content_keys)

    # What clients ask

    def of(self, client: bytes | None, id: str | None) -> list[SessionRecord]:
        """Sessions of a client, or of all; one of them, or all. Those used last come first."""
        found = [each for each in self._all() if client in (None, each.client) and id in (None, each.id)]
        return sorted(found, key=lambda each: -each.last_used)

    def change(self, client: bytes, id: str, change: SessionChange) -> SessionRecord | None:
        """Change what is kept of a session; None if there is none."""
        session = self._find(client, id)
        if session is None:
            return None
        store = self._runner.store
        if change.priority is not None:
            session.priority = change.priority
            self.pins.set_priority(client, id, change.priority)
        if change.keep is False:
            session.keep = None
            self.pins.release(store, client, id)
        elif change.keep is not None:
            session.keep = change.keep
            own, heads = session.belongings, self.heads(client)
            keys = own.keys(store.held(own.under(heads)), heads, lost=False)
            self.pins.keep_session(store, client, id, keys, change.keep, session.priority or 0)
        return session

    def drop(self, client: bytes, id: str, salt: bytes, tasks: Sequence[Task]) -> tuple[Belongings, Heads]:
        """Forget a session; what its tasks under way hold is not stored.

        Returns:
            What is to be removed, and how the prompts of the client begin.
        """
        session, root, heads = self._find(client, id), self._runner.root_of(salt), self.heads(client)
        roots = frozenset([root] if root is not None else ())
        if session is None:
            return Belongings(id, roots), heads
        del self._sessions[client][id]
        self.pins.release(self._runner.store, client, id)
        for task in tasks:
            if task.session is session and task.cache is not None:
                self._runner.keep_nothing(task.cache)
        own = session.belongings
        return replace(own, roots=own.roots | roots), heads

    def heads(self, client: bytes | None) -> Heads:
        """How the prompts of a client begin, or those of all."""
        heads = Heads()
        for session in self._all():
            if client in (None, session.client):
                session.add_to(heads)
        return heads

    def figures(self, session: SessionRecord, nbytes: int) -> Session:
        """The figures of a session, for its client."""
        pins = self.pins.of(session.client, session.id)
        ends = [pin.until for pin in pins]
        until = max(ends, default=None)
        return Session(
            id=session.id,
            client=session.client,
            first_seen=session.first_seen,
            last_used=session.last_used,
            requests=session.requests,
            tokens=session.tokens,
            prompt_tokens=session.prompt_tokens,
            cached_tokens=session.cached_tokens,
            nbytes=nbytes,
            priority=session.priority or 0,
            ttl_s=session.keep.ttl_s if session.keep is not None else None,
            pinned=bool(pins),
            pinned_until=until if until is not None and until < float("inf") else None,
        )

    def _find(self, client: bytes, id: str) -> SessionRecord | None:
        return self._sessions[client].get(id) if client in self._sessions else None

    def _all(self) -> Iterator[SessionRecord]:
        for own in self._sessions.values():
            yield from own.values()
