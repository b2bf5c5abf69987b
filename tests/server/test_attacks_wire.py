"""Clients without a key that would stop the server from the wire, and how it ends while others ask."""

import asyncio
import http.client
import json
import logging
import queue
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvboost_hf.assets import load_embedded
from tests.internals.server import (
    ConnectionLimits,
    Connections,
    DrainingError,
    Finished,
    FrontServer,
    Job,
    JobEvent,
    LimitedProtocol,
    ModelEngine,
    SamplingOptions,
    connections_that_fit,
    make_app,
)
from tests.server.conftest import SETTINGS
from tests.server.fake_engine import FakeEngine, FakeTicket
from tests.server.wire import CHAT, HALF, WAIT_S, Slow, Wire, in_a_thread, post, process, running, until

pytestmark = pytest.mark.daily

ASK: dict[str, Any] = {"model": "reader", "messages": [{"role": "user", "content": "Who?"}]}


class Ending(FakeEngine):
    """Ends as an engine does: after its time, it cancels what is left."""

    def __init__(self, *says: str) -> None:
        super().__init__(*says)
        self.told, self.goes_on = threading.Event(), threading.Event()  # that it is to end, and does so
        self.goes_on.set()

    def drain(self, timeout_s: float) -> bool:
        super().drain(timeout_s)
        self.told.set()
        assert self.goes_on.wait(WAIT_S)
        end = time.monotonic() + timeout_s
        ended = all(ticket.ended.wait(max(0, end - time.monotonic())) for ticket in self.tickets)
        for ticket in self.tickets:
            ticket.cancel()
        return ended

    def load(self) -> dict[str, int]:
        return super().load() | {"draining": self.drained is not None}


@pytest.fixture
def engine() -> FakeEngine:
    return Ending("Anna ", "plays.")


@pytest.fixture
def endless() -> Ending:
    """Says one piece, and then nothing until it is cancelled."""
    engine = Ending("a", "b")

    def wait(ticket: FakeTicket, piece: int) -> None:
        if piece:
            assert ticket.cancelled.wait(WAIT_S)

    engine.before = wait
    return engine


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """What the server logs."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[assignment]
    root = logging.getLogger()
    root.addHandler(handler)
    with caplog.at_level(logging.INFO):
        yield found
    root.removeHandler(handler)


def answer(connection: socket.socket) -> http.client.HTTPResponse:
    found = http.client.HTTPResponse(connection)
    found.begin()
    return found


def dropped(connection: socket.socket) -> bool:
    """Wait until the server ends a connection."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionResetError:
        pass
    return True


# Connections


def test_half_open_connections_do_not_keep_others_out(
    engine: FakeEngine, tokenizer: Any, log: list[logging.LogRecord]
) -> None:
    with running(engine, tokenizer, max_connections=100) as at, Slow(at, 300):
        for _ in range(10):
            assert at.health() == 200
            time.sleep(0.05)
        assert at.server is not None
        assert len(at.server.connections_of) <= 100
    assert any("dropped for others" in record.getMessage() for record in log)
    assert len([record for record in log if record.levelno > logging.INFO]) < 20


@pytest.mark.slow
def test_a_process_with_few_descriptors(tmp_path: Path) -> None:
    import resource

    few = (256, 256)
    with (
        process(tmp_path / "log", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few)) as (_, at),
        Slow(at, 600),
    ):
        for _ in range(20):
            assert at.health() == 200
            time.sleep(0.05)
    told = (tmp_path / "log").read_text()
    assert len(told) < 20_000
    assert "Traceback" not in told


def test_without_descriptors_the_log_has_a_line(
    engine: FakeEngine, tokenizer: Any, log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(engine, tokenizer, max_connections=500) as at:
        taken, failures = socket.socket.accept, iter(range(40))

        def accept(listener: socket.socket) -> Any:
            if next(failures, None) is not None:
                raise OSError(24, "Too many open files")
            return taken(listener)

        monkeypatch.setattr(socket.socket, "accept", accept)
        until(lambda: at.health(WAIT_S) == 200, "it never recovered")
        until(lambda: any("descriptors" in record.getMessage() for record in log), "the log has nothing")
    assert len([record for record in log if record.levelno > logging.INFO]) < 15
    assert not [record for record in log if record.exc_info]


def test_a_server_that_ends_does_not_listen_again(caplog: pytest.LogCaptureFixture) -> None:
    """What asyncio tells of its attempt goes into no log; other failures do, and so did this one before."""
    listening, other = "Exception in callback BaseSelectorEventLoop._start_serving()", "Exception in callback f()"
    told = list[list[str]]()

    async def fail() -> None:
        connections = Connections(ConnectionLimits(most=4, header_s=10, write_s=10))
        connections.start()
        for end in (lambda: None, connections.stop):
            end()
            caplog.clear()
            for message in (listening, other):
                asyncio.get_running_loop().call_exception_handler({"message": message})
            told.append([record.getMessage() for record in caplog.records if record.name == "asyncio"])

    asyncio.run(fail())
    assert told == [[listening, other], [other]]


def test_when_a_client_has_kept_the_server_waiting() -> None:
    """Whoever reads a little, or sends a body, has time; nobody has more than the limits."""
    size, among = 100, SimpleNamespace(limits=ConnectionLimits(most=4, header_s=10, write_s=5))
    wire = SimpleNamespace(get_write_buffer_size=lambda: size)
    it: Any = SimpleNamespace(among=among, _wire=wire, _unread=None, cycle=None)
    unread, late = "did not read their answers", "sent no whole header in time"
    for now, size, told in (  # noqa: B007
        *((0.0, 100, None), (5.0, 100, None), (5.5, 100, unread)),
        *((5.5, 90, None), (10.5, 90, None), (11.0, 90, unread)),
        *((10.0, 0, None), (10.5, 0, late)),
        *((20.0, 100, None), (25.0, 100, None), (25.5, 100, unread)),
    ):
        assert LimitedProtocol.overdue(it, now, 0.0) == told, now
    size, it.cycle = 0, SimpleNamespace(response_complete=False)
    assert LimitedProtocol.overdue(it, 100.0, 0.0) is None
    it.cycle.response_complete, it._wire = True, None
    assert LimitedProtocol.overdue(it, 100.0, 0.0) == late


def test_nobody_waits_for_a_handshake_with_who_was_dropped() -> None:
    wire, context = SimpleNamespace(is_closing=lambda: True), ssl.create_default_context()
    asyncio.run(LimitedProtocol._encrypt(SimpleNamespace(), wire, context))  # type: ignore[arg-type]


def test_a_header_must_come_in_time(engine: FakeEngine, tokenizer: Any) -> None:
    with running(engine, tokenizer, header_timeout_s=0.5) as at:
        silent, half = at.open(), at.open(HALF)
        used = at.open(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(used).status == 200
        used.sendall(HALF)
        for connection in (silent, half, used):
            with connection:
                assert dropped(connection)


def test_a_body_must_come_in_time(engine: FakeEngine, tokenizer: Any) -> None:
    with running(engine, tokenizer, body_timeout_s=0.5) as at, at.open(post(b"{", "Content-Length: 99")) as slow:
        found = answer(slow)
        assert (found.status, found.headers["connection"]) == (408, "close")
        assert json.load(found)["error"]["code"] == "request_timeout"
        assert dropped(slow)
    assert not engine.tickets


def test_who_does_not_read_is_dropped(endless: Ending, tokenizer: Any) -> None:
    many = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200
    with running(endless, tokenizer, write_timeout_s=0.5, header_timeout_s=60.0) as at:
        assert at.server is not None
        body = json.dumps(ASK | {"stream": True}).encode()
        with at.open(many, receive_buffer=4096), at.open(post(body, f"Content-Length: {len(body)}")) as reader:
            assert answer(reader).status == 200
            until(lambda: len(at.server.connections_of) == 1, "it was never dropped")
            time.sleep(1)
            # One that waits for the server is not one that does not read.
            assert len(at.server.connections_of) == 1
            assert not endless.tickets[0].cancelled.is_set()
            endless.tickets[0].cancel()
            assert dropped(reader) or True


def test_where_all_are_busy_the_new_one_is_refused(endless: Ending, tokenizer: Any) -> None:
    body = json.dumps(ASK).encode()
    whole = post(body, f"Content-Length: {len(body)}")
    with running(endless, tokenizer, max_connections=4) as at:
        busy = [at.open(whole) for _ in range(3)]
        until(lambda: len(endless.tickets) == 3, "they were not taken")
        with at.open(whole) as new:
            assert dropped(new)
        for ticket in endless.tickets:
            assert not ticket.cancelled.is_set()
            ticket.cancel()
        for one in busy:
            with one:
                assert answer(one).status == 503
        until(lambda: at.health() == 200, "there is no room again")


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="this system hands over silent connections")
def test_many_at_once_are_all_answered(engine: FakeEngine, tokenizer: Any) -> None:
    """More than there may be: those who have not sent their request do not push each other out."""
    with running(engine, tokenizer, max_connections=64) as at, ThreadPoolExecutor(16) as pool:
        opened = list(pool.map(lambda _: at.open(), range(500)))

        def ask(one: socket.socket) -> int:
            with one:
                one.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return answer(one).status

        assert list(pool.map(ask, opened)) == [200] * 500


def test_limits_follow_from_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    for soft, most in ((256, 128), (1024, 820), (20_000, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections_that_fit() == most


# Bodies


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_told_so(engine: FakeEngine, tokenizer: Any, declared: bool) -> None:
    large = b"[" + b" " * 4_000_000
    with running(engine, tokenizer, max_body_bytes=1_000_000) as at:
        pieces: Any = large if declared else (large[at : at + 50_000] for at in range(0, len(large), 50_000))
        found = httpx.post(at.url + CHAT, content=pieces, headers={"Content-Type": "application/json"}, timeout=WAIT_S)
        assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
        assert found.headers["connection"] == "close"
        other = http.client.HTTPConnection("127.0.0.1", at.port, timeout=WAIT_S)
        other.request("POST", CHAT, iter([large]) if not declared else large, encode_chunked=not declared)
        assert other.getresponse().status == 413
        other.close()
        assert at.health() == 200


def test_who_asks_first_is_told_at_once(engine: FakeEngine, tokenizer: Any) -> None:
    with running(engine, tokenizer, max_body_bytes=1000, api_keys=("key",)) as at:
        for key, status in (("key", 413), ("other", 401)):
            asks = ("Content-Length: 5000", "Expect: 100-continue", f"Authorization: Bearer {key}")
            with at.open(post(b"", *asks)) as one:
                found = answer(one)
                assert (found.status, found.headers["connection"]) == (status, "close")
                assert "error" in json.load(found)
                assert dropped(one)


def test_more_than_is_heard_out_ends_the_connection(engine: FakeEngine, tokenizer: Any) -> None:
    with running(engine, tokenizer, max_body_bytes=1000) as at, at.open(post(b"", f"Content-Length: {2**40}")) as one:
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            one.sendall(bytes(100 * 2**20))


@pytest.mark.parametrize("path", ["/nowhere", "/health", CHAT])
def test_answers_before_the_body_was_read_end_the_connection(engine: FakeEngine, tokenizer: Any, path: str) -> None:
    with running(engine, tokenizer, api_keys=("key",)) as at:
        client = http.client.HTTPConnection("127.0.0.1", at.port, timeout=WAIT_S)
        client.request("POST", path, b" " * 3_000_000)
        found = client.getresponse()
        assert found.status == (405 if path == "/health" else 401)
        assert found.headers["connection"] == "close"
        client.close()


@pytest.mark.parametrize("length", [0, 4, 99])
def test_a_body_of_two_lengths_ends_the_connection(engine: FakeEngine, tokenizer: Any, length: int) -> None:
    """A proxy that counts by the other length takes what follows for another request, of another client."""
    whole = json.dumps({"messages": [{"role": "user", "content": "Who?"}]}).encode()
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(whole), whole)
    both = (f"Content-Length: {length}", "Transfer-Encoding: chunked")
    with running(engine, tokenizer) as at, at.open(post(body, *both)) as one:
        found = answer(one)
        assert (found.status, found.headers["connection"]) == (400, "close")
        assert "Content-Length or Transfer-Encoding" in json.load(found)["error"]["message"]
        assert dropped(one)
    assert not engine.tickets


def test_who_goes_away_while_sending(engine: FakeEngine, tokenizer: Any, log: list[logging.LogRecord]) -> None:
    with running(engine, tokenizer) as at:
        at.open(post(b"{", "Content-Length: 99")).close()
        [line] = until(lambda: [one for one in log if one.name == "kvboost_hf.server.requests"], "nothing was logged")
    assert vars(line)["fields"]["status"] == 499
    assert not [record for record in log if record.levelno > logging.INFO]


def test_nonsense_has_a_line_in_the_log_and_no_more(
    engine: FakeEngine, tokenizer: Any, log: list[logging.LogRecord]
) -> None:
    with running(engine, tokenizer, api_keys=("key",)) as at:
        for sent in (
            b"\x16\x03\x01\x02\x00nonsense\r\n\r\n",
            post(b"no length\r\n", "Transfer-Encoding: chunked"),
            post(b"5\r\nhello\r\nno length\r\n", "Transfer-Encoding: chunked", path="/health"),
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        ):
            with at.open(sent) as one:
                assert answer(one).status in (400, 401)  # 401 where the header was right
                one.shutdown(socket.SHUT_WR)
                assert dropped(one)
        assert at.health() == 200
    assert not [record for record in log if record.exc_info]


def test_websockets_are_told_to_use_http(tokenizer: Any, log: list[logging.LogRecord]) -> None:
    with running(FakeEngine(), tokenizer) as at:
        for path, status in (("/health", 200), ("/v1/responses", 426), ("/v1/realtime", 404)):
            head = (
                f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
            )
            with at.open(head.encode()) as one:
                found = answer(one)
                assert found.status == status
                assert (status == 426) == (found.headers["upgrade"] == "HTTP/1.1") == (b"with POST" in found.read())
    assert not [record for record in log if record.levelno > logging.INFO]


# The end


def _ask(at: Wire, found: list[Any], **more: Any) -> threading.Thread:
    def ask() -> None:
        found.append(httpx.post(at.url + CHAT, json=ASK | more, timeout=WAIT_S))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_a_server_that_ends_answers_all(endless: Ending, tokenizer: Any, log: list[logging.LogRecord]) -> None:
    found: list[httpx.Response] = []
    endless.goes_on.clear()
    with running(endless, tokenizer, drain_s=1.5) as at:
        assert at.server is not None
        asking = [_ask(at, found), _ask(at, found), _ask(at, found, stream=True)]
        until(lambda: len(endless.tickets) == 3, "they were not taken")
        half = at.open(HALF)
        at.server.should_exit = True
        assert endless.told.wait(WAIT_S)
        refused = httpx.post(at.url + CHAT, json=ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        ready = httpx.get(at.url + "/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        endless.goes_on.set()
        for thread in asking:
            thread.join(WAIT_S)
    half.close()
    streams = [one for one in found if one.status_code == 200]
    assert [one.json()["error"]["code"] for one in found if one not in streams] == ["cancelled"] * 2
    assert [one.status_code for one in found if one not in streams] == [503] * 2
    assert '"code": "cancelled"' in streams[0].text
    assert not [record for record in log if record.levelno > logging.INFO or record.exc_info]


def test_answers_that_nobody_reads_at_the_end_are_no_errors(tokenizer: Any, log: list[logging.LogRecord]) -> None:
    engine = Ending(*["many words " * 1000] * 1000)
    settings = replace(SETTINGS, port=0, drain_s=1.0)
    server = FrontServer(make_app(engine, tokenizer, settings), engine, settings, others_listen=True)
    body = json.dumps(ASK | {"stream": True}).encode()
    with in_a_thread(server) as at:
        one = at.open(post(body, f"Content-Length: {len(body)}"), receive_buffer=4096)
        until(lambda: any(it.flow and it.flow.write_paused for it in [*server.server_state.connections]), "it is read")
    one.close()
    assert not [record for record in log if record.levelno > logging.INFO]


def test_told_again_a_server_waits_no_longer(endless: Ending, tokenizer: Any) -> None:
    found: list[httpx.Response] = []
    with running(endless, tokenizer, drain_s=600.0) as at:
        assert at.server is not None
        asking = _ask(at, found)
        until(lambda: endless.tickets, "it was not taken")
        at.server.handle_exit(signal.SIGTERM, None)
        assert endless.told.wait(WAIT_S)
        assert not endless.tickets[0].cancelled.is_set()
        at.server.handle_exit(signal.SIGTERM, None)
        asking.join(WAIT_S)
    assert found[0].status_code == 503


def test_an_engine_gives_up_what_is_left() -> None:
    engine = ModelEngine(*load_embedded(), max_batch_size=1)
    events: queue.Queue[JobEvent] = queue.Queue()
    options = SamplingOptions(max_tokens=7000, logit_bias={end: -100.0 for end in range(4)})
    for _ in range(3):
        engine.submit(Job(ids=[5, 6, 7], options=options), events.put)
    texts = engine.embed([[5, 6]] * 5000)
    assert not engine.drain(0.2)
    reasons: list[str] = []
    while len(reasons) < 3:
        if isinstance(event := events.get(timeout=WAIT_S), Finished):
            reasons.append(event.reason)
    assert reasons == ["cancelled"] * 3
    assert isinstance(texts.exception(WAIT_S), DrainingError)
    assert engine.drain(WAIT_S)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "twice"), [(signal.SIGTERM, False), (signal.SIGTERM, True), (getattr(signal, "SIGHUP", None), False)]
)
def test_a_process_that_ends(tmp_path: Path, number: signal.Signals | None, twice: bool) -> None:
    if number is None:
        pytest.skip("Windows has no such signal")
    found: list[httpx.Response] = []
    with process(tmp_path / "log", "--drain-s", "600" if twice else "1") as (server, at):
        long = {"max_tokens": 7000, "temperature": 0, "logit_bias": {str(end): -100 for end in range(4)}}
        asking = [_ask(at, found, **long), _ask(at, found, **long, stream=True)]
        until(lambda: httpx.get(f"{at.url}/v1/stats").json()["running"] == 2, "they do not run")
        server.send_signal(number)
        if twice:
            until(lambda: httpx.get(f"{at.url}/ready").status_code == 503, "it does not drain")
            server.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(WAIT_S)
        assert server.wait(WAIT_S) == 0
    told = (tmp_path / "log").read_text()
    assert "Traceback" not in told
    assert "exception" not in told
    assert sorted(one.status_code for one in found) == [200, 503]
    assert all('"code":"cancelled"' in one.text.replace(" ", "") for one in found)
