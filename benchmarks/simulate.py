"""Many replicas on paper: what share of prompts they find in their stores, by room, by number and by routing.

    python benchmarks/simulate.py --out benchmarks/results

A trace of requests is replayed through the library's own chunk keys, eviction order, device tier, router and holdings;
chunks have a size, and no tensors. Tenants, system prompts, documents and chats are asked for by Zipf's law, each
tenant with a salt of his own. Requests run for a random time, so that some replicas have more to do than others. Disk
and remote tiers give up what was not used for longest. All follows from the seed. `tests/unit/test_simulate.py`
compares it with a store that has a model and a disk.
"""

import argparse
import heapq
import json
import random
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from record import write
from reuse import Result, measured_on, provenance

from kvboost_hf.cache.planning.chunks import prefix_key, root_key
from kvboost_hf.cache.planning.eviction import EvictionOrder
from kvboost_hf.cache.planning.plan import Border
from kvboost_hf.cache.store.memory import DeviceMemory
from kvboost_hf.server.engine.holdings import Holdings
from kvboost_hf.server.routing import BELOW, GONE, MEMORY, PrefixRouter

CHUNK = 128  # tokens
UNDER_WAY = 8  # requests of each replica, on average
LOAD_FACTOR = 1.25
ROUTINGS = ("round-robin", "least-loaded", "prefix", "events")
TIERS = ("device", "ram", "disk", "remote")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt: the chunks of it that are whole, and what is behind them."""

    chunks: tuple[int, ...]
    rest: int  # tokens
    time: float  # that it runs for, 1 on average


@dataclass(slots=True)
class Trace:
    """Requests in the order in which they come, and the keys of all chunks by number."""

    requests: list[Request]
    keys: list[bytes]
    parents: list[int]  # -1 for none


@dataclass(slots=True)
class Chat:
    chunks: tuple[int, ...]
    turns: int  # that are still to come


class _Writer:
    """Makes up a trace."""

    def __init__(self, seed: int, tenants: int, chats: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.trace = Trace([], [], [])
        self.roots = [root_key(b"model", str(tenant).encode()) for tenant in range(tenants)]
        self.tenants = self.zipf(tenants, 0.9)
        self.documents = self.zipf(200, 0.9)
        self.system = [self.text(-1, int(self.rng.integers(2, 9)), root) for root in self.roots]
        self.known: dict[tuple[int, int], tuple[int, ...]] = {}
        self.chats = [Chat((), 0) for _ in range(chats)]

    def zipf(self, n: int, exponent: float) -> Callable[[], int]:
        """Draws from 0 to n - 1, where the k-th is asked for k**exponent times less often than the first."""
        shares = np.cumsum(1 / np.arange(1, n + 1) ** exponent)
        return lambda: int(np.searchsorted(shares, self.rng.random() * shares[-1], side="right"))

    def text(self, parent: int, chunks: int, root: bytes = b"") -> tuple[int, ...]:
        """New chunks behind a chunk, or behind a root."""
        found = []
        for tokens in self.rng.integers(0, 50_000, (chunks, CHUNK)):
            key = prefix_key(self.trace.keys[parent] if parent >= 0 else root, tokens)
            self.trace.keys.append(key)
            self.trace.parents.append(parent)
            parent = len(self.trace.keys) - 1
            found.append(parent)
        return tuple(found)

    def ask(self) -> tuple[int, ...]:
        """The chunks of one more request."""
        if self.rng.random() < 0.6:
            return self.turn(self.chats[int(self.rng.integers(len(self.chats)))])
        tenant = self.tenants()
        place = tenant, self.documents()
        if place not in self.known:
            self.known[place] = self.system[tenant] + self.text(self.system[tenant][-1], int(self.rng.integers(4, 25)))
        return self.known[place]

    def turn(self, chat: Chat) -> tuple[int, ...]:
        """A chat goes on, and where it has ended, another begins in its place."""
        if chat.turns:
            chat.chunks += self.text(chat.chunks[-1], int(self.rng.integers(1, 4)))
            chat.turns -= 1
        else:
            chat.chunks = self.system[self.tenants()]
            chat.turns = int(self.rng.geometric(1 / 8))
        return chat.chunks


def make_trace(requests: int, *, seed: int = 0, tenants: int = 200, chats: int = 1000) -> Trace:
    """Make a trace up.

    Args:
        requests: How many.
        seed: What all draws follow from.
        tenants: With a salt and a system prompt each.
        chats: That are under way at once.
    """
    writer = _Writer(seed, tenants, chats)
    rests = writer.rng.integers(1, CHUNK, requests).tolist()
    times = writer.rng.exponential(1.0, requests).tolist()
    for rest, runs in zip(rests, times, strict=True):
        writer.trace.requests.append(Request(writer.ask(), rest, runs))
    return writer.trace


@dataclass(frozen=True, slots=True)
class Room:
    """Of each tier, in chunks; None for as much as there is."""

    device: int = 512
    ram: int | None = 4096
    disk: int | None = 0
    remote: int | None = 0  # that all replicas share


class _Sized:
    """K/V of one chunk, on paper: a `DeviceMemory` asks for no more."""

    nbytes = 1

    def promoted(self) -> "_Sized":
        """What a copy would be."""
        return self


class _Lower:
    """A tier that gives up what was not used for longest, what continues a chunk before the chunk itself."""

    def __init__(self, room: int | None) -> None:
        self.room = room
        self.held: OrderedDict[bytes, None] = OrderedDict()

    def use(self, keys: list[bytes]) -> list[bytes]:
        """All chunks of a prompt are used at once, or written; returns those that had to go."""
        if self.room == 0:
            return []
        for key in reversed(keys):
            self.held[key] = None
            self.held.move_to_end(key)
        gone = max(0, len(self.held) - self.room) if self.room is not None else 0
        return [self.held.popitem(last=False)[0] for _ in range(gone)]


class Replica:
    """The tiers of one replica: what the parts of a `ChunkStore` do, by key and size alone."""

    def __init__(self, room: Room, remote: _Lower) -> None:
        self.room = room
        self.order = EvictionOrder()
        self.device = DeviceMemory(room.device)
        self.lower = {"disk": _Lower(room.disk), "remote": remote}
        self.holdings = Holdings(self.place, max_keys=2**30)

    def place(self, key: bytes) -> int:
        """Where a chunk is, as a store would tell its holdings."""
        return MEMORY if key in self.order else BELOW if any(key in t.held for t in self.lower.values()) else GONE

    def serve(self, keys: list[bytes]) -> list[str]:
        """Serve a prompt and store it.

        Returns:
            The tier of each chunk that was found.
        """
        tiers: list[str] = []
        for key in keys:
            tier = self.tier(key)
            if tier is None:
                break
            tiers.append(tier)
        self.order.next_prompt()
        for key in keys[: len(tiers)]:
            if key in self.order:
                self.order.touch(key)
            self.device.put(key, _SIZED)
        for lower in self.lower.values():  # of a server that all share, others do not hear what it gives up
            self.holdings.changed(lower.use(keys))
        for parent, key in zip([None, *keys], keys, strict=False):
            if key not in self.order and not self.take(key, parent):
                break
        self.holdings.changed(keys)
        return tiers

    def link(self, keys: list[bytes]) -> None:
        """Link the text of a prompt to its chunks: here each piece of text is a chunk."""
        borders = [Border(CHUNK * number, key) for number, key in enumerate(keys, 1)]
        self.holdings.link(keys, borders, CHUNK * len(keys))

    def tier(self, key: bytes) -> str | None:
        """Where a chunk is found."""
        near = "ram" if key in self.order else None
        found = near or next((name for name, tier in self.lower.items() if key in tier.held), None)
        return "device" if found is not None and self.device.get(key) is not None else found

    def take(self, key: bytes, parent: bytes | None) -> bool:
        """Take a chunk into host memory, if there is or can be made room for it."""
        while self.room.ram is not None and len(self.order) >= self.room.ram:
            if (victim := self.order.victim(keep=parent)) is None:
                return False
            self.holdings.changed([victim])
        self.order.add(key, parent if parent in self.order else None)
        return True


_SIZED: Any = _Sized()


class Routing:
    """Who gets a request: `"round-robin"`, `"least-loaded"`, or by the library's router.

    `"prefix"` knows where prompts went, and `"events"` what replicas hold, too, of which it hears once for as many
    requests as there are replicas: a quarter of a second, where a request takes two.
    """

    def __init__(self, name: str, load_factor: float, seed: int) -> None:
        self.name, self.turn = name, 0
        self.router = PrefixRouter(load_factor)
        self.rng = random.Random(seed)

    def choose(self, keys: list[bytes], loads: dict[str, int]) -> str:
        """The name of a replica."""
        if self.name in ("prefix", "events"):
            chosen = self.router.rank(keys, loads)[0]
            self.router.routed(keys, chosen)
            return chosen
        if self.name == "least-loaded":
            least = min(loads.values())
            return self.rng.choice([name for name, load in loads.items() if load == least])
        self.turn += 1
        return list(loads)[self.turn % len(loads)]


def simulate(
    trace: Trace, replicas: int, room: Room, routing: str, *, load_factor: float = LOAD_FACTOR, seed: int = 0
) -> Result:
    """Replay a trace.

    Args:
        trace: The requests. Those of the first third warm up, and are not counted.
        replicas: That share them.
        room: The room of each replica, and of what they share.
        routing: How requests are routed: see `Routing`.
        load_factor: The load factor of the router.
        seed: The seed of draws between replicas that have as much to do.

    Returns:
        `hit`, and for each tier, the share of prompt tokens that was found; `share`, how many times its share of all
        requests the replica with the most got; `load`, the same of requests under way, at its highest against what the
        bound allows.
    """
    remote, router = _Lower(room.remote), Routing(routing, load_factor, seed)
    stores = {f"replica-{number}": Replica(room, remote) for number in range(replicas)}
    loads = dict.fromkeys(stores, 0)
    under_way: list[tuple[float, str]] = []
    found: Counter[str] = Counter()
    got: Counter[str] = Counter()
    prompts = highest = 0.0
    for now, request in enumerate(trace.requests):
        while under_way and under_way[0][0] <= now:
            loads[heapq.heappop(under_way)[1]] -= 1
        keys = [trace.keys[chunk] for chunk in request.chunks]
        most = router.router.most(loads)
        if routing == "events" and now % replicas == 0:
            places = router.router.places
            router.router.learn([store.holdings.since(name, places.get(name)) for name, store in stores.items()])
        name = router.choose(keys, loads)
        if routing == "events":
            stores[name].link(keys)
        loads[name] += 1
        highest = max(highest, loads[name] / most)
        heapq.heappush(under_way, (now + request.time * UNDER_WAY * replicas, name))
        tiers = stores[name].serve(keys)
        if now >= len(trace.requests) // 3:
            got[name] += 1
            found.update(tiers)
            prompts += len(keys) * CHUNK + request.rest
    shares = {tier: found[tier] * CHUNK / prompts for tier in TIERS}
    return {
        "replicas": replicas,
        "routing": routing,
        "load_factor": load_factor,
        "room": asdict(room),
        "hit": sum(shares.values()),
        **shares,
        "share": max(got.values()) * replicas / got.total(),
        "load": highest,
    }


def best(trace: Trace, room: int | None) -> float:
    """The share of prompt tokens that one store could serve that knows the future (Belady, 1966).

    What continues a chunk is never asked for before the chunk, so that a chunk is always found with all before it.

    Args:
        trace: As in `simulate`, and counted as there.
        room: In chunks; None for as much as there is.
    """
    never = len(trace.requests)
    upcoming: list[list[int]] = [[] for _ in trace.keys]
    for now in range(never - 1, -1, -1):
        for chunk in trace.requests[now].chunks:
            upcoming[chunk].append(now)
    held: dict[int, int] = {}  # chunk -> its next use
    queue: list[tuple[int, int]] = []  # the same, negative, and the deepest chunk first: those are the newest
    hits, prompts = 0, 0
    for now, request in enumerate(trace.requests):
        counted = now >= never // 3
        prompts += counted * (len(request.chunks) * CHUNK + request.rest)
        for chunk in request.chunks:
            hits += counted * (chunk in held)
            upcoming[chunk].pop()
            held[chunk] = upcoming[chunk][-1] if upcoming[chunk] else never
            heapq.heappush(queue, (-held[chunk], -chunk))
        while room is not None and len(held) > room:
            after, chunk = heapq.heappop(queue)
            if held.get(-chunk) == -after:
                del held[-chunk]
    return hits * CHUNK / prompts


def run(
    requests: int, seed: int, replicas: list[int], routings: Sequence[str], ram: int, many: int, rooms: list[int]
) -> Result:
    """Replay one trace in all arms.

    Args:
        requests: The requests of the trace.
        seed: The seed of the trace.
        replicas: Numbers of them that are tried.
        routings: That are tried with each.
        ram: Chunks that host memory has room for, of each replica.
        many: Replicas of the arms that have other rooms, other tiers or another bound of loads.
        rooms: The sizes of host memory, in chunks.
    """
    trace = make_trace(requests, seed=seed)

    def arm(count: int, room: Room, routing: str = "prefix", load_factor: float = LOAD_FACTOR) -> Result:
        row = simulate(trace, count, room, routing, load_factor=load_factor, seed=seed)
        print(json.dumps(row), file=sys.stderr)
        return row

    plain, disk, server = Room(ram // 8, ram), 8 * ram, 16 * ram * many // 4
    three = tuple(name for name in ROUTINGS[1:] if name in routings)
    pooled = {ram * count for count in replicas} | {chunks * many for chunks in rooms}
    return {
        "requests": requests,
        "tokens": sum(len(request.chunks) * CHUNK + request.rest for request in trace.requests),
        "unlimited": best(trace, None),
        "best": {str(chunks): best(trace, chunks) for chunks in sorted(pooled)},
        "by_replicas": [arm(n, plain, name) for n in replicas for name in (routings if n > 1 else routings[-1:])],
        "by_room": [arm(many, Room(chunks // 8, chunks), name) for chunks in rooms for name in three],
        "by_tiers": [
            arm(many, Room(ram // 8, ram, below, beside), name)
            for below, beside in ((disk, 0), (0, server), (disk, server))
            for name in three
            if rooms
        ],
        "by_bound": [arm(many, plain, name, factor) for factor in (1.5, 2.0) for name in three[1:] if rooms],
    }


def markdown(result: Result) -> str:
    """The tables."""

    def line(first: str, row: Result) -> str:
        tiers = " | ".join(f"{100 * row[tier]:.1f}" for tier in TIERS)
        found = f"{100 * row['hit']:.1f} | {tiers} | {row['share']:.2f}"
        return f"| {first} | {row['routing']} | {found} |"

    def head(first: str) -> list[str]:
        names = " | ".join(TIERS)
        return ["", f"| {first} | routing | found, % | {names} | most / share |", "| --- | --- |" + " ---: |" * 6]

    def bound(replicas: int, ram: int) -> str:
        return f"{100 * result['best'][str(replicas * ram)]:.1f}"

    lines = [
        f"{result['requests']} requests of {result['tokens'] / result['requests']:.0f} tokens on average, of which "
        f"{100 * result['unlimited']:.1f} % were seen before: that is what unlimited room would find. "
        f"{result['seconds']:.0f} s; {measured_on(result['provenance'])}",
        *head("replicas (one store of their room, knowing the future)"),
    ]
    for row in result["by_replicas"]:
        lines.append(line(f"{row['replicas']} ({bound(row['replicas'], row['room']['ram'])})", row))
    if result["by_room"]:
        lines += head("host memory of each replica, tokens (knowing the future)")
    for row in result["by_room"]:
        ram = row["room"]["ram"]
        lines.append(line(f"{ram * CHUNK:,} ({bound(row['replicas'], ram)})", row))
    if result["by_tiers"]:
        lines += head("tiers below, tokens")
    for row in result["by_tiers"]:
        room = row["room"]
        below = [f"disk of each {room['disk'] * CHUNK:,}"] * bool(room["disk"])
        below += [f"server for all {room['remote'] * CHUNK:,}"] * bool(room["remote"])
        lines.append(line(", ".join(below), row))
    if result["by_bound"]:
        lines += head("bound of loads")
    lines += [line(f"{row['load_factor']}", row) for row in result["by_bound"]]
    return "\n".join(lines) + "\n"


def draw(result: Result, path: Path) -> None:
    """What is found by number of replicas, and by room."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    room = result["by_replicas"][0]["room"]["ram"]
    for name, colour in zip(ROUTINGS, ("tab:gray", "tab:orange", "tab:blue", "tab:green"), strict=True):
        rows = [row for row in result["by_replicas"] if row["routing"] == name]
        left.plot([r["replicas"] for r in rows], [100 * r["hit"] for r in rows], "o-", color=colour, label=name)
        rows = [row for row in result["by_room"] if row["routing"] == name]
        if rows:
            label = f"{name}, {rows[0]['replicas']} replicas"
            places = [r["room"]["ram"] * CHUNK for r in rows]
            right.plot(places, [100 * r["hit"] for r in rows], "o-", color=colour, label=label)
    counts = sorted({row["replicas"] for row in result["by_replicas"]})
    future = "one store of the same room, knowing the future"
    left.plot(counts, [100 * result["best"][str(n * room)] for n in counts], "k:", label=future)
    rooms = sorted({(row["room"]["ram"], row["replicas"]) for row in result["by_room"]})
    right.plot([c * CHUNK for c, _ in rooms], [100 * result["best"][str(c * n)] for c, n in rooms], "k:", label=future)
    for axis in (left, right):
        axis.axhline(100 * result["unlimited"], color="black", linewidth=0.8, label="unlimited room")
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 100)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", fontsize=8)
    left.set_xticks(counts, [str(count) for count in counts])
    left.set_xlabel(f"replicas, with host memory for {room * CHUNK:,} tokens each")
    left.set_ylabel("prompt tokens found, %")
    right.set_xticks([c * CHUNK for c, _ in rooms], [f"{c * CHUNK:,}" for c, _ in rooms])
    right.set_xlabel("tokens that the host memory of each replica has room for")
    figure.savefig(path, dpi=120)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not (found := _count(text)):
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON, the tables and the figure")
    parser.add_argument("--name", default="simulate", help="of the files")
    parser.add_argument("--requests", type=_positive, default=8_000, help="in the trace (default: %(default)s)")
    parser.add_argument("--seed", type=_count, default=0, help="of the trace (default: %(default)s)")
    numbers, rooms = [1, 4, 16, 64], [128, 512, 2048]
    parser.add_argument("--replicas", type=_positive, nargs="+", default=numbers, help="(default: %(default)s)")
    text = "of %(choices)s (default: all)"
    parser.add_argument("--routings", choices=ROUTINGS, nargs="+", default=ROUTINGS, metavar="NAME", help=text)
    text = "host memory of each replica, in chunks of 128 tokens (default: %(default)s)"
    parser.add_argument("--ram", type=_positive, default=512, help=text)
    text = "other such sizes, with 16 replicas; without one, lower tiers are left out, too (default: %(default)s)"
    parser.add_argument("--rooms", type=_positive, nargs="*", default=rooms, help=text)
    options = parser.parse_args()
    where, begin = provenance(sys.argv[1:], "simulate.py"), time.perf_counter()
    sizes = options.replicas, options.routings, options.ram, 16, options.rooms
    arms = run(options.requests, options.seed, *sizes)
    seconds = time.perf_counter() - begin
    result: Result = {"provenance": where, "seconds": seconds, **arms}
    write(options.out, options.name, result, markdown(result))
    if result["by_room"]:
        draw(result, options.out / f"{options.name}.png")
    print(markdown(result))


if __name__ == "__main__":
    main()
