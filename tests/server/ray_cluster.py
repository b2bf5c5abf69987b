"""Replicas of the embedded model behind Ray Serve, on this machine, and those who load them."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvboost_hf.assets import load_embedded
from tests.internals.server import ServerSettings
from tests.servers import free_port

KEY, OTHER, BOSS = ({"authorization": f"Bearer {key}"} for key in ("key", "other", "boss"))
_ROOT = Path(__file__).parents[2]


def load() -> tuple[Any, Any]:
    """The embedded model, of which loading any K/V pays, however busy the machine is."""
    from tests.internals.cache import ComputePace

    ComputePace.seconds_per_token = lambda self, model: 1.0
    return load_embedded()


def settings(**more: Any) -> ServerSettings:
    """Those of a server at a free port."""
    known = {"model_name": "reader", "max_batch_size": 2, "api_keys": ("key", "other"), "operator_keys": ("boss",)}
    return ServerSettings(**{**known, "port": free_port(), "drain_s": 10, **more})


@contextmanager
def started(cpus: int) -> Iterator[None]:
    """Ray and Ray Serve, until the context ends."""
    import ray
    from ray import serve

    ray.init(
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}},
    )
    try:
        serve.start(proxy_location="Disabled")
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def processes(name: str = "Replica") -> dict[int, psutil.Process]:
    """Those of the replicas of a deployment, by pid."""
    mark, found = f"ray::ServeReplica:default:{name}", {}
    for child in psutil.Process().children(recursive=True):
        try:
            if child.name().startswith("ray::") and mark in " ".join(child.cmdline()):
                found[child.pid] = child
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def until(holds: Callable[[], Any], timeout_s: float, otherwise: str) -> Any:
    """Wait for something to be true; returns it."""
    end = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < end, otherwise
        time.sleep(0.5)
    return found


def prompt_of(name: str) -> str:
    """No two of them share a chunk."""
    return f"{name}: " + f"Anna lives in {name}. She plays the piano. " * 8


def asked(http: httpx.Client, name: str, **more: Any) -> tuple[int, int]:
    """Have the prompt of a name answered: its tokens, and those that were cached."""
    body = {"model": "reader", "prompt": prompt_of(name), "max_tokens": 1, "prompt_cache_key": name, **more}
    told = http.post("/v1/completions", json=body)
    assert told.status_code == 200, told.text
    usage = told.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Clients:
    """Clients who ask all the time, each over a connection that it renews from time to time.

    Attributes:
        statuses: How often each status came, or which error.
    """

    def __init__(self, at: str, names: list[str], count: int, *, max_tokens: int = 2, pause_s: float = 0.0) -> None:
        self.statuses: Counter[str] = Counter()
        self._at, self._names, self._max_tokens, self._pause_s = at, names, max_tokens, pause_s
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(90)

    @property
    def failed(self) -> int:
        """Requests that were not answered."""
        return sum(count for status, count in self.statuses.items() if status != "200")

    def _run(self, number: int) -> None:
        at = number
        while not self._ended.is_set():
            with httpx.Client(base_url=self._at, headers=KEY, timeout=60) as http:
                for _ in range(4):
                    at += 1
                    name = self._names[at % len(self._names)]
                    body = {"model": "reader", "prompt": prompt_of(name), "max_tokens": self._max_tokens}
                    try:
                        status = str(http.post("/v1/completions", json=body).status_code)
                    except httpx.TransportError as error:
                        status = type(error).__name__
                    self.statuses[status] += 1
                    if self._ended.wait(self._pause_s):
                        return
