"""Replicas of the embedded model under Ray, routed by what they hold and by where prompts went.

    .venv-clients/bin/python benchmarks/routed_live.py --out benchmarks/results

Sessions ask questions about documents, which they share by Zipf's law. Host memory of all replicas together has room
for a part of them. A client has no connection that lasts, so that its requests come to any of the fronts. In the
second phase one replica is killed at the beginning, in the third all fronts are: Ray starts others. The arm `text` has
fronts that do not hear what replicas hold.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from record import write
from reuse import Result, measured_on, provenance

from kvboost_hf.assets import load_embedded
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.server import ray_app
from kvboost_hf.server.settings import ServerSettings

_PLACES = ("Oslo", "Lima", "Rome", "Cairo", "Delhi", "Paris", "Quito", "Seoul")
_THINGS = ("piano", "lamp", "boat", "clock", "garden", "horse", "ladder", "violin")
_TRIES = 240  # of a request, half a second apart: Ray takes half a minute to start others
_PHASES = ("steady", "a replica is killed", "all fronts are killed")


class Front:
    """The front of the arm `text`: it does not learn what replicas hold."""

    def __init__(self, *given: Any) -> None:
        from kvboost_hf.server import ray_app, routing

        routing.PrefixRouter.learn = lambda self, round: None
        self._front = ray_app.Front(*given)

    async def __call__(self, request: Any) -> Any:
        """As the other one."""
        return await self._front(request)


def document(number: int) -> str:
    """About 350 tokens."""
    draw = random.Random(number)
    lines = [
        f"Person {draw.randrange(10_000)} lives in {draw.choice(_PLACES)} and has a {draw.choice(_THINGS)}."
        for _ in range(24)
    ]
    return f"Document {number}. " + " ".join(lines)


class Sessions:
    """Sessions of clients that ask one after another, each the next turn of one of its sessions.

    Args:
        url: The server.
        documents: How many.
        seed: What all draws follow from.
    """

    def __init__(self, url: str, documents: int, seed: int) -> None:
        self._url, self._random = url, random.Random(seed)
        self._weights = [1 / rank**0.7 for rank in range(1, documents + 1)]
        self._sessions: list[list[dict[str, str]]] = []

    def ask(self) -> tuple[str, int, int]:
        """One request: how it ended, the tokens of its prompt, and those that were reused."""
        draw = self._random
        if len(self._sessions) < 3 or draw.random() < 0.3:
            number = draw.choices(range(len(self._weights)), self._weights)[0]
            self._sessions.append([{"role": "system", "content": document(number)}])
            del self._sessions[:-4]
        session = draw.choice(self._sessions)
        session.append({"role": "user", "content": f"Who has the {draw.choice(_THINGS)} of {draw.randrange(1000)}?"})
        body = {"model": "reader", "messages": session, "max_tokens": 4, "temperature": 0}
        end = ""
        for _ in range(_TRIES):
            try:
                told = httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=60)
            except httpx.TransportError as error:
                end = type(error).__name__
                time.sleep(0.5)
                continue
            if told.status_code == 200:
                usage = told.json()["usage"]
                session.append(told.json()["choices"][0]["message"])
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                return "answered", usage["prompt_tokens"], cached
            end = str(told.status_code)
            time.sleep(0.5)
        return f"failed with {end}", 0, 0


def phase(clients: Sequence[Sessions], requests: int) -> Result:
    """So many requests of all clients together."""
    found = Counter[str]()

    def run(client: Sessions) -> None:
        for _ in range(requests // len(clients)):
            end, prompt, cached = client.ask()
            found.update({end: 1, "prompt": prompt, "cached": cached})

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"hit": found["cached"] / max(1, found["prompt"]), **found}


def kill(kind: str, count: int | None = None) -> None:
    """End replicas of a deployment without a word."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    for actor in [actor for actor in actors if f"#{kind}#" in actor["name"]][:count]:
        ray.kill(ray.get_actor(**actor), no_restart=True)


def arm(name: str, replicas: int, fronts: int, requests: int, ram: str, documents: int, port: int) -> Result:
    """All phases with one way of routing."""
    variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=replicas, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    heard = ray_app.Front
    try:
        serve.start(proxy_location="Disabled")
        kept = EngineSettings(chunk_size=16, tiers=[f"ram:{ram}"])
        settings = ServerSettings(model_name="reader", port=port)
        if name == "text":
            ray_app.Front = Front  # type: ignore[assignment]
        application = ray_app.build(load_embedded, settings, kept, replicas=replicas, fronts=fronts)
        serve.run(application, route_prefix=None)
        clients = [Sessions(f"http://127.0.0.1:{port}", documents, seed) for seed in range(2 * replicas)]
        phase(clients, requests)  # fills the stores
        ends: list[Callable[[], None]] = [lambda: None, lambda: kill("Replica", 1), lambda: kill("Front")]
        rows = {}
        for told, end in zip(_PHASES, ends, strict=True):
            end()
            rows[told] = phase(clients, requests)
            print(name, told, json.dumps(rows[told]), file=sys.stderr, flush=True)
        return {"routing": name, "phases": rows}
    finally:
        ray_app.Front = heard
        serve.shutdown()
        ray.shutdown()


def markdown(result: Result) -> str:
    """The table."""
    lines = [
        f"{result['replicas']} replicas with {result['ram']} each, {result['fronts']} fronts, {result['requests']} "
        f"requests in each phase; {measured_on(result['provenance'])}",
        "",
        "| tokens of prompts reused, % | " + " | ".join(_PHASES) + " | not answered |",
        "| --- |" + " ---: |" * (len(_PHASES) + 1),
    ]
    for row in result["arms"]:
        shares = [f"{100 * row['phases'][name]['hit']:.1f}" for name in _PHASES]
        failed = sum(
            count for phase in row["phases"].values() for key, count in phase.items() if key.startswith("failed")
        )
        lines.append(f"| {row['routing']} | " + " | ".join(shares) + f" | {failed} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--replicas", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--fronts", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=320, help="in each phase (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--ram", default="24MB", help="host memory of each replica (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8123, help="(default: %(default)s)")
    options = parser.parse_args()
    where = provenance(sys.argv[1:], "routed_live.py")
    sizes = {name: getattr(options, name) for name in ("replicas", "fronts", "requests", "ram", "documents")}
    arms = [arm(name, **sizes, port=options.port) for name in ("text", "events")]
    result: Result = {"provenance": where, **sizes, "arms": arms}
    write(options.out, "routed-live", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
