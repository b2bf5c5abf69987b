"""What operators ask of a server: keys, figures, request ids, origins."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.server import (
    Job,
    JsonLines,
    Keep,
    ModelEngine,
    QueueFullError,
    SamplingOptions,
    ServerSettings,
    make_app,
)
from tests.server.conftest import SETTINGS, Listening, Serve, listening
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "Who?"}]
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/reader"),
    ("GET", "/v1/stats"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/warm"),
    ("POST", "/v1/embeddings"),
    *(("POST", f"/api/{name}") for name in ("chat", "generate", "show", "embed", "embeddings")),
    *(("GET", f"/api/{name}") for name in ("tags", "ps", "version")),
    ("GET", "/v1/kv/sessions"),
    ("GET", "/v1/kv/sessions/{id}"),
    ("PATCH", "/v1/kv/sessions/{id}"),
    ("DELETE", "/v1/kv/sessions/{id}"),
]


def test_every_route_is_in_the_list_of_this_test(at: Listening) -> None:
    found = {
        (method.upper(), path.replace("{name}", "reader"))
        for path, methods in at.http.get("/openapi.json").json()["paths"].items()
        for method in methods
    }
    assert found == {*ROUTES, ("GET", "/health"), ("GET", "/ready")} - {("GET", "/openapi.json"), ("GET", "/nowhere")}


def test_the_page_needs_no_key_and_knows_none(serve: Serve, engine: FakeEngine) -> None:
    page = serve(engine, api_keys=("secret-key",)).http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "v1/chat/completions" in page.text
    assert "secret-key" not in page.text


def test_all_routes_that_tell_something_need_a_key(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, api_keys=("right", "other"))
    for header in (None, "Bearer", "Bearer wrong", "Basic right", "right", "Bearer rig\xfft"):
        headers = {} if header is None else {"authorization": header.encode("latin-1")}
        for method, path in ROUTES:
            response = at.http.request(method, path, headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401, path
            error = response.json()["error"]
            if path.startswith("/api/"):
                assert "API key" in error
                continue
            assert error["type"] == "authentication_error"
            assert error.get("code") == (None if path.startswith("/v1/messages") else "invalid_api_key")
            assert "right" not in response.text
        for path in ("/health", "/ready"):
            assert at.http.get(path, headers=headers).status_code == 200  # type: ignore[arg-type]
    assert not engine.tickets


@pytest.mark.parametrize("key", ["right", "other"])
def test_each_key_opens(serve: Serve, engine: FakeEngine, key: str) -> None:
    at = serve(engine, api_keys=("right", "other"))
    assert at.openai.with_options(api_key=key).models.list().data[0].id == "reader"


def test_models(at: Listening) -> None:
    assert at.openai.models.retrieve("reader").owned_by == "kvboost_hf"
    assert at.http.get("/v1/models/org/other").json()["error"]["code"] == "model_not_found"


def test_figures(serve: Serve) -> None:
    engine = FakeEngine("Anna ", "plays ", "the ", "piano.")
    at = serve(engine)
    at.openai.chat.completions.create(model="reader", messages=ASK)
    prompt = len(engine.job.ids)
    page = at.http.get("/metrics").text
    for line in (
        "kvboost_time_to_first_token_seconds_count 1.0",
        "kvboost_inter_token_seconds_count 3.0",
        'kvboost_finished_total{reason="stop"} 1.0',
        'kvboost_finished_total{reason="cancelled"} 0.0',
        f'kvboost_tokens_total{{of="prompt"}} {prompt}.0',
        'kvboost_tokens_total{of="answer"} 4.0',
        f'kvboost_cached_tokens_total{{tier="ram"}} {prompt // 2}.0',
        'kvboost_engine{figure="running"} 1.0',
        'kvboost_engine{figure="store.tiers.ram.bytes"} 7.0',
    ):
        assert line in page.splitlines()
    assert at.http.get("/v1/stats").json() == engine.stats()


def test_warming_computes_prompts_and_says_nothing(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    texts = ["Anna lives in Oslo. She plays the piano.", "Tom has two goats and a lamp."]
    found = at.http.post("/v1/warm", json={"texts": texts}).json()
    assert [ticket.job.options.max_tokens for ticket in engine.tickets] == [0, 0]
    lengths = [len(ticket.job.ids) for ticket in engine.tickets]
    cached = sum(n // 2 for n in lengths)
    assert "'<|im_start|>system\\n' before it" in found.pop("start_reason")  # no chat begins with them
    assert found == {"object": "warm", "prompt_tokens": sum(lengths), "cached_tokens": cached, "pinned": False}
    assert {ticket.job.keep for ticket in engine.tickets} == {(Keep(share=0.5),)}
    at.http.post("/v1/warm", json={"messages": ASK, "prompt_cache_key": "tenant"})
    said = tokenizer.apply_chat_template(ASK, return_dict=False, tokenize=False).removesuffix("<|im_end|>\n")
    assert list(engine.job.ids) == tokenizer.encode(said)  # what the user says may go on
    salt = engine.job.salt
    at.openai.chat.completions.create(model="reader", messages=ASK, prompt_cache_key="tenant")
    assert engine.job.salt == salt
    assert engine.job.session == "tenant"
    told: dict[str, Any] = {"texts": ["a"]}
    body: dict[str, Any]
    for body in ({}, told | {"messages": ASK}, {"texts": []}, {"texts": [""]}, told | {"think": True}):
        assert at.http.post("/v1/warm", json=body).status_code == 400


def test_warming_more_than_the_queue_holds(serve: Serve, tokenizer: Any) -> None:
    model = load_embedded()[0]
    store = ChunkStore(model, chunk_size=16)
    engine = ModelEngine(model, tokenizer, store=store, max_batch_size=1, max_queue_size=1)
    texts = [f"Anna has {n} lamps and {n + 1} books." for n in range(8)]
    at = serve(engine)
    first, again = (at.http.post("/v1/warm", json={"texts": texts}).json() for _ in range(2))
    engine.close()
    assert first["prompt_tokens"] == again["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in texts)
    assert again["cached_tokens"] == again["prompt_tokens"] - len(texts)  # the last token of each is always computed


def test_more_answers_to_one_request_than_the_queue_holds(serve: Serve, tokenizer: Any) -> None:
    model = load_embedded()[0]
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model), max_batch_size=1, max_queue_size=2)
    at, asked = serve(engine), {"messages": ASK, "max_tokens": 2}
    assert len(at.http.post("/v1/chat/completions", json=asked | {"n": 5}).json()["choices"]) == 5

    def submit(places: int) -> None:
        engine.submit(Job(ids=[5], options=SamplingOptions(max_tokens=1), places=places), lambda event: None)

    with engine._intake.changed:  # nothing is admitted meanwhile
        submit(1)
        with pytest.raises(QueueFullError, match="1 requests are waiting, and 3 may: there is no place for 3 more"):
            submit(3)
        for places in (2, 0):
            submit(places)
    engine.close()


def test_warming_waits_for_others(at: Listening, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text is under way at a time; only where not even the first has room is the client told so."""
    taken, refusals = engine.submit, [2, 4]

    def full_at_times(job: Any, listener: Any) -> Any:
        assert all(ticket.ended.wait(20) for ticket in engine.tickets)
        calls[0] += 1
        if calls[0] in refusals:
            raise QueueFullError("full", 0.0)
        return taken(job, listener)

    calls = [0]
    monkeypatch.setattr(engine, "submit", full_at_times)
    assert at.http.post("/v1/warm", json={"texts": ["Anna.", "Tom.", "Lisa."]}).status_code == 200
    assert (calls[0], len(engine.tickets)) == (5, 3)
    refusals.append(6)
    assert at.http.post("/v1/warm", json={"texts": ["Anna.", "Tom."]}).status_code == 429
    assert len(engine.tickets) == 3


def test_request_ids(at: Listening) -> None:
    assert at.http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = [at.http.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"] for _ in range(2)]
    assert len({*made, "a b"}) == 3
    assert at.http.get("/nowhere").headers["x-request-id"]


def test_log_lines_are_json(tokenizer: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(engine, tokenizer, SETTINGS)
    with caplog.at_level(logging.INFO, "kvboost_hf.server.requests"), listening(app) as at:
        at.http.get("/nowhere", headers={"X-Request-Id": "mine"})
        at.openai.chat.completions.create(model="reader", messages=ASK, n=2)
    lost, answered = (json.loads(JsonLines().format(record)) for record in caplog.records)
    assert {"request_id": "mine", "status": 404, "path": "/nowhere", "level": "info"}.items() <= lost.items()
    tokens = {"prompt_tokens": 2 * len(engine.job.ids), "completion_tokens": 8}
    times = {"queue_s": 0.0, "ttft_s": 0.25, "cached_tokens": 2 * (len(engine.job.ids) // 2)}
    assert {"status": 200, "stop": 2, **tokens, **times}.items() <= answered.items()


@pytest.mark.parametrize("root", ["/llm", "/v1"])
def test_an_app_below_a_path(tokenizer: Any, engine: FakeEngine, root: str) -> None:
    """As Ray Serve has it by its `route_prefix`, and Uvicorn by `--root-path`."""
    app = make_app(engine, tokenizer, replace(SETTINGS, api_keys=("key",)))

    async def below(scope: Any, receive: Any, send: Any) -> None:
        mounted = {"root_path": root, "path": root + scope["path"]} if scope["type"] == "http" else {}
        await app({**scope, **mounted}, receive, send)

    with listening(below) as at:
        for path in ("/health", "/ready", "/", "/docs"):
            assert at.http.get(path).status_code == 200
        assert at.http.get("/v1/models").status_code == 401
        at.http.headers["x-api-key"] = "key"
        assert at.http.get("/openapi.json").status_code == 200
        for path in ("/v1/chat/completions", "/chat/completions"):
            assert at.http.post(path, json={"messages": ASK}).status_code == 200
        assert at.http.post("/v1/messages", json={}).json()["type"] == "error"
        assert isinstance(at.http.post("/api/chat", json={}).json()["error"], str)


def test_other_origins_are_let_in_only_if_asked(serve: Serve, engine: FakeEngine) -> None:
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    closed, opened = serve(engine), serve(engine, cors_origins=("http://page",), api_keys=("key",))
    assert "access-control-allow-origin" not in closed.http.options("/v1/models", headers=asks).headers
    told = opened.http.options(
        "/v1/chat/completions", headers=asks | {"Access-Control-Request-Headers": "authorization"}
    )
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] == "http://page"
    refused = opened.http.get("/v1/models", headers={"Origin": "http://page"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://page"


def test_ready_says_when_the_queue_is_full(at: Listening, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert at.http.get("/ready").json() == {"status": "ready"}
    monkeypatch.setattr(engine, "load", lambda: {"waiting": 64})  # which have come at once
    assert at.http.get("/ready").json() == {"status": "ready"}
    monkeypatch.setattr(engine, "load", lambda: {"waiting": 64, "prompts": 1, "running": 7})
    assert at.http.get("/ready").status_code == 503
    assert httpx.get(at.url + "/health").status_code == 200


def test_figures_that_take_long_hold_nobody_up(at: Listening, engine: FakeEngine, monkeypatch: Any) -> None:
    """A tier hangs while it is asked for its figures, by somebody who asks again and again."""
    begun, answers, figures = threading.Event(), threading.Event(), engine.stats

    def stats() -> dict[str, Any]:
        begun.set()
        assert answers.wait(30)
        return figures()

    monkeypatch.setattr(engine, "stats", stats)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(at.http.get, path, timeout=30) for path in ("/metrics", "/v1/stats") * 4]
        try:
            assert begun.wait(30)
            for path in ("/ready", "/health", "/v1/models"):
                assert at.http.get(path, timeout=10).status_code == 200
            assert not any(each.done() for each in asked)
        finally:
            answers.set()
        assert {each.result().status_code for each in asked} == {200}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_name": ""}, "model_name"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"port": 2**16}, "port"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_queue_size": -1}, "max_queue_size"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"max_model_len": 1}, "max_model_len"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerSettings(**({"model_name": "reader"} | change))
    assert ServerSettings(model_name="reader").host == "127.0.0.1"
