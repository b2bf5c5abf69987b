"""`Intake`: takes jobs from any thread, and hands them to the engine's thread when there is room for them.

Jobs wait in a `WaitingLine`, in which clients take turns. `EngineLimits` says how many jobs and tokens there is room
for, and which running job gives way to a long answer.
"""

import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from kvboost_hf.fields import check_bounds, same, setting
from kvboost_hf.ngrams import common_prefix
from kvboost_hf.server.engine.embedding import EmbeddingJob, EmbeddingTurns
from kvboost_hf.server.engine.task import Task
from kvboost_hf.server.fair_share import FairTurns, may_hold
from kvboost_hf.server.jobs import FIRST_TOKENS, FinishReason, Job
from kvboost_hf.server.protocol import DrainingError, QueueFullError, TooLongError
from kvboost_hf.server.settings import ServerSettings

T = TypeVar("T")
Claimed = TypeVar("Claimed", bound="Claim")
_LOOK = 16  # jobs from the front that may be taken out of turn
_PASSED = 8  # times that the first one may be passed over
Waiting = TypeVar("Waiting")


class Claim(Protocol):
    """A job that takes memory, or is about to."""

    @property
    def client(self) -> bytes: ...

    @property
    def reserved(self) -> int: ...  # tokens of prompt and answer that memory is kept for


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of a `ModelEngine`.

    Args:
        max_batch_size, max_queue_size, prefill_chunk_size, batch_window_ms, max_model_len: As `ServerSettings` has
            them, of jobs.
        max_live_tokens: Tokens of all running jobs; None for no limit. Of an answer, `FIRST_TOKENS` count from its
            start, and more when it gets longer. Where there is no room for more, a job is set aside until there is.
        max_client_share: The share of `max_queue_size` and of `max_live_tokens` that one client may take alone, as
            `may_hold` has it.
    """

    max_batch_size: int = same(ServerSettings, "max_batch_size")
    max_queue_size: int = same(ServerSettings, "max_queue_size")
    prefill_chunk_size: int = same(ServerSettings, "prefill_chunk_size")
    batch_window_ms: float = same(ServerSettings, "batch_window_ms")
    max_model_len: int | None = same(ServerSettings, "max_model_len")
    max_live_tokens: int | None = same(ServerSettings, "max_live_tokens")
    max_client_share: float = setting(1.0, above=0, most=1)

    def __post_init__(self) -> None:
        check_bounds(self)

    def require_fit(self, job: Job, context: int) -> None:
        """Raise `TooLongError` for a job that fits neither into `context` tokens nor into `max_live_tokens`."""
        prompt, new = len(job.ids), job.options.max_tokens
        if not prompt:
            raise ValueError("The prompt must have at least one token, got none.")
        for limit, what in ((context, "the context window"), (self.max_live_tokens, "the memory of this server")):
            if limit is not None and job.longest > limit:
                most = max(limit - new, 0)
                raise TooLongError(
                    f"A prompt of {prompt} tokens with {new} new ones takes {job.longest}, which exceeds {what} of "
                    f"{limit}. Shorten it to {most} tokens, or ask for fewer new ones.",
                    most,
                    tokens=prompt,
                    limit=limit,
                )

    def has_room(self, job: Claim, running: Collection[Claim]) -> bool:
        """Whether a job may start beside the running ones. A client without a running job may exceed the batch."""
        own = [other.reserved for other in running if other.client == job.client]
        if len(running) >= (self.max_batch_size if own else 2 * self.max_batch_size):
            return False
        if self.max_live_tokens is None:
            return True
        free = self.max_live_tokens - sum(other.reserved for other in running) - job.reserved
        return may_hold(sum(own), job.reserved, free, self.max_client_share)

    def in_the_way(self, job: Claimed, more: int, running: Sequence[Claimed]) -> Claimed | None:
        """Which of the running jobs has to wait so that one of them may take more memory; None where there is room.

        It is the last one of the same client; where that has no other one, the last one of the client that has most.
        The first of all goes on, so that all of them end. `running` is in the order in which they were admitted.
        """
        if self.max_live_tokens is None or len(running) < 2:
            return None
        held = Counter[bytes]()
        for other in running:
            held[other.client] += other.reserved
        alone = sum(other.client == job.client for other in running) == 1
        free = self.max_live_tokens - held.total() - more
        if may_hold(0 if alone else held[job.client], more, free, self.max_client_share):
            return None
        client = held.most_common(1)[0][0] if alone else job.client
        return next((other for other in reversed(running[1:]) if other.client == client), running[-1])


class Intake:
    """The tasks that wait and those that were admitted, the requests for embeddings, and calls of other threads.

    Methods say which thread may call them; `changed` is held while anything here changes.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.changed = threading.Condition()
        self.embeddings: list[EmbeddingJob] = []
        self.admitted: list[Task] = []  # and not ended, in the order in which they were admitted
        self.finished: Counter[str] = Counter()  # ended tasks, by reason
        self.draining = False
        self._limits = limits
        self._embedding_turns = EmbeddingTurns()
        self._waiting: WaitingLine[Task] = WaitingLine(lambda task: task.job)
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._given_up = self._closed = False
        self._seconds_per_job = 0.0  # smoothed

    @property
    def waiting(self) -> int:
        """Tasks that were not admitted yet."""
        return len(self._waiting)

    # Called by any thread

    def submit(self, task: Task) -> None:
        """Queue a task, or raise `QueueFullError` or `DrainingError`."""
        with self.changed:
            # What waits for the thread to look takes the places in the batch first.
            free = max(self._limits.max_batch_size - len(self.admitted), 0)
            self._require_place(self._waiting.of(task.job.client), len(self._waiting), task.job.places, free)
            self._waiting.append(task)
            self.changed.notify_all()

    def submit_embeddings(self, job: EmbeddingJob) -> None:
        """Queue texts to embed, or raise `QueueFullError` or `DrainingError`."""
        with self.changed:
            clients = [other.client for other in self.embeddings if not other.future.cancelled()]
            self._require_place(clients.count(job.client), len(clients))
            self.embeddings.append(job)
            self.changed.notify_all()

    def call(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do something between two steps, and wait; `DrainingError` once it has ended."""
        done: Future[Any] = Future()
        with self.changed:
            if self._closed:
                raise DrainingError("The server has ended.")
            self._calls.append((work, done))
            self.changed.notify_all()
        found: T = done.result()
        return found

    def drain(self, timeout_s: float) -> bool:
        """Take no more jobs and wait for those that were taken; returns whether all of them ended in time."""
        with self.changed:
            self.draining = True
            ended = self.changed.wait_for(lambda: not self._count(), timeout_s)
            self._given_up = self._given_up or not ended
            return ended

    def close(self) -> None:
        """Take no more jobs, and have `wait` return False."""
        with self.changed:
            self.draining = self._closed = True
            self.changed.notify_all()

    # Called by the engine's thread

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is work, or until a time is over; returns False once the intake is closed."""
        with self.changed:
            idle, window_s = not self._count(), self._limits.batch_window_ms / 1000
            self.changed.wait_for(lambda: self._closed or self._count(), timeout_s)
            if idle and window_s and self._count():
                self.changed.wait_for(lambda: self._closed or self._count() >= self._limits.max_batch_size, window_s)
            return not self._closed

    def admit(self) -> list[Task]:
        """The tasks that were admitted now."""
        with self.changed:
            known = len(self.admitted)
            while (task := self._next()) is not None:
                self.admitted.append(task)
            return self.admitted[known:]

    def set_aside(self, task: Task) -> None:
        """Have an admitted task wait again, before all of its client and priority."""
        with self.changed:
            self.admitted.remove(task)
            self._waiting.put_back(task)

    @property
    def begun(self) -> list[Task]:
        """The tasks that were admitted and have not ended, with those that were set aside."""
        with self.changed:
            return [*self.admitted, *(task for task in self._waiting if task.session is not None)]

    def answer_calls(self) -> None:
        """Do what other threads have called for."""
        while self._calls:
            work, done = self._calls.popleft()
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
        with self.changed:
            self.changed.notify_all()  # a drain may wait for this

    def take_ended(self, now: float) -> list[Task]:
        """Remove the waiting tasks that were cancelled or have timed out; after a drain without end, cancel all."""
        with self.changed:
            if self._given_up:
                for task in (*self._waiting, *self.admitted):
                    task.cancel()
                self.fail_embeddings(DrainingError("The server is about to end, and gave the request up."))
            ended = [task for task in self._waiting if task.must_end(now) is not None]
            for task in ended:
                self._waiting.remove(task)
            return ended

    def take_waiting(self) -> list[Task]:
        """Remove all waiting tasks."""
        with self.changed:
            tasks = list(self._waiting)
            for task in tasks:
                self._waiting.remove(task)
            return tasks

    def next_embedding(self, piece: int | None) -> EmbeddingJob | None:
        """The request for embeddings whose turn it is, for a piece of so many tokens; drops those given up."""
        with self.changed:
            self.embeddings = [job for job in self.embeddings if not job.future.cancelled()]
            self.changed.notify_all()
            return self._embedding_turns.next(self.embeddings, piece) if self.embeddings else None

    def embedded(self, job: EmbeddingJob) -> None:
        """Remove a request for embeddings that has ended."""
        with self.changed:
            self.embeddings.remove(job)
            self.changed.notify_all()

    def fail_embeddings(self, error: Exception) -> None:
        """End all requests for embeddings."""
        with self.changed:
            while self.embeddings:
                self.embeddings.pop().fail(error)
            self.changed.notify_all()

    def unseen(self, most: int) -> list[Task]:
        """Up to `most` waiting tasks with long prompts of which nobody has looked up what is known.

        What is known of the others holds nothing of a store that has changed.
        """
        with self.changed:
            for task in self._waiting:
                if task.known is not None:
                    task.known.let_go()
            return list(islice((task for task in self._waiting if task.known is None and self._is_long(task)), most))

    def end(self, task: Task, reason: FinishReason, error: str | None = None) -> None:
        """Count the end of a task, make room for others, and tell the task's listener."""
        now = time.perf_counter()
        with self.changed:
            if task in self.admitted:
                self.admitted.remove(task)
                self._waiting.charge(task.client, max(len(task.ids) - FIRST_TOKENS, 0))
            self.finished[reason] += 1
            self._seconds_per_job = 0.8 * self._seconds_per_job + 0.2 * (now - (task.started or now))
            self.changed.notify_all()
        task.finish(reason, error, now)

    def _count(self) -> int:
        return len(self._waiting) + len(self.admitted) + len(self.embeddings) + len(self._calls)

    def _next(self) -> Task | None:
        """The next task that has room; clients that have no running job come first.

        A client has one long prompt at a time computed. More of them would take the places and the memory that its
        short ones can use meanwhile, and would be no sooner done.
        """
        busy = {task.job.client for task in self.admitted}
        found = self._waiting.take(lambda task: task.job.client not in busy and self._has_room(task))
        if found is None and self._waiting.clients <= busy:
            computing = {task.job.client for task in self.admitted if self._is_long(task)}
            found = self._waiting.take(
                self._has_room, lambda task: task.job.client in computing and self._is_long(task)
            )
        return found

    def _is_long(self, task: Task) -> bool:
        return task.left > self._limits.prefill_chunk_size

    def _has_room(self, task: Task) -> bool:
        return self._limits.has_room(task, self.admitted)

    def _require_place(self, own: int, waiting: int, places: int = 1, unused: int = 0) -> None:
        """Raise where a client with `own` waiting requests may not queue so many more beside all that wait.

        `unused` places to run count beside those to wait. Where none waits, the answers of one request may be more
        than may wait: it would be refused for ever.
        """
        if self.draining:
            raise DrainingError("The server is about to end and takes no more requests.")
        limits = self._limits
        most = limits.max_queue_size + unused
        free = most - waiting - places
        if not (waiting and places) or may_hold(own, places, free, limits.max_client_share):
            return
        if free < 0:
            raise QueueFullError(
                f"{waiting} requests are waiting, and {most} may: there is no place for {places} "
                "more. Try again later.",
                self._retry_after_s(waiting),
            )
        raise QueueFullError(
            f"{own} of your requests are waiting, as many as may be of one client. Try again later.",
            self._retry_after_s(own),
        )

    def _retry_after_s(self, waiting: int) -> float:
        return max(1.0, self._seconds_per_job * waiting / self._limits.max_batch_size)


class WaitingLine(Generic[Waiting]):
    """A queue for each client, first in, first out, except for prompts that share a prefix; clients take turns.

    The next job is of the client that has had the fewest tokens, of prompts and answers, which count as
    `Job.reserved` has them from their start, and later as long as they are. Of that client's jobs, those with the
    smallest `Job.priority` come first, and of these, one that begins like its last one: it reuses what that computed.
    The order depends on how much clients ask, and on nothing that the prompts of other salts say; priorities do not
    count between clients.
    """

    def __init__(self, job: Callable[[Waiting], Job]) -> None:
        self._job = job
        self._lines: dict[bytes, _Line[Waiting]] = {}  # by client
        self._turns: FairTurns[bytes] = FairTurns()

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def __iter__(self) -> Iterator[Waiting]:
        return (waiting for line in self._lines.values() for waiting in line.waiting)

    @property
    def clients(self) -> set[bytes]:
        """The clients with waiting jobs."""
        return {client for client, line in self._lines.items() if line.waiting}

    def of(self, client: bytes) -> int:
        """How many jobs of one client wait."""
        return len(self._lines[client].waiting) if client in self._lines else 0

    def append(self, waiting: Waiting) -> None:
        """Add a job."""
        self._lines.setdefault(self._job(waiting).client, _Line(self._job)).insert(waiting, bisect_right)

    def put_back(self, waiting: Waiting) -> None:
        """Add a job that was taken before, in front of the others of its priority."""
        self._lines[self._job(waiting).client].insert(waiting, bisect_left)

    def charge(self, client: bytes, tokens: int) -> None:
        """Note that a client whose jobs were taken has had more tokens than these had reserved."""
        self._turns.charge(client, tokens)

    def remove(self, waiting: Waiting) -> bool:
        """Take a job out of the line; returns whether it was in it."""
        line = self._lines.get(self._job(waiting).client)
        return line is not None and line.remove(waiting)

    def take(
        self,
        fits: Callable[[Waiting], bool] = lambda waiting: True,
        is_held: Callable[[Waiting], bool] = lambda waiting: False,
    ) -> Waiting | None:
        """The job to run next; None if there is none.

        Args:
            fits: Whether there is room for a job. Others may pass the first one that does not fit, but not for ever.
            is_held: Whether a job waits for another one of its client. Any number of jobs may pass it meanwhile.
        """
        for client in self._turns.order(client for client, line in self._lines.items() if line.waiting):
            if (taken := self._lines[client].take(fits, is_held)) is not None:
                self._turns.charge(client, self._job(taken).reserved)
                return taken
        return None


@dataclass(slots=True, eq=False)
class _Line(Generic[Waiting]):
    """The queue of one client."""

    job: Callable[[Waiting], Job]
    waiting: deque[Waiting] = field(default_factory=deque)
    last: tuple[bytes, Sequence[int]] = b"", ()  # salt and prompt of the job that was taken last
    passed: int = 0  # times that the first one was passed over

    def insert(self, waiting: Waiting, place_of: Callable[..., int]) -> None:
        """Add a job behind those of its priority with `bisect_right`, before them with `bisect_left`."""
        place = place_of(self.waiting, self.job(waiting).priority, key=lambda each: self.job(each).priority)
        self.waiting.insert(place, waiting)

    def take(self, fits: Callable[[Waiting], bool], is_held: Callable[[Waiting], bool]) -> Waiting | None:
        """Of those that fit and have the smallest priority, the one that shares most with the one before it."""
        look = _LOOK if self.passed < _PASSED else 1
        able = list(islice((i for i, waiting in enumerate(self.waiting) if not is_held(waiting)), look))
        places = [i for i in able if fits(self.waiting[i])]
        if not places:
            return None
        first = self.job(self.waiting[places[0]]).priority
        places = [i for i in places if self.job(self.waiting[i]).priority == first]
        place = max(places, key=lambda i: (self._shared(self.waiting[i]), -i)) if len(places) > 1 else places[0]
        taken = self.waiting[place]
        self.passed += place > able[0]
        self._remove(place)
        self.last = self.job(taken).salt, self.job(taken).ids
        return taken

    def remove(self, waiting: Waiting) -> bool:
        """Take a job out; returns whether it was there."""
        for place, found in enumerate(self.waiting):
            if found is waiting:
                self._remove(place)
                return True
        return False

    def _shared(self, waiting: Waiting) -> int:
        """How many tokens a job begins with as the one before it does; none if its salt is another."""
        job, (salt, ids) = self.job(waiting), self.last
        return common_prefix(job.ids, ids) if job.salt == salt else 0

    def _remove(self, place: int) -> None:
        if place == 0:
            self.passed = 0
        del self.waiting[place]
