"""Four replicas behind Ray Serve, one of which is killed, stopped, or attacked; or the tier of all does not answer."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.internals.engine import EngineSettings
from tests.server import test_attacks as attacks
from tests.server.ray_cluster import Clients, asked, load, processes, prompt_of, settings, started, until
from tests.servers import BINARY, Server

ray = pytest.importorskip("ray", reason="`make clients` runs it")
serve = pytest.importorskip("ray.serve", reason="`make clients` runs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(BINARY is None, reason="neither valkey-server nor redis-server"),
]
NAMES = [f"city{number}" for number in range(12)]

# The attacks on one server that need nothing but its address.
test_no_body_keeps_others_waiting = attacks.test_no_body_keeps_others_waiting
test_no_message_does = attacks.test_no_message_does
test_more_than_is_served = attacks.test_more_than_is_served
test_references_do_not_end_the_process = attacks.test_references_do_not_end_the_process
test_deep_arguments_are_refused = attacks.test_deep_arguments_are_refused
test_arguments_with_many_parts_are_refused = attacks.test_arguments_with_many_parts_are_refused


class At:
    """The front, as tests of one server have it.

    Attributes:
        url: Where; keys are not needed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("valkey"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def at(tier: Server) -> Iterator[At]:
    from kvboost_hf.server.ray_app import build

    with started(cpus=4):
        kept = EngineSettings(chunk_size=16, tiers=["ram:64MB", tier.url])
        chosen = settings(api_keys=(), operator_keys=(), max_batch_size=4)
        serve.run(build(load, chosen, kept, replicas=4), route_prefix=None)
        found = At(f"http://127.0.0.1:{chosen.port}")
        with found.http, found.openai:
            yield found


def from_memory(http: httpx.Client) -> dict[str, int]:
    """By replica, how many tokens host memory has served."""
    told = until(
        lambda: (found := http.get("/v1/stats")).status_code == 200 and found.json()["replicas"], 60, "no statistics"
    )
    return {name: each["cached_tokens_by_tier"].get("ram", 0) for name, each in told.items()}


def is_gone(http: httpx.Client, name: str) -> bool:
    """Whether no replica has the prompt of a name: not in its memory, and the first that asks not in the tier."""
    before = from_memory(http)
    found = cached_at_all(name)
    return from_memory(http) == before and len(found) == 4 and min(found.values()) == 0


def cached_at_all(name: str) -> dict[str, int]:
    """Have each replica answer the prompt of a name; by replica, the tokens that it had."""
    body = {"model": "reader", "prompt": prompt_of(name), "max_tokens": 1, "prompt_cache_key": name}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    handle = serve.get_deployment_handle("Replica", "default")
    answers = handle.broadcast("ask_whole", scope, json.dumps(body).encode()).results(timeout_s=60)
    usages = {each.replica: json.loads(each.body)["usage"] for each in answers}
    return {name: usage["prompt_tokens_details"]["cached_tokens"] for name, usage in usages.items()}


def held_by_all(http: httpx.Client) -> None:
    for name in NAMES:
        asked(http, name)
        until(lambda name=name: len(cached_at_all(name)) == 4, 90, "a replica is lacking")
        assert min(cached_at_all(name).values()) > 60


def test_what_is_deleted_none_of_four_serves_though_one_is_away(at: At) -> None:
    """It is stopped for longer than the front waits; then it goes on, with all in its memory."""
    held_by_all(at.http)
    assert at.http.delete(f"/v1/kv/sessions/{NAMES[0]}").status_code == 200
    assert is_gone(at.http, NAMES[0])
    assert not is_gone(at.http, NAMES[0])  # now it is there again
    stopped = next(iter(processes()))
    os.kill(stopped, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        told = at.http.delete(f"/v1/kv/sessions/{NAMES[1]}")
        took = time.monotonic() - begin
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert (told.status_code, told.json()["error"]["code"]) == (503, "replica_lost")
    assert took < 40
    # The others have deleted it before.
    until(lambda: at.http.delete(f"/v1/kv/sessions/{NAMES[1]}").status_code in (200, 404), 60, "503 for ever")
    until(lambda: len(from_memory(at.http)) == 4, 90, "a replica is lacking")
    assert is_gone(at.http, NAMES[1])
    assert min(cached_at_all(NAMES[2]).values()) > 60  # of another session, all is there


def test_a_replica_that_is_killed_costs_few_requests(at: At) -> None:
    """Each client may lose the one that was under way; the rest goes on, and what was held is in the tier."""
    held_by_all(at.http)
    with Clients(at.url, NAMES, 6, max_tokens=8) as clients:
        until(lambda: clients.statuses["200"] > 20, 60, "nobody is answered")
        os.kill(next(iter(processes())), signal.SIGKILL)
        before = clients.statuses["200"]
        until(lambda: clients.statuses["200"] > before + 40, 60, "nobody is answered any more")
    assert clients.failed <= 6, clients.statuses
    until(lambda: len(from_memory(at.http)) == 4, 90, "no replica came in its place")
    for name in NAMES:
        assert min(cached_at_all(name).values()) > 60


def test_where_the_tier_does_not_answer_nothing_is_deleted(at: At, tier: Server) -> None:
    """Others are served meanwhile; and when it answers again, nobody serves what is deleted then."""
    held_by_all(at.http)
    tier.stall()
    try:
        told = at.http.delete(f"/v1/kv/sessions/{NAMES[3]}")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "tier_unreachable")
        prompt, cached = asked(at.http, NAMES[4])
        assert cached > prompt - 17
    finally:
        tier.go_on()
    until(lambda: at.http.delete(f"/v1/kv/sessions/{NAMES[3]}").status_code in (200, 404), 90, "503 for ever")
    assert is_gone(at.http, NAMES[3])
    assert min(cached_at_all(NAMES[4]).values()) > 60


def test_who_asks_while_one_is_stopped_is_answered_by_others(at: At) -> None:
    """For as long as a garbage collection may take, say: nobody is refused, and few wait for it."""
    stopped = next(iter(processes()))
    resume = threading.Timer(4, os.kill, (stopped, signal.SIGCONT))
    with Clients(at.url, NAMES, 4, max_tokens=4) as clients:
        os.kill(stopped, signal.SIGSTOP)
        resume.start()
        resume.join()
        until(lambda: clients.statuses["200"] > 40, 60, "nobody is answered")
    assert clients.failed == 0, clients.statuses
