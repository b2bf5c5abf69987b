"""How many requests a second one core can route by what replicas hold, and what that costs on both sides.

    python benchmarks/routed.py --out benchmarks/results

The trace of `simulate.py`, with two pieces of text for each chunk of 128 tokens: about 27 pieces, as a body of 7 KB
has. Replicas on paper serve it first, and what they publish is recorded. Then the front's part alone is timed, in
processor time: `rank`, `routed`, the counts of requests under way, and `learn` once for as many requests as there are
replicas, which a front does once in a quarter of a second. Apart from it are timed the keys of a body, and what a
replica does for each prompt. Bytes are those that Python has allocated.
"""

import argparse
import heapq
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import write
from reuse import Result, measured_on, provenance
from simulate import CHUNK, UNDER_WAY, Replica, Room, Trace, _Lower, make_trace

from kvboost_hf.cache.planning.plan import Border
from kvboost_hf.server.engine.holdings import Holdings
from kvboost_hf.server.routing import MEMORY, News, PrefixRouter, prompt_keys

_KEYS = 50_000  # that bytes are measured with
_BODY = 7_000  # characters of a prompt


def pieces(chunks: list[bytes]) -> list[bytes]:
    """Two keys for each chunk."""
    return [key for chunk in chunks for key in (chunk[::-1], chunk)]


def served(trace: Trace, replicas: int) -> tuple[list[list[bytes]], list[list[News]], float]:
    """Have replicas on paper serve a trace.

    Returns:
        The keys of each request, the rounds of news, and the seconds of one prompt at its replica.
    """
    room, remote = Room(64, 512), _Lower(0)
    stores = {f"replica-{number}": Replica(room, remote) for number in range(replicas)}
    front = Front(stores, trace, replicas)
    prompts, rounds, spent = list[list[bytes]](), list[list[News]](), 0.0
    for now, request in enumerate(trace.requests):
        chunks = [trace.keys[chunk] for chunk in request.chunks]
        prompts.append(pieces(chunks))
        if now % replicas == 0:
            places = front.router.places
            begin = time.process_time()
            rounds.append([store.holdings.since(name, places.get(name)) for name, store in stores.items()])
            spent += time.process_time() - begin
            front.router.learn(rounds[-1])
        store = stores[front.route(now, prompts[-1])]
        borders = [Border(CHUNK * number, key) for number, key in enumerate(chunks, 1)]
        begin = time.process_time()
        store.holdings.link(prompts[-1], borders, CHUNK * len(chunks))
        spent += time.process_time() - begin
        store.serve(chunks)
    return prompts, rounds, spent / len(prompts)


class Front:
    """A router, and the requests under way."""

    def __init__(self, names: Any, trace: Trace, replicas: int) -> None:
        self.router, self.loads = PrefixRouter(), dict.fromkeys(names, 0)
        self._runs = [request.time * UNDER_WAY * replicas for request in trace.requests]
        self._under_way: list[tuple[float, str]] = []

    def route(self, now: int, keys: list[bytes]) -> str:
        """Choose a replica for a request, and end those that are over."""
        while self._under_way and self._under_way[0][0] <= now:
            self.loads[heapq.heappop(self._under_way)[1]] -= 1
        name = self.router.rank(keys, self.loads)[0]
        self.router.routed(keys, name)
        self.loads[name] += 1
        heapq.heappush(self._under_way, (now + self._runs[now], name))
        return name


def routed(trace: Trace, replicas: int, repeats: int) -> Result:
    """Time the front with a number of replicas; the best of some repeats."""
    prompts, rounds, linked = served(trace, replicas)
    names = [news.replica for news in rounds[0]]

    def run() -> float:
        front = Front(names, trace, replicas)
        begin = time.process_time()
        for now, keys in enumerate(prompts):
            if now % replicas == 0:
                front.router.learn(rounds[now // replicas])
            front.route(now, keys)
        return time.process_time() - begin

    def learned() -> float:
        router, begin = PrefixRouter(), time.process_time()
        for news in rounds:
            router.learn(news)
        return time.process_time() - begin

    events = sum(len(each.keys) for news in rounds for each in news)
    return {
        "replicas": replicas,
        "pieces": sum(map(len, prompts)) / len(prompts),
        "events": events / len(prompts),
        "requests_per_s": len(prompts) / min(run() for _ in range(repeats)),
        "learn_us": 1e6 * min(learned() for _ in range(repeats)) / len(prompts),
        "replica_us": 1e6 * linked,
    }


def keys_us(repeats: int) -> float:
    """Microseconds for the keys of a chat with some turns, of 7 KB in all."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(500)]
    turns = [" ".join(draw.choices(words, k=170)) for _ in range(7)]
    messages = [{"role": "user" if n % 2 else "assistant", "content": turn} for n, turn in enumerate(turns)]
    body = json.dumps({"model": "m", "messages": messages, "temperature": 0, "stream": True}).encode()
    assert 0.9 * _BODY < len(body) < 1.2 * _BODY, len(body)

    def run() -> float:
        begin = time.process_time()
        for _ in range(500):
            prompt_keys(body, "Bearer key")
        return (time.process_time() - begin) / 500

    return 1e6 * min(run() for _ in range(repeats))


def bytes_per_key(make: Callable[[list[bytes]], object]) -> float:
    """Bytes that something takes for each of many new keys."""
    tracemalloc.start()
    keys = [number.to_bytes(20, "little") for number in range(_KEYS)]
    kept = make(keys)
    del keys
    found = tracemalloc.get_traced_memory()[0] / _KEYS
    tracemalloc.stop()
    del kept
    return found


def held_by_front(keys: list[bytes]) -> PrefixRouter:
    """A front that knows of one replica."""
    router = PrefixRouter()
    router.learn([News("r", "process", None, len(keys), keys, bytes([MEMORY] * len(keys)))])
    return router


def guessed(keys: list[bytes]) -> PrefixRouter:
    """A front that remembers where prompts went."""
    router = PrefixRouter()
    for at in range(0, len(keys), 25):
        router.routed(keys[at : at + 25], "r")
    return router


def held_by_replica(keys: list[bytes]) -> Holdings:
    """A replica that has linked prompts of 25 pieces, two of which a chunk covers."""
    holdings = Holdings(lambda key: MEMORY, max_log=0)
    for at in range(0, len(keys), 25):
        part = keys[at : at + 25]
        borders = [Border(CHUNK * number, key[::-1]) for number, key in enumerate(part[::2], 1)]
        holdings.link(part, borders, CHUNK * len(borders))
    return holdings


def markdown(result: Result) -> str:
    """The table."""
    lines = [
        f"{result['requests']} requests of 7 KB, in processor time of one core; {measured_on(result['provenance'])}",
        "",
        "| replicas | requests routed a second | µs of news in each | events a request | µs at the replica |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['replicas']} | {row['requests_per_s']:,.0f} | {row['learn_us']:.0f} | {row['events']:.1f} "
            f"| {row['replica_us']:.0f} |"
        )
    sizes = result["bytes_per_key"]
    lines += [
        "",
        f"The keys of a body of 7 KB take {result['keys_us']:.0f} µs more, in a thread of the front. Bytes for each "
        f"piece: {sizes['front']:.0f} in a front for each replica that holds it, {sizes['guess']:.0f} for where it "
        f"went, {sizes['replica']:.0f} in a replica.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--requests", type=int, default=6_000, help="in the trace (default: %(default)s)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64], help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of which the best counts (default: %(default)s)")
    options = parser.parse_args()
    where = provenance(sys.argv[1:], "routed.py")
    trace = make_trace(options.requests)
    makers = {"front": held_by_front, "guess": guessed, "replica": held_by_replica}
    result: Result = {
        "provenance": where,
        "requests": options.requests,
        "rows": [routed(trace, count, options.repeats) for count in options.replicas],
        "keys_us": keys_us(options.repeats),
        "bytes_per_key": {name: bytes_per_key(make) for name, make in makers.items()},
    }
    write(options.out, "routed", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
