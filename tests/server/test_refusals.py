"""What is refused, and how clients are told."""

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest

from tests.internals.server import DrainingError, QueueFullError, TooLongError
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "Who?"}]
CHAT: dict[str, Any] = {"model": "reader", "messages": ASK}
_TOOL = {"type": "function", "function": {"name": "look"}}


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"messages": []}, "messages", "must have one message at least"),
        ({"messages": [{"role": "user"}]}, "messages.0", "content"),
        ({"messages": [{"role": "poet", "content": ""}]}, "messages.0.role", "assistant"),
        ({"modalities": ["text", "audio"]}, "modalities", "answers are text"),
        ({"audio": {"voice": "ash"}}, "audio", "answers are text"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options", "searches nothing"),
        ({"temperature": 3}, "temperature", "2"),
        ({"top_p": -1}, "top_p", "greater than or equal to 0"),
        ({"n": 0}, "n", "1"),
        ({"n": 17}, "n", "16"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"seed": 2**70}, "seed", ""),
        ({"stop": ["a"] * 65}, "stop", "64"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "below"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "integer"),
        ({"tool_choice": "required"}, None, "tools"),
        ({"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, None, "'no'"),
        ({"tools": [_TOOL], "tool_choice": {"type": "function", "name": "look"}}, "tool_choice.function", "required"),
        (
            {"tools": [_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.allowed_tools",
            "required",
        ),
        (
            {"tools": [_TOOL], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            "web_search",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
    ],
)
def test_what_is_not_served_is_named(at: Listening, change: dict[str, Any], param: str | None, says: str) -> None:
    error = _error(at.http.post("/v1/chat/completions", json=CHAT | change), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


def test_an_answer_that_ends_badly_says_why(at: Listening, engine: FakeEngine) -> None:
    ends: list[tuple[Any, str | None, int, str]] = [
        ("timeout", None, 504, "given up after 0.5 s"),
        ("cancelled", None, 503, "about to end"),
        ("constraint", "No token fits.", 400, "No token fits."),
        ("constraint", None, 400, "The grammar cannot be followed."),
        ("error", "No memory is left.", 500, "No memory is left."),
        ("error", None, 500, "The model failed."),
    ]
    for engine.reason, engine.failure, status, says in ends:
        assert says in _error(at.http.post("/v1/chat/completions", json=CHAT), status)["message"]


def test_bodies_that_are_no_json(at: Listening) -> None:
    for body in (
        b"",
        b"{",
        b"[]",
        b'"a"',
        b"\xff",
        b'{"model": NaN}',
        b'{"a\\ud800": 1}',
        b'{"model": "reader", "messages": 1e999}',
    ):
        _error(at.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a\ud800"}]}),
        ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/responses", {"input": "a", "metadata": {"a": "\ud800"}}),
        ("/v1/responses", {"input": "a", "instructions": "\ud800", "stream": True}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"\ud800": 1}}]}),
        ("/v1/warm", {"texts": ["\ud800"]}),
    ],
)
def test_halves_of_characters(at: Listening, path: str, body: dict[str, Any]) -> None:
    told = body if path == "/v1/warm" else {"model": "reader", **body}
    response = at.http.post(path, content=json.dumps(told), headers={"content-type": "application/json"})
    assert "texts must be valid Unicode" in _error(response, 400)["message"]


@pytest.mark.parametrize(("depth", "status"), [(80, 200), (110, 400), (300, 400), (900, 400), (960, 400), (5000, 400)])
def test_bodies_that_are_nested(at: Listening, depth: int, status: int) -> None:
    tools = '[{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]' % ("[" * depth + "]" * depth)
    body = f'{{"model": "reader", "messages": [{{"role": "user", "content": "a"}}], "tools": {tools}}}'
    response = at.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text


def test_the_sdk_raises_its_own_errors(at: Listening, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError, match="This server has 'reader'") as other_model:
        at.openai.chat.completions.create(model="gpt", messages=ASK)
    assert other_model.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as told:
        at.openai.chat.completions.create(model="reader", messages=ASK, temperature=9)
    assert told.value.param == "temperature"


def test_unknown_routes_and_methods(at: Listening) -> None:
    assert _error(at.http.get("/v2/chat"), 404)["code"] == "not_found"
    error = at.http.get("/v1/chat/completions")
    assert _error(error, 405)["code"] == "method_not_allowed"
    assert error.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine(at: Listening, engine: FakeEngine, stream: bool) -> None:
    engine.error = QueueFullError("64 wait", 2.5)
    full = at.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert _error(full, 429)["type"] == "rate_limit_error"
    assert full.headers["retry-after"] == "3"
    engine.error = TooLongError("At most 7 tokens.", 7)
    error = _error(at.http.post("/v1/chat/completions", json=CHAT | {"stream": stream}), 400)
    assert (error["code"], error["max_prompt_tokens"]) == ("context_length_exceeded", 7)
    engine.error = DrainingError("ends")
    assert _error(at.http.post("/v1/chat/completions", json=CHAT | {"stream": stream}), 503)["code"] == "draining"
    assert 'kvboost_refused_total{error="QueueFullError"}' in at.http.get("/metrics").text


def test_of_several_answers_all_are_taken_or_none(
    at: Listening, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_at_the_second(job: Any, listener: Any) -> Any:
        if len(engine.tickets) == 1:
            raise QueueFullError("full", 1)
        return taken(job, listener)

    taken = engine.submit
    monkeypatch.setattr(engine, "submit", full_at_the_second)
    engine.before = lambda ticket, piece: _wait(ticket.cancelled)
    _error(at.http.post("/v1/chat/completions", json=CHAT | {"n": 2}), 429)
    assert engine.tickets[0].ended.wait(20)
    assert len(engine.tickets) == 1


def _wait(event: Any) -> None:
    assert event.wait(20)


def test_failures_of_the_model(at: Listening, engine: FakeEngine) -> None:
    engine.failure = "out of memory"
    assert "out of memory" in _error(at.http.post("/v1/chat/completions", json=CHAT), 500)["message"]
    with pytest.raises(openai.APIError, match="out of memory"):
        list(at.openai.chat.completions.create(model="reader", messages=ASK, stream=True))
    with pytest.raises(openai.APIError, match="out of memory"):
        list(at.openai.responses.create(model="reader", input="Who?", stream=True))


def test_a_request_that_takes_too_long(at: Listening, engine: FakeEngine) -> None:
    engine.reason = "timeout"
    assert _error(at.http.post("/v1/chat/completions", json=CHAT), 504)["code"] == "timeout"


def test_failures_of_the_server_tell_nothing_of_its_inside(at: Listening, engine: FakeEngine) -> None:
    engine.error = RuntimeError("/secret/path")
    answer = at.http.post("/v1/chat/completions", json=CHAT)
    error = _error(answer, 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    with closing(HTTPConnection(at.http.base_url.host, at.http.base_url.port, timeout=20)) as connection:
        connection.connect()
        wire = connection.sock
        for _ in range(2):  # the connection goes on, as its headers say
            connection.request("POST", "/v1/chat/completions", json.dumps(CHAT))
            assert json.loads(connection.getresponse().read()) == answer.json()
            assert connection.sock is wire


@pytest.mark.parametrize("stream", [False, True])
def test_failures_of_the_server_have_the_form_of_their_api(
    serve: Serve, engine: FakeEngine, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """A page may read them, and the line of the log that says why is found by the id."""
    at = serve(engine, cors_origins=("https://page.example",))
    engine.error = RuntimeError("of the server")
    for path, form in (
        ("/v1/chat/completions", {"error"}),
        ("/v1/messages", {"type", "error", "request_id"}),
        ("/api/chat", {"error"}),
    ):
        body = CHAT | {"max_tokens": 5, "stream": stream}
        answer = at.http.post(path, json=body, headers={"Origin": "https://page.example"})
        assert (answer.status_code, set(answer.json())) == (500, form)
        assert isinstance(answer.json()["error"], str) == path.startswith("/api/")
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        id = answer.headers["x-request-id"]
        [told] = [one for one in caplog.records if one.exc_info and getattr(one, "fields", {}).get("request_id") == id]
        assert told.levelname == "ERROR"


def test_embeddings_are_not_made(at: Listening) -> None:
    assert _error(at.http.post("/v1/embeddings", json={"input": "a", "model": "reader"}), 404)["message"]


def test_a_body_that_is_too_large(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, max_body_bytes=1000)
    assert at.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    large = CHAT | {"messages": [{"role": "user", "content": "a" * 1000}]}
    assert _error(at.http.post("/v1/chat/completions", json=large), 413)["code"] == "body_too_large"
    assert not [ticket for ticket in engine.tickets if len(ticket.job.ids) > 500]


def test_a_model_without_a_chat_template(engine: FakeEngine, serve: Serve, tokenizer: Any) -> None:
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        at = serve(engine)
        assert "/v1/completions" in _error(at.http.post("/v1/chat/completions", json=CHAT), 400)["message"]
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        assert "alternate" in _error(at.http.post("/v1/chat/completions", json=CHAT), 400)["message"]
        tokenizer.chat_template = "{{ messages }}"
        assert _error(at.http.post("/v1/chat/completions", json=CHAT | {"tools": [_TOOL]}), 400)["param"] == "tools"
    finally:
        tokenizer.chat_template = template
