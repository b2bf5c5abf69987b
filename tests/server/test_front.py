"""The front of a cluster: one server in the eyes of clients, with the limits of one, and replicas that come and go."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvboost_hf.assets import load_embedded
from tests.internals.server import (
    Answer,
    FrontServer,
    News,
    Place,
    PrefixRouter,
    QueueFullError,
    ReplicaLostError,
    front_app,
    lacking,
    make_app,
    merged,
    merged_figures,
    needed,
)
from tests.server import test_attacks_tenants as tenants_suite
from tests.server import test_attacks_wire as suite
from tests.server.conftest import SETTINGS, Serve, listening
from tests.server.fake_engine import FakeEngine
from tests.server.test_sessions import BOOK, engine_of
from tests.server.wire import WAIT_S, Wire, in_a_thread, post, until

pytestmark = pytest.mark.daily

# The attacks on one server.
endless, engine, log = suite.endless, suite.engine, suite.log
test_a_body_must_come_in_time = suite.test_a_body_must_come_in_time
test_a_body_over_the_limit_is_told_so = suite.test_a_body_over_the_limit_is_told_so
test_a_header_must_come_in_time = suite.test_a_header_must_come_in_time
test_answers_before_the_body_end_the_connection = suite.test_answers_before_the_body_was_read_end_the_connection
test_half_open_connections_do_not_keep_others_out = suite.test_half_open_connections_do_not_keep_others_out
test_many_at_once_are_all_answered = suite.test_many_at_once_are_all_answered
test_more_than_is_heard_out_ends_the_connection = suite.test_more_than_is_heard_out_ends_the_connection
test_where_all_are_busy_the_new_one_is_refused = suite.test_where_all_are_busy_the_new_one_is_refused
test_who_asks_first_is_told_at_once = suite.test_who_asks_first_is_told_at_once
test_who_does_not_read_is_dropped = suite.test_who_does_not_read_is_dropped
test_nonsense_has_a_line_in_the_log_and_no_more = suite.test_nonsense_has_a_line_in_the_log_and_no_more
# Those on other clients.
tenants = tenants_suite.tenants
test_many_requests_keep_no_other_waiting = tenants_suite.test_many_requests_of_one_do_not_keep_another_waiting
test_one_does_not_take_all_places_to_wait = tenants_suite.test_one_does_not_take_all_places_to_wait
test_one_does_not_take_all_memory = tenants_suite.test_one_does_not_take_all_memory
test_what_another_key_has_sent_is_cold = tenants_suite.test_what_another_key_has_sent_is_cold
test_what_is_given_up_tells_nothing = tenants_suite.test_what_is_given_up_tells_nothing_but_how_much_others_store


class Local:
    """Replicas in this process.

    Args:
        apps: By name.
    """

    def __init__(self, apps: dict[str, Any]) -> None:
        self.apps, self.asked, self.lost, self.full = apps, list[str](), 0, False

    async def ask(self, keys: Sequence[bytes], scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        if self.full:
            raise QueueFullError("full", 1.0)
        name = sorted(self.apps)[len(self.asked) % len(self.apps)]
        self.asked.append(name)
        given: asyncio.Queue[Any] = asyncio.Queue()
        said: asyncio.Queue[Any] = asyncio.Queue()
        given.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def run() -> None:
            try:
                await self.apps[name](scope, given.get, said.put)
            finally:
                said.put_nowait(None)

        running = asyncio.ensure_future(run())
        try:
            while (message := await said.get()) is not None:
                if self.lost:
                    self.lost -= 1
                    raise ReplicaLostError("killed")
                yield message
        finally:
            given.put_nowait({"type": "http.disconnect"})
            await running

    async def ask_all(self, scope: dict[str, Any], body: bytes) -> list[Answer]:
        found = []
        for name in sorted(self.apps):
            only = Local({name: self.apps[name]})
            messages = [message async for message in only.ask((), dict(scope), body)]
            content = b"".join(message.get("body", b"") for message in messages[1:])
            found.append(Answer(name, messages[0]["status"], messages[0]["headers"], content))
        return found

    async def news(self, places: Mapping[str, Place]) -> list[News]:
        return []


@contextmanager
def fronted(replicas: Any, tokenizer: Any = None, **changes: Any) -> Iterator[Wire]:
    """A front in a thread, as `running` has a server; an engine is taken for a replica with it."""
    settings = replace(SETTINGS, **({"port": 0, "drain_s": 1.0} | changes))
    if not isinstance(replicas, Local):
        replicas = Local({"one": make_app(replicas, tokenizer, settings)})
    app = front_app(replicas, settings, PrefixRouter())
    with in_a_thread(FrontServer(app, app.state.forwarding, settings)) as wire:
        yield wire


@pytest.fixture
def serve(tokenizer: Any) -> Iterator[Serve]:
    """Serves an engine behind a front, for the tests of other clients."""
    with ExitStack() as stack:

        def start(engine: Any, **changes: Any) -> Any:
            settings = replace(SETTINGS, **changes)
            replicas: Any = Local({"one": make_app(engine, tokenizer, settings)})
            return stack.enter_context(listening(front_app(replicas, settings, PrefixRouter())))

        yield start


@pytest.fixture(autouse=True)
def _the_suite_attacks_a_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests that come from the other file."""
    monkeypatch.setattr(suite, "running", fronted)


ASK = {"model": "reader", "messages": [{"role": "user", "content": "Who?"}]}


def test_bodies_without_a_key_are_not_read(tokenizer: Any) -> None:
    """Thirty of 15 MB: refused by their headers, while others are served at once and memory stays."""
    body = b"{" + b" " * (15 * 2**20)
    replicas = Local({"one": make_app(FakeEngine("Anna"), tokenizer, replace(SETTINGS, api_keys=("key",)))})
    with fronted(replicas, api_keys=("key",)) as wire, ExitStack() as stack:
        statuses: list[bytes] = []

        def send() -> None:
            one = stack.enter_context(wire.open(post(b"", f"Content-Length: {len(body)}", "Authorization: Bearer no")))
            one.sendall(body)
            statuses.append(one.recv(12))

        senders = [threading.Thread(target=send) for _ in range(30)]
        for sender in senders:
            sender.start()
        slowest = 0.0
        while any(sender.is_alive() for sender in senders):
            begin, computed = time.monotonic(), time.process_time()
            assert wire.health(WAIT_S) == 200
            # Of what this process has computed: others may keep it waiting.
            slowest = max(slowest, min(time.monotonic() - begin, time.process_time() - computed))
        assert statuses == [b"HTTP/1.1 401"] * 30
        assert slowest < 2
        assert replicas.asked == []
        told = httpx.post(f"{wire.url}/v1/chat/completions", json=ASK, headers={"Authorization": "Bearer key"})
        assert told.status_code == 200


def test_large_bodies_are_hashed_beside_others(tokenizer: Any) -> None:
    """With the right key: the event loop goes on."""
    replicas = Local({"one": make_app(FakeEngine("Anna"), tokenizer, SETTINGS)})
    content = json.dumps(ASK | {"messages": [{"role": "user", "content": "x y" * 2**18}]}).encode()
    with fronted(replicas) as wire:
        posting = [
            threading.Thread(target=lambda: httpx.post(f"{wire.url}/v1/chat/completions", content=content, timeout=60))
            for _ in range(4)
        ]
        for thread in posting:
            thread.start()
        while any(thread.is_alive() for thread in posting):
            assert wire.health(5) == 200


def test_a_request_whose_replica_ends_goes_to_another(tokenizer: Any) -> None:
    apps = {name: make_app(FakeEngine(name), tokenizer, SETTINGS) for name in ("a", "b")}
    replicas = Local(apps)
    with fronted(replicas) as wire:
        replicas.lost = 1
        told = httpx.post(f"{wire.url}/v1/chat/completions", json=ASK)
        assert told.json()["choices"][0]["message"]["content"] == "b"
        replicas.lost = 2
        told = httpx.post(f"{wire.url}/v1/chat/completions", json=ASK)
        assert (told.status_code, told.json()["error"]["code"]) == (503, "replica_lost")
        assert told.headers["retry-after"] == "1"
        replicas.full = True
        told = httpx.post(f"{wire.url}/v1/chat/completions", json=ASK)
        assert (told.status_code, "retry-after" in told.headers) == (429, True)
        assert httpx.get(f"{wire.url}/health").status_code == 200


def test_streams_go_through_and_end_with_their_clients(tokenizer: Any) -> None:
    engine = suite.Ending("a", "b")
    begun = threading.Event()

    def wait(ticket: Any, piece: int) -> None:
        if piece:
            begun.set()
            assert ticket.cancelled.wait(WAIT_S)

    engine.before = wait
    with fronted(engine, tokenizer) as wire:
        url = f"{wire.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=ASK | {"stream": True}, timeout=20) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            assert begun.wait(WAIT_S)
            assert stream.headers["x-request-id"]
        until(lambda: engine.tickets[-1].ended.is_set(), "it went on without its client")


def test_sessions_and_figures_are_those_of_all_replicas() -> None:
    """Without a tier that they share: read, pinned and dropped through the front, whichever replica has them."""
    model, tokenizer = load_embedded()
    settings = replace(SETTINGS, api_keys=("one", "two"), operator_keys=("boss",))
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_of(model, tokenizer, chunk_size=16)) for _ in range(3)]
        replicas = Local({f"r{n}": make_app(each, tokenizer, settings) for n, each in enumerate(engines)})
        wire = stack.enter_context(fronted(replicas, api_keys=settings.api_keys, operator_keys=settings.operator_keys))
        http = stack.enter_context(httpx.Client(base_url=wire.url, timeout=20))

        def call(method: str, path: str, key: str, **more: Any) -> Any:
            return http.request(method, path, headers={"Authorization": f"Bearer {key}"}, **more)

        def cached(name: str, key: str = "one") -> int:
            body = {"model": "reader", "prompt": f"{name} {BOOK}", "max_tokens": 1, "prompt_cache_key": name}
            told = call("POST", "/v1/completions", key, json=body).json()
            return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

        names = [f"s{n}" for n in range(6)]
        for name in names:
            assert [cached(name) for _ in range(3)] == [0, 0, 0]  # each at another replica
            assert min(cached(name) for _ in range(3)) > 100
        listed = call("GET", "/v1/kv/sessions", "one").json()["data"]
        assert sorted(each["id"] for each in listed) == names
        assert {each["requests"] for each in listed} == {6}
        assert call("GET", "/v1/kv/sessions", "two").json()["data"] == []
        assert call("GET", "/v1/kv/sessions/s0", "two").status_code == 404
        changed = call("PATCH", "/v1/kv/sessions/s0", "one", json={"ttl_s": 3600}).json()
        assert (changed["pinned"], changed["requests"]) == (True, 6)
        assert all(engine.store.pinned_keys() for engine in engines)
        for name in names[:3]:
            gone = call("DELETE", f"/v1/kv/sessions/{name}", "one").json()
            assert (gone["deleted"], gone["id"]) == (True, name)
            assert gone["freed_bytes"]["ram"] > 0
        assert call("DELETE", "/v1/kv/sessions/s0", "one").status_code == 404
        assert [cached(name) for name in names[:3] for _ in range(3)] == [0] * 9
        assert min(cached(name) for name in names[3:] for _ in range(3)) > 100
        stats = call("GET", "/v1/stats", "boss").json()["replicas"]
        assert sorted(stats) == ["r0", "r1", "r2"]
        assert call("GET", "/v1/stats", "one").status_code == 403
        page = call("GET", "/metrics", "boss").text
        for name in ("r0", "r1", "r2"):
            assert f'kvboost_engine{{replica="{name}",figure="running"}} ' in page
        assert page.count("# TYPE kvboost_engine ") == 1


def test_a_front_that_ends_answers_who_asks_and_who_has_asked(endless: suite.Ending, tokenizer: Any) -> None:
    found: list[httpx.Response] = []
    with fronted(endless, tokenizer, drain_s=1.0) as wire:
        url = f"{wire.url}/v1/chat/completions"
        asking = threading.Thread(target=lambda: found.append(httpx.post(url, json=ASK, timeout=20)))
        asking.start()
        until(lambda: endless.tickets, "it was not taken")
        assert wire.server is not None
        wire.server.should_exit = True
        asking.join(WAIT_S)
    assert [each.status_code for each in found] == [503]
    assert found[0].json()["error"]["code"] == "draining"
    until(endless.tickets[0].ended.is_set, "it went on without its client")


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        ((200, 200), 200),
        ((400, 200), 400),
        ((404, 200), 200),
        ((404, 404), 404),
        ((404, 409, 200), 409),
        ((409, 503), 503),
    ],
)
def test_of_all_replicas_one_says_how_it_went(statuses: Sequence[int], told: int) -> None:
    """Those that do not know a session say nothing of it, unless none does."""
    answers = [Answer(f"replica {n}", status, (), b"{}") for n, status in enumerate(statuses)]
    assert merged("/v1/stats", answers).status_code == told


def test_without_a_replica_nobody_is_told_of_sessions() -> None:
    with listening(front_app(Local({}), SETTINGS, PrefixRouter())) as at:
        answer = at.http.get("/v1/kv/sessions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")


def _session(*figures: int, id: str = "a", pinned: bool = False, until: float | None = None) -> dict[str, Any]:
    names = ("requests", "prompt_tokens", "cached_tokens", "bytes", "first_seen", "last_used")
    told = dict(zip(names, figures, strict=True))
    return {"id": id, "of": figures[-1], **told, "pinned": pinned, "pinned_until": until}


@pytest.mark.parametrize(
    ("pins", "pinned", "until"),
    [
        ([(False, None), (False, None)], False, None),
        ([(True, 5.0), (True, 7.0)], True, 7.0),
        ([(True, 5.0), (False, None)], True, 5.0),
        ([(True, 5.0), (True, None)], True, None),  # one has no end
    ],
)
def test_one_session_of_several_replicas(pins: Sequence[tuple[bool, Any]], pinned: bool, until: float | None) -> None:
    """Of those with requests the one that was used last tells the rest."""
    (a, b), c = pins, (False, None)
    told = [
        _session(3, 100, 25, 7, 10, 20, pinned=a[0], until=a[1]),
        _session(1, 20, 0, 1, 12, 30, pinned=b[0], until=b[1]),
        _session(0, 0, 0, 0, 40, 40, pinned=c[0], until=c[1]),
    ]
    for order in (told, told[::-1]):
        answers = [Answer(str(n), 200, (), json.dumps(each).encode()) for n, each in enumerate(order)]
        found = json.loads(bytes(merged("/v1/kv/sessions/a", answers).body))
        wanted = _session(4, 120, 25, 8, 10, 40, pinned=pinned, until=until) | {"of": 30, "cached_share": 0.2083}
        assert found == wanted
    unused = [Answer("0", 200, (), json.dumps(told[2]).encode())]
    assert json.loads(bytes(merged("/v1/kv/sessions/a", unused).body))["cached_share"] == 0.0


def test_a_list_and_an_end_of_sessions_of_several_replicas() -> None:
    told = [[_session(1, 9, 0, 1, 1, 5), _session(1, 9, 0, 1, 1, 9, id="b")], [_session(2, 9, 0, 1, 1, 7)], []]
    answers = [Answer(str(n), 200, (), json.dumps({"data": each}).encode()) for n, each in enumerate(told)]
    data = json.loads(bytes(merged("/v1/kv/sessions", answers).body))["data"]
    assert [(each["id"], each["requests"]) for each in data] == [("b", 1), ("a", 3)]
    freed: list[dict[str, int]] = [{"ram": 1}, {"ram": 2, "disk": 4}]
    bodies = [json.dumps({"deleted": True, "freed_bytes": each}).encode() for each in freed]
    gone = [Answer(str(n), 200, (), body) for n, body in enumerate(bodies)]
    assert json.loads(bytes(merged("/v1/kv/sessions/a", gone).body))["freed_bytes"] == {"ram": 3, "disk": 4}


def test_figures_of_replicas_are_one_page() -> None:
    page = '# HELP a Of a.\n# TYPE a counter\na_total{x="1"} 2.0\n# HELP b Of b.\n# TYPE b gauge\nb 3.0\n'
    assert merged_figures({"one": page, "two": page}) == (
        '# HELP a Of a.\n# TYPE a counter\na_total{replica="one",x="1"} 2.0\na_total{replica="two",x="1"} 2.0\n'
        '# HELP b Of b.\n# TYPE b gauge\nb{replica="one"} 3.0\nb{replica="two"} 3.0\n'
    )


def test_what_a_cluster_lacks_is_named() -> None:
    assert lacking(needed(None, 4, 1), {"CPU": 2.0}) == {"CPU": 2.0}
    assert lacking(needed({"num_gpus": 1, "num_cpus": 0}, 4, 1), {"CPU": 2.0}) == {"GPU": 4.0}
    assert lacking(needed({"num_cpus": 0.5, "resources": {"fast": 1}}, 4, 1), {"CPU": 2.0}) == {"fast": 4.0}
    assert not lacking(needed({"num_cpus": 0.5}, 4, 1), {"CPU": 2.0, "node": 1})
