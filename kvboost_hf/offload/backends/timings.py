"""Measures times on a device without waiting for it."""

from collections import deque

from kvboost_hf import forks
from kvboost_hf.offload.backends.runtime import Event


class Timings:
    """Sums the time between pairs of events once they have happened. Any thread may read it."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._seconds, self._nbytes = 0.0, 0
        self._pending: deque[tuple[Event, Event, int]] = deque()

    def add(self, before: Event, after: Event, nbytes: int = 0) -> None:
        """Two events of one stream, and the bytes that were copied between them."""
        self._pending.append((before, after, nbytes))
        self.totals()  # else they would pile up

    def totals(self) -> tuple[float, int]:
        """Seconds and bytes of the pairs that have happened."""
        with self._lock:
            while self._pending and self._pending[0][1].query():
                before, after, nbytes = self._pending.popleft()
                self._seconds += before.elapsed_time(after) / 1000
                self._nbytes += nbytes
            return self._seconds, self._nbytes
