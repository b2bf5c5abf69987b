"""Clients take turns: pure Python, for one event loop."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Places for work, such as threads. A free one goes to the client that has the fewest; of several, to the first.

    Whoever asks for much waits for itself; others wait for one piece of work at most.

    Args:
        places: How much is done at the same time, at most.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._busy: Counter[bytes] = Counter()
        self._waiting: deque[tuple[bytes, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def turn(self, client: bytes) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        if self._free:
            self._take(client)
        else:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((client, place))
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():  # given, and wanted no more
                    self._give_back(client)
                raise
        try:
            yield
        finally:
            self._give_back(client)

    def _take(self, client: bytes) -> None:
        self._free -= 1
        self._busy[client] += 1

    def _give_back(self, client: bytes) -> None:
        self._free += 1
        self._busy[client] -= 1
        if not self._busy[client]:
            del self._busy[client]
        while self._waiting and self._free:
            chosen = min(self._waiting, key=lambda one: self._busy[one[0]])  # the first of them
            self._waiting.remove(chosen)
            if not chosen[1].done():
                self._take(chosen[0])
                chosen[1].set_result(None)
