"""The line of jobs that wait: pure Python, no tensors."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from kvboost_hf.ngrams import common_prefix

_LOOK = 16  # jobs from the front that may be taken out of turn
_PASSED = 8  # times that the first one may be passed over

Waiting = TypeVar("Waiting")


class WaitingLine(Generic[Waiting]):
    """First come, first served, but for those that begin like the one before them: they reuse what it computed.

    Args:
        ids: Of a job, the tokens of its prompt.
        salt: Of a job. One with another salt than the one before it shares nothing with it: else the order of answers
            would tell its owner how others' prompts begin.
    """

    def __init__(self, ids: Callable[[Waiting], Sequence[int]], salt: Callable[[Waiting], bytes]) -> None:
        self._ids, self._salt = ids, salt
        self._line: deque[Waiting] = deque()
        self._last: tuple[bytes, Sequence[int]] = b"", ()  # salt and prompt of the job that was taken last
        self._passed = 0  # times that the first one was passed over

    def __len__(self) -> int:
        return len(self._line)

    def append(self, waiting: Waiting) -> None:
        """Add a job."""
        self._line.append(waiting)

    def remove(self, waiting: Waiting) -> bool:
        """Take a job out of the line; returns whether it was in it."""
        for place, found in enumerate(self._line):
            if found is waiting:
                self._remove(place)
                return True
        return False

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._line)

    def take(self, fits: Callable[[Waiting], bool] = lambda waiting: True) -> Waiting | None:
        """The job to run next, of those that fit; None if there is none.

        It is the one that shares most with the one before it, the first of them if several do.
        """
        look = _LOOK if self._passed < _PASSED else 1
        places = [i for i in range(min(look, len(self._line))) if fits(self._line[i])]
        if not places:
            return None
        place = max(places, key=lambda i: (self._shared(self._line[i]), -i))
        taken = self._line[place]
        self._passed = self._passed + 1 if place else 0
        self._remove(place)
        self._last = self._salt(taken), self._ids(taken)
        return taken

    def _shared(self, waiting: Waiting) -> int:
        """How many tokens a job begins with as the one before it does."""
        salt, ids = self._last
        return common_prefix(self._ids(waiting), ids) if self._salt(waiting) == salt else 0

    def _remove(self, place: int) -> None:
        if place == 0:
            self._passed = 0
        del self._line[place]
