"""Fields that the server does not know are ignored and named; strict servers refuse them."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from tests.internals.server import Body
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine
from tests.server.wire import until

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "Who?"}]
CHAT: dict[str, Any] = {"model": "reader", "messages": ASK, "temperature": 0}
ECHO = {
    "role": "assistant",
    "content": "Anna.",
    "refusal": None,
    "annotations": [{"type": "url_citation"}],
    "provider_specific_fields": {"citations": None},
    "audio": None,
    "function_call": None,
    "tool_calls": None,
}


def _ids(engine: FakeEngine, at: Listening, change: dict[str, Any]) -> tuple[list[int], Any]:
    response = at.http.post("/v1/chat/completions", json=CHAT | change)
    assert response.status_code == 200, response.text
    return list(engine.job.ids), response


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"chat_id": "c", "features": {"web_search": False}}, "chat_id, features"),
        (
            {"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "flex"},
            "user, metadata, store, service_tier",
        ),
        ({"chat_id": None}, None),
        ({"odd name\r\nx-evil: 1": 1, "größe": 1, "a" * 100: 1}, f"odd?name??x-evil??1, gr??e, {'a' * 64}"),
        ({"messages": [ECHO, *ASK]}, "messages.annotations, messages.provider_specific_fields"),
        ({"messages": [ECHO | {"annotations": None}] * 2 + ASK}, "messages.provider_specific_fields"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}
                ]
            },
            "messages.content.cache_control",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "eager": 1}]}, "tools.eager"),
        ({f"field{n}": n for n in range(50)}, ", ".join(f"field{n}" for n in range(32))),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named(
    at: Listening, engine: FakeEngine, change: dict[str, Any], named: str | None, stream: bool
) -> None:
    _, response = _ids(engine, at, change | {"stream": stream})
    assert response.headers.get("x-kvboost-ignored") == named
    assert "x-evil" not in response.headers


def test_what_is_ignored_is_not_in_the_prompt(at: Listening, engine: FakeEngine) -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    plain, _ = _ids(engine, at, {"messages": [{"role": "assistant", "content": "Anna."}, *ASK], "tools": [tool]})
    noisy = tool | {"cache_control": {"type": "ephemeral"}, "function": tool["function"] | {"eager": True}}
    assert _ids(engine, at, {"messages": [ECHO, *ASK], "tools": [noisy], "chat_id": "c"})[0] == plain


def test_the_log_and_the_figures_name_them(at: Listening, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvboost_hf.server.requests"):
        own = at.http.post("/v1/chat/completions", json=CHAT | {"chat_id": 1}).headers["x-request-id"]

        def named() -> list[Any]:
            """Of this request: that of another test may be logged now, too, and the answer is here before the line."""
            lines = [record.fields for record in caplog.records if record.name == "kvboost_hf.server.requests"]  # type: ignore[attr-defined]
            return [line["ignored"] for line in lines if line.get("request_id") == own]

        assert until(named, "the request was not logged") == [["chat_id"]]
    assert 'kvboost_ignored_fields_total{field="chat_id"}' in at.http.get("/metrics").text


def test_clients_cannot_make_figures_without_end(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine)
    for start in range(0, 200, 20):
        at.http.post("/v1/chat/completions", json=CHAT | {f"f{n}": 1 for n in range(start, start + 20)})
    lines = [line for line in at.http.get("/metrics").text.splitlines() if "ignored_fields_total{" in line]
    assert len(lines) == 101
    assert 'kvboost_ignored_fields_total{field="other"} 100.0' in lines


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"chat_id": "c"}, "chat_id"),
        ({"messages": [ECHO, *ASK]}, "messages.0.annotations"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools.0.function.x"),
    ],
)
def test_strict_servers_refuse_them(serve: Serve, engine: FakeEngine, change: dict[str, Any], param: str) -> None:
    at = serve(engine, strict_requests=True)
    assert at.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    response = at.http.post("/v1/chat/completions", json=CHAT | change)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
    assert "Leave it out" in error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": -1, "top_p": 0, "max_tokens": -1, "max_completion_tokens": -1, "stop": ["", "never"]},
        {"stop": ""},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"modalities": ["text"], "audio": None, "web_search_options": None, "model": None},
        {"messages": [{"role": "tool", "content": None, "tool_call_id": "1"}, *ASK]},
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *ASK]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
                *ASK,
            ]
        },
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
    ],
)
def test_values_of_other_servers_are_accepted(at: Listening, engine: FakeEngine, change: dict[str, Any]) -> None:
    _ids(engine, at, change)
    assert "" not in engine.job.stop


def test_top_logprobs_ask_for_logprobs(at: Listening, engine: FakeEngine) -> None:
    _, response = _ids(engine, at, {"top_logprobs": 2})
    assert engine.job.options.logprobs == 2
    assert response.json()["choices"][0]["logprobs"] is not None


def test_other_names_of_the_model(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, model_aliases=("gpt-4o",))
    assert [model["id"] for model in at.http.get("/v1/models").json()["data"]] == ["reader", "gpt-4o"]
    assert at.http.get("/v1/models/gpt-4o").json()["id"] == "gpt-4o"
    assert at.http.post("/v1/chat/completions", json=CHAT | {"model": "gpt-4o"}).json()["model"] == "gpt-4o"
    assert at.http.post("/v1/chat/completions", json={"messages": ASK}).json()["model"] == "reader"
    assert at.http.post("/v1/responses", json={"input": "a", "model": "gpt-4o"}).json()["model"] == "gpt-4o"
    assert at.http.post("/v1/chat/completions", json=CHAT | {"model": "gpt-5"}).status_code == 404
    exact = serve(engine, model_aliases=("qwen[4b]?",))  # only `*` stands for others
    for name, status in (("qwen[4b]?", 200), ("qwen4x", 404)):
        assert exact.http.post("/v1/chat/completions", json=CHAT | {"model": name}).status_code == status
    with pytest.raises(ValueError, match="`model_aliases` must be names"):
        serve(engine, model_aliases=("",))
    some = serve(engine, model_aliases=("claude-*",))
    assert [model["id"] for model in some.http.get("/v1/models").json()["data"]] == ["reader"]
    for name, status in (("claude-sonnet", 200), ("gpt-5", 404)):
        assert some.http.post("/v1/chat/completions", json=CHAT | {"model": name}).status_code == status
    anything = serve(engine, model_aliases=("*",))
    assert anything.http.post("/v1/completions", json={"model": "gpt-5", "prompt": "a"}).json()["model"] == "gpt-5"
    assert len(anything.http.get("/v1/models").json()["data"]) == 1


def test_many_fields_of_one_request_are_read_quickly(at: Listening) -> None:
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "a", f"x{n}": 1} for n in range(20_000)]})
    response = at.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert len(response.headers.get("x-kvboost-ignored", "").split(", ")) in (1, 32)
    assert response.status_code in (200, 413)


_SHAPES: list[tuple[Callable[[dict[str, Any]], Any], Any]] = [
    (lambda told: told, True),
    (lambda told: told.get("items"), [True]),
    (lambda told: told.get("additionalProperties"), {"5": True}),
]


def test_no_number_is_true() -> None:
    kinds, found = [Body], 0
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name, told in kind.model_json_schema().get("properties", {}).items():
            choices = told.get("anyOf", [told])
            if any(choice.get("type") == "boolean" for choice in choices):
                continue
            for part, given in _SHAPES:
                parts = [inner for choice in choices if isinstance(inner := part(choice), dict)]
                if any(inner.get("type") in ("integer", "number") for inner in parts) and name != "index":
                    with pytest.raises(ValidationError) as error:
                        kind.model_validate({name: given})
                    assert any(one["loc"][0] == name for one in error.value.errors()), (kind, name)
                    found += 1
    assert found > 40
