"""`Intake`: takes jobs from any thread, and hands them to the engine's thread when there is room for them."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from typing import TypeVar

from kvboost_hf.server.engine.embedding import EmbeddingJob, EmbeddingTurns
from kvboost_hf.server.engine.limits import EngineLimits
from kvboost_hf.server.engine.task import Task
from kvboost_hf.server.engine.waiting import WaitingLine
from kvboost_hf.server.jobs import DrainingError, FinishReason, QueueFullError

T = TypeVar("T")


class Intake:
    """The tasks that wait and those that were admitted, the requests for embeddings, and calls of other threads.

    Methods say which thread may call them; `changed` is held while anything here changes.

    Args:
        limits: How many jobs may wait, and how many may run at the same time.
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
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._given_up = self._closed = False
        self._seconds_per_job = 0.0  # smoothed

    @property
    def waiting(self) -> int:
        """Tasks that were not admitted yet."""
        return len(self._waiting)

    # Called by any thread

    def submit(self, task: Task) -> None:
        """Queue a task.

        Raises:
            QueueFullError: As many tasks wait as may, of all clients or of this one.
            DrainingError: No more jobs are taken.
        """
        with self.changed:
            self._require_place(self._waiting.of(task.job.client), len(self._waiting))
            self._waiting.append(task)
            self.changed.notify_all()

    def submit_embeddings(self, job: EmbeddingJob) -> None:
        """Queue texts to embed.

        Raises:
            QueueFullError: As many requests for embeddings wait as may.
            DrainingError: No more jobs are taken.
        """
        with self.changed:
            clients = [other.client for other in self.embeddings if not other.future.cancelled()]
            self._require_place(clients.count(job.client), len(clients))
            self.embeddings.append(job)
            self.changed.notify_all()

    def call(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do something between two steps, and wait for it.

        Raises:
            DrainingError: The engine has ended.
        """
        found: list[T] = []
        done: Future[None] = Future()
        with self.changed:
            if self._closed:
                raise DrainingError("The server has ended.")
            self._calls.append((lambda: found.append(work()), done))
            self.changed.notify_all()
        done.result()
        return found[0]

    def drain(self, timeout_s: float) -> bool:
        """Take no more jobs and wait for those that were taken; returns whether all of them ended in time."""
        with self.changed:
            self.draining = True
            ended = self.changed.wait_for(lambda: not self._count(), timeout_s)
            self._given_up = self._given_up or not ended
            return ended

    def close(self) -> None:
        """Take no more jobs, and have `admit` return None."""
        with self.changed:
            self.draining = self._closed = True
            self.changed.notify_all()

    # Called by the engine's thread

    def wait(self) -> bool:
        """Wait until there is work; returns False once the intake is closed."""
        with self.changed:
            idle, window_s = not self._count(), self._limits.batch_window_ms / 1000
            self.changed.wait_for(lambda: self._closed or self._count())
            if idle and window_s:
                self.changed.wait_for(lambda: self._closed or self._count() >= self._limits.max_batch_size, window_s)
            return not self._closed

    def admit(self) -> list[Task]:
        """The tasks that were admitted now."""
        with self.changed:
            known = len(self.admitted)
            while (task := self._next()) is not None:
                self.admitted.append(task)
            return self.admitted[known:]

    def answer_calls(self) -> None:
        """Do what other threads have called for."""
        while self._calls:
            work, done = self._calls.popleft()
            try:
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        with self.changed:
            self.changed.notify_all()  # a drain may wait for this

    def take_ended(self, now: float) -> list[Task]:
        """Remove the waiting tasks that were cancelled or have timed out; after a drain without end, cancel all."""
        with self.changed:
            if self._given_up:
                for task in (*self._waiting, *self.admitted):
                    task.cancel()
                while self.embeddings:
                    self.embeddings.pop().fail(DrainingError("The server is about to end, and gave the request up."))
                self.changed.notify_all()
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

    def unseen(self, most: int) -> list[Task]:
        """Up to `most` waiting tasks with long prompts of which nobody has looked up what is known."""
        with self.changed:
            return list(islice((task for task in self._waiting if task.known is None and self._is_long(task)), most))

    def end(self, task: Task, reason: FinishReason, error: str | None = None) -> None:
        """Count the end of a task, make room for others, and tell the task's listener."""
        now = time.perf_counter()
        with self.changed:
            if task in self.admitted:
                self.admitted.remove(task)
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
        return self._limits.has_room(task.job, [other.job for other in self.admitted])

    def _require_place(self, own: int, waiting: int) -> None:
        """Raise where a client with `own` waiting requests may not queue one more beside all that wait."""
        if self.draining:
            raise DrainingError("The server is about to end and takes no more requests.")
        if self._limits.has_place(own, waiting):
            return
        if waiting >= self._limits.max_queue_size:
            raise QueueFullError(
                f"{waiting} requests are waiting, as many as may. Try again later.", self._retry_after_s(waiting)
            )
        raise QueueFullError(
            f"{own} of your requests are waiting, as many as may be of one client. Try again later.",
            self._retry_after_s(own),
        )

    def _retry_after_s(self, waiting: int) -> float:
        return max(1.0, self._seconds_per_job * waiting / self._limits.max_batch_size)
