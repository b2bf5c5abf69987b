"""Whatever is sent, the answer is one, or an error that names what is wrong; the server never fails."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.internals.server import (
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ResponseRequest,
    WarmRequest,
)
from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_KEYS = st.sampled_from(["type", "text", "role", "content", "name", "function", "user", "schema", "input"])
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS | st.text(max_size=3), inner, max_size=3),
)
# As it should be, for each field that a body may have.
_GOOD: dict[str, Any] = {
    "model": "reader",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "prompt": "a",
    "input": [{"role": "user", "content": "a"}],
    "texts": ["a"],
    "n": 2,
    "max_tokens": 3,
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "tool_choice": "required",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "logit_bias": {"5": 1},
    "stop": ["a"],
    "logprobs": 1,
    "options": {"num_predict": 3, "stop": ["a"]},
    "format": {"type": "object"},
    "context": [5],
}
_ROUTES = {
    "/v1/chat/completions": (ChatRequest, ["model", "messages"]),
    "/v1/completions": (CompletionRequest, ["model", "prompt"]),
    "/v1/responses": (ResponseRequest, ["model", "input"]),
    "/v1/messages": (MessagesRequest, ["model", "messages", "max_tokens"]),
    "/v1/warm": (WarmRequest, ["texts"]),
    "/api/chat": (OllamaChatRequest, ["model", "messages"]),
    "/api/generate": (OllamaGenerateRequest, ["model", "prompt"]),
}


def _spoilt(value: Any) -> st.SearchStrategy[Any]:
    """Values like this one, with a part that is anything."""
    kinds = [_JSON, st.just(value)]
    if isinstance(value, dict) and value:
        kinds += [_spoilt(part).map(lambda new, key=key: value | {key: new}) for key, part in value.items()]
    if isinstance(value, list) and value:
        kinds.append(_spoilt(value[0]).map(lambda new: [new]))
    return st.one_of(kinds)


@pytest.mark.parametrize("path", list(_ROUTES))
def test_no_body_makes_the_server_fail(at: Listening, engine: FakeEngine, path: str) -> None:
    model, needed = _ROUTES[path]
    names = sorted({*model.model_fields})  # type: ignore[attr-defined]

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.data())
    def send(data: st.DataObject) -> None:
        body = {name: _GOOD[name] for name in needed}
        for name in data.draw(st.lists(st.sampled_from(names), max_size=3)):
            body[name] = data.draw(_spoilt(_GOOD.get(name)))
        response = at.http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            error = response.json()["error"]
            assert error if path.startswith("/api/") else error["message"]
        elif "event-stream" in response.headers["content-type"]:
            assert "server_error" not in response.text
            assert "api_error" not in response.text

    send()
