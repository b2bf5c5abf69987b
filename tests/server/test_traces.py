"""Traces of OpenTelemetry, as its SDK exports them."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.internals.cli import main
from tests.internals.server import make_app
from tests.server.conftest import SETTINGS, Listening, listening
from tests.server.fake_engine import FakeEngine
from tests.server.wire import until

sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
otlp = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")

ASK: list[Any] = [{"role": "user", "content": "Where does Rosalind live?"}]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Spans = Callable[[int], list[Any]]


@pytest.fixture
def traced(tokenizer: Any, engine: FakeEngine) -> Iterator[tuple[Listening, Spans]]:
    """A server, and its spans so far once there are so many."""
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))

    def spans(count: int) -> list[Any]:
        end = time.monotonic() + 10
        while len(exporter.get_finished_spans()) < count and time.monotonic() < end:
            time.sleep(0.01)
        return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)

    with listening(make_app(engine, tokenizer, SETTINGS, tracer_provider=provider)) as at:
        yield at, spans


def test_a_request_has_a_span_and_those_of_its_phases(traced: tuple[Listening, Spans], engine: FakeEngine) -> None:
    at, spans = traced
    at.openai.chat.completions.create(model="reader", messages=ASK, seed=3, extra_headers={"traceparent": PARENT})
    prompt = len(engine.job.ids)
    found = {span.name: span for span in spans(4)}
    assert found.keys() == {"chat reader", "queue", "prefill", "decode"}
    request = found.pop("chat reader")
    assert f"{request.context.trace_id:032x}-{request.parent.span_id:016x}" in PARENT
    assert request.kind.name == "SERVER"
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvboost_hf",
        "gen_ai.request.model": "reader",
        "gen_ai.response.model": "reader",
        "gen_ai.request.max_tokens": engine.job.options.max_tokens,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.cache_read.input_tokens": prompt // 2,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert all(span.parent.span_id == request.context.span_id for span in found.values())
    assert found["prefill"].end_time - found["prefill"].start_time == 250_000_000  # as the engine says
    assert found["decode"].start_time == found["prefill"].end_time
    assert found["prefill"].attributes["kvboost.cached_tokens.ram"] == prompt // 2
    assert found["decode"].attributes["kvboost.finish_reason"] == "stop"


def test_the_log_names_the_trace(traced: tuple[Listening, Spans], caplog: pytest.LogCaptureFixture) -> None:
    at, _ = traced
    with caplog.at_level(logging.INFO, "kvboost_hf.server.requests"):
        at.openai.chat.completions.create(model="reader", messages=ASK, extra_headers={"traceparent": PARENT})
        [fields] = until(lambda: [record.__dict__["fields"] for record in caplog.records], "no line in the log")
    assert fields["trace_id"] == PARENT.split("-")[1]
    assert fields["stop"] == 1


def test_several_answers_count_their_prompt_once(traced: tuple[Listening, Spans], engine: FakeEngine) -> None:
    at, spans = traced
    body = {"model": "reader", "messages": ASK, "n": 2, "stream": True}
    assert "[DONE]" in at.http.post("/v1/chat/completions", json=body).text
    [request] = [span for span in spans(7) if span.name == "chat reader"]
    assert request.attributes["gen_ai.usage.input_tokens"] == len(engine.job.ids)
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
    assert request.attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")


def test_no_span_has_text(traced: tuple[Listening, Spans], engine: FakeEngine) -> None:
    at, spans = traced
    at.http.post("/v1/chat/completions", json={"model": "reader", "messages": ASK, "stop": ["Rosalind"]})
    engine.failure = "Rosalind was not computed."
    at.http.post("/v1/chat/completions", json={"model": "reader", "messages": ASK})
    at.http.post("/v1/completions", json={"model": "reader", "prompt": "Rosalind", "max_tokens": "Rosalind"})
    told = "".join(span.to_json() for span in spans(9))
    assert "Rosalind" not in told
    assert "piano" not in told


def test_what_fails_is_an_error(traced: tuple[Listening, Spans], engine: FakeEngine) -> None:
    at, spans = traced
    engine.failure = "No memory."
    assert at.http.post("/v1/completions", json={"model": "reader", "prompt": "a"}).status_code == 500
    assert at.http.post("/v1/completions", json={"model": "other", "prompt": "a"}).status_code == 404
    engine.error = RuntimeError("of the server")
    assert at.http.post("/v1/completions", json={"model": "reader", "prompt": "a"}).status_code == 500
    failed, unknown, broken = (span for span in spans(6) if span.name == "text_completion reader")
    for one in (failed, broken):
        assert (one.status.status_code.name, one.attributes["error.type"]) == ("ERROR", "500")
    assert (unknown.status.status_code.name, unknown.attributes["error.type"]) == ("UNSET", "404")


def test_polls_and_strangers_have_no_spans(tokenizer: Any, engine: FakeEngine) -> None:
    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    app = make_app(engine, tokenizer, type(SETTINGS)(model_name="reader", api_keys=("key",)), tracer_provider=provider)
    with listening(app) as at:
        at.http.get("/health")
        assert at.http.post("/v1/completions", json={}, headers={"traceparent": PARENT}).status_code == 401
    assert not exporter.get_finished_spans()


def test_spans_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.internals.server import otlp_provider

    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
        provider = otlp_provider()
        provider.get_tracer("a").start_span("one").end()
        provider.shutdown()
        collector.shutdown()
    [(path, body)] = received
    assert path == "/v1/traces"
    assert b"ours" in body
    assert b"one" in body


def test_without_the_extra_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(sys.modules, "kvboost_hf.server.http.traces", raising=False)
    assert main(["serve", "--otel", "--port", "0"]) == 2
    assert "pip install '.[otel]' in a clone" in capsys.readouterr().err
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert main(["serve", "--port", "0"]) == 2
    assert "pip install '.[otel]' in a clone" in capsys.readouterr().err
    assert main(["serve", "--no-otel", "--chunk-size", "100"]) == 2
    assert "chunk_size" in capsys.readouterr().err
