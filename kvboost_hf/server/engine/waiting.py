"""`WaitingLine`: the queue of jobs, in which clients take turns. Pure Python, no tensors."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from kvboost_hf.ngrams import common_prefix
from kvboost_hf.server.jobs import Job

_LOOK = 16  # jobs from the front that may be taken out of turn
_PASSED = 8  # times that the first one may be passed over

Waiting = TypeVar("Waiting")


class WaitingLine(Generic[Waiting]):
    """A queue for each client, first in, first out, except for prompts that share a prefix; clients take turns.

    The next job is of the client that has had the fewest tokens, of prompts and answers at their longest. Of that
    client's jobs, those with the smallest `Job.priority` come first, and of these, one that begins like its last one:
    it reuses what that computed. The order depends on how much clients ask, and on nothing that the prompts of other
    salts say; priorities do not count between clients.

    Args:
        job: Of what waits.
    """

    def __init__(self, job: Callable[[Waiting], Job]) -> None:
        self._job = job
        self._lines: dict[bytes, _Line[Waiting]] = {}  # by client

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
        client = self._job(waiting).client
        line = self._lines.setdefault(client, _Line(self._job))
        if not line.waiting:  # what it did not ask for while it was away is not owed to it
            others = [other.had for other in self._lines.values() if other.waiting]
            line.had = max(line.had, min(others, default=line.had))
        line.append(waiting)

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
        for line in sorted(self._lines.values(), key=lambda line: line.had):
            if (taken := line.take(fits, is_held)) is not None:
                line.had += self._job(taken).longest
                return taken
        return None


@dataclass(slots=True, eq=False)
class _Line(Generic[Waiting]):
    """The queue of one client."""

    job: Callable[[Waiting], Job]
    waiting: deque[Waiting] = field(default_factory=deque)
    had: int = 0  # tokens
    last: tuple[bytes, Sequence[int]] = b"", ()  # salt and prompt of the job that was taken last
    passed: int = 0  # times that the first one was passed over

    def append(self, waiting: Waiting) -> None:
        """Add a job behind those of its priority."""
        place = bisect_right(self.waiting, self.job(waiting).priority, key=lambda each: self.job(each).priority)
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
        place = max(places, key=lambda i: (self._shared(self.waiting[i]), -i))
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
