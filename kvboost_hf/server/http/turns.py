"""`Turns`: runs a few pieces of work at once, and lets clients take turns."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio

from kvboost_hf.server.fair_share import FairShare
from kvboost_hf.server.protocol import QueueFullError

_RETRY_S = 1.0

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread. If cancelled, wait for the thread, so that its place is not free before."""
    running = asyncio.ensure_future(anyio.to_thread.run_sync(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.exception()  # nobody is told of it
        raise


@dataclass(slots=True, eq=False)
class _Turn:
    client: bytes
    long: bool
    started: asyncio.Future[None]


class Turns:
    """Gives out places, such as threads: a free one to the client that holds the fewest, to the first of several.

    A client has one long piece of work under way at most, and long ones leave a place to short ones.

    Args:
        places: How many there are; 2 at least.
        max_waiting: How many turns of one client may wait.
    """

    def __init__(self, places: int, max_waiting: int) -> None:
        self._places, self._max_waiting = places, max_waiting
        self._waiting: list[_Turn] = []  # in the order in which they came
        self._running: list[_Turn] = []
        self._held: FairShare[bytes] = FairShare(places)

    @asynccontextmanager
    async def turn(self, client: bytes, *, long: bool = False) -> AsyncIterator[None]:
        """Wait for a place, and hold it.

        Args:
            client: Who asks.
            long: Whether the work takes long.

        Raises:
            QueueFullError: too many of this client wait already.
        """
        waiting = sum(turn.client == client for turn in self._waiting)
        if waiting >= self._max_waiting:
            raise QueueFullError(
                f"{waiting} of your requests are waiting to be read, as many as may. Try again later.", _RETRY_S
            )
        turn = _Turn(client, long, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            self._start_next()
            await turn.started
            yield
        finally:  # also where the request was given up while it waited
            if turn in self._running:
                self._running.remove(turn)
                self._held.give_back(client)
            else:
                self._waiting.remove(turn)
            self._start_next()

    def _start_next(self) -> None:
        while len(self._running) < self._places and (able := [turn for turn in self._waiting if self._may(turn)]):
            turn = min(able, key=lambda each: self._held.held(each.client))
            self._waiting.remove(turn)
            self._running.append(turn)
            self._held.take(turn.client)
            if not turn.started.done():  # cancelled: it gives its place back at once
                turn.started.set_result(None)

    def _may(self, turn: _Turn) -> bool:
        long = [each.client for each in self._running if each.long]
        return not turn.long or (len(long) < self._places - 1 and turn.client not in long)
