"""How clients share what a server has: amounts within a bound, turns, and places in a cache.

Nothing here is safe to use from several threads at once: whoever shares it holds a lock.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio

from kvboost_hf.server.protocol import QueueFullError

Client = TypeVar("Client", bound=Hashable)
Value = TypeVar("Value")
T = TypeVar("T")

_RETRY_S = 1.0


def may_hold(own: float, more: float, free: float, share: float = 1.0) -> bool:
    """Whether a client may take more of something.

    A client with none may take what is free. One with some may take more as long as what is free stays the larger,
    by `(1 - share) / share`, the more it holds (the dynamic thresholds of shared buffers): a client alone gets its
    share of all, two with a share of 3/4 get 3/7 each, and 1/7 is left for others.

    Args:
        own: The amount that it holds.
        more: The amount that it asks for.
        free: The amount that is free after it has got that.
        share: The share of all that one client may hold alone, above 0 and at most 1.
    """
    return free >= 0 and (not own or (own + more) * (1 - share) <= free * share)


class FairShare(Generic[Client]):
    """Counts how much of something each client holds.

    Args:
        most: The bound of all clients together.
        share: The share of it that one client may hold alone.
    """

    def __init__(self, most: int, share: float = 1.0) -> None:
        self._most, self._share = most, share
        self._held: Counter[Client] = Counter()

    def held(self, client: Client | None = None) -> int:
        """The amount that a client holds, or all of them together."""
        return self._held.total() if client is None else self._held[client]

    def has_room(self, client: Client, more: int = 1) -> bool:
        """Whether a client may take more."""
        return may_hold(self._held[client], more, self._most - self._held.total() - more, self._share)

    def take(self, client: Client, more: int = 1) -> bool:
        """Take more for a client, if there is room; returns whether there is."""
        if not self.has_room(client, more):
            return False
        self.add(client, more)
        return True

    def add(self, client: Client, more: int = 1) -> None:
        """Note that a client holds more, whatever room there is, such as in place of what was given back."""
        self._held[client] += more

    def give_back(self, client: Client, less: int = 1) -> None:
        """Take less for a client."""
        self._held[client] -= less
        if not self._held[client]:
            del self._held[client]


class FairTurns(Generic[Client]):
    """Tells whose turn it is: that of the client that has had the least.

    A client that was away is not owed what it did not ask for: when it comes back, it counts as one that has had as
    much as the one of the others that has had the least.
    """

    def __init__(self) -> None:
        self._had: Counter[Client] = Counter()
        self._present: frozenset[Client] = frozenset()

    def order(self, present: Iterable[Client]) -> list[Client]:
        """All clients that want something now, each once: the one whose turn it is first.

        Those that have had as much stay in their order.
        """
        clients = list(dict.fromkeys(present))
        least = min((self._had[client] for client in clients if client in self._present), default=0)
        for client in clients:
            if client not in self._present:
                self._had[client] = max(self._had[client], least)
        self._present = frozenset(clients)
        return sorted(clients, key=self._had.__getitem__)

    def charge(self, client: Client, amount: int = 1) -> None:
        """Note that a client has had something."""
        self._had[client] += amount


class FairCache(Generic[Client, Value]):
    """Values of clients by key. Where there is no room, the client that has most loses what it used least recently.

    Args:
        most: The size of all values together; None for no bound.
        most_of_one: That of one client; None for no bound.
        size: The size of a value under its key; each counts as 1 without it.
    """

    def __init__(
        self,
        most: int | None = None,
        most_of_one: int | None = None,
        size: Callable[[Hashable, Value], int] = lambda key, value: 1,
    ) -> None:
        self._most, self._most_of_one, self._size = most, most_of_one, size
        self._values: dict[Client, OrderedDict[Hashable, Value]] = {}
        self._held: Counter[Client] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    def get(self, client: Client, key: Hashable) -> Value | None:
        """The value of a client under a key, which is used by that; None if there is none."""
        own = self._values.get(client)
        if own is None or key not in own:
            return None
        own.move_to_end(key)
        return own[key]

    def peek(self, client: Client, key: Hashable) -> Value | None:
        """The value of a client under a key, which is not used by that; None if there is none."""
        own = self._values.get(client)
        return own.get(key) if own is not None else None

    def put(self, client: Client, key: Hashable, value: Value) -> None:
        """Keep a value, in place of one under the same key."""
        self.pop(client, key)
        self._values.setdefault(client, OrderedDict())[key] = value
        self._held[client] += self._size(key, value)
        while self._most_of_one is not None and self._held[client] > self._most_of_one:
            self._evict(client)
        while self._most is not None and self._held.total() > self._most:
            self._evict(max(self._held, key=self._held.__getitem__))

    def pop(self, client: Client, key: Hashable) -> Value | None:
        """Take a value out; None if there is none."""
        own = self._values.get(client)
        if own is None or key not in own:
            return None
        value = own.pop(key)
        self._held[client] -= self._size(key, value)
        if not own:
            del self._values[client], self._held[client]
        return value

    def of(self, client: Client) -> Iterator[Value]:
        """The values of a client, the one used last at the end."""
        own = self._values.get(client)
        return iter(own.values() if own is not None else ())

    def __iter__(self) -> Iterator[Value]:
        return (value for own in self._values.values() for value in own.values())

    def _evict(self, client: Client) -> None:
        self.pop(client, next(iter(self._values[client])))


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
        """Wait for a place, and hold it; `QueueFullError` where too many of this client wait already."""
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

    async def run(self, client: bytes, work: Callable[[], T], *, long: bool = False) -> T:
        """Run `work` in a thread when it is the client's turn; see `turn`."""
        async with self.turn(client, long=long):
            return await in_thread(work)

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
