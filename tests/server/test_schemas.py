"""Schemas of tools and answers on all routes: only strict ones are refused, and what is left to the model is named."""

import json
from typing import Any

import pytest

from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine
from tests.server.test_tools import _follow

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "Is the lamp on?"}]
EVERYDAY: dict[str, Any] = {
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "price": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        "secret": {"type": "string", "format": "password", "writeOnly": True},
        "extra": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        "never": {"not": {}},
        "count": {"type": "integer", "format": "int64", "nullable": True},
    },
    "required": ["tags"],
    "$schema": "https://json-schema.org/draft/2020-12/schema",
}
LEFT = ["tags.uniqueItems", "secret.format", "count.format"]
GOOD = {"tags": ["a"], "price": "1.5", "extra": {"b": 1}, "count": None}


def _bodies(schema: Any, strict: bool | None) -> dict[str, Any]:
    """Requests of all APIs for a forced call, by route."""
    given = {} if strict is None else {"strict": strict}
    function = {"name": "look", "parameters": schema, **given}
    return {
        "/v1/chat/completions": {
            "messages": ASK,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
        "/v1/responses": {
            "input": "Is it on?",
            "tools": [{"type": "function", **function}],
            "tool_choice": {"type": "function", "name": "look"},
        },
        "/v1/messages": {
            "messages": ASK,
            "max_tokens": 9,
            "tools": [{"name": "look", "input_schema": schema, **given}],
            "tool_choice": {"type": "tool", "name": "look"},
        },
    }


ROUTES = list(_bodies({}, None))


def _call(arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("strict", [None, False])
def test_everyday_schemas_of_forced_calls(
    at: Listening, engine: FakeEngine, tokenizer: Any, route: str, strict: bool | None
) -> None:
    engine.says = (_call(GOOD),)
    for arguments, allowed in (
        (GOOD, True),
        ({"tags": [1]}, False),
        ({"tags": [], "price": "."}, False),
        (True, False),
    ):
        response = at.http.post(route, json={"model": "reader"} | _bodies(EVERYDAY, strict)[route])
        assert response.status_code == 200, response.text
        named = [f"tools.look.parameters.properties.{path}" for path in LEFT]
        assert sorted(response.headers["x-kvboost-ignored"].split(", ")) == sorted(named)
        assert _follow(engine.job.options.constraint, tokenizer, _call(arguments)) is allowed


@pytest.mark.parametrize("route", ROUTES)
def test_strict_names_the_tool_and_the_path(at: Listening, route: str) -> None:
    response = at.http.post(route, json={"model": "reader"} | _bodies(EVERYDAY, True)[route])
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "`properties.tags.uniqueItems` of the parameters of the tool 'look' cannot be enforced" in message
    assert "strict: false" in message
    notes = {"properties": {"secret": EVERYDAY["properties"]["secret"], "price": EVERYDAY["properties"]["price"]}}
    response = at.http.post(route, json={"model": "reader"} | _bodies(notes, True)[route])
    assert response.status_code == 200
    assert response.headers["x-kvboost-ignored"] == "tools.look.parameters.properties.secret.format"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"properties": {"at": {"type": "string"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
        {"anyOf": [{"type": "object"}, {"type": "null"}]},
        {"allOf": [{"properties": {"at": {"type": "string"}}}]},
        {"$ref": "#/definitions/a", "definitions": {"a": {"properties": {"at": {"type": "string"}}}}},
        {"type": ["null", "object"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("route", ROUTES)
def test_a_forced_call_has_an_object(
    at: Listening, engine: FakeEngine, tokenizer: Any, schema: Any, route: str
) -> None:
    for arguments in ({"at": "lamp"}, True, None, "lamp", [1], 3):
        assert at.http.post(route, json={"model": "reader"} | _bodies(schema, None)[route]).status_code == 200
        followed = _follow(engine.job.options.constraint, tokenizer, _call(arguments))
        assert followed is isinstance(arguments, dict)


@pytest.mark.parametrize(
    ("route", "change", "place"),
    [
        (
            "/v1/chat/completions",
            lambda schema, strict: {
                "messages": ASK,
                "response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}},
            },
            "response_format",
        ),
        (
            "/v1/responses",
            lambda schema, strict: {
                "input": "a",
                "text": {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": strict}},
            },
            "response_format",
        ),
        ("/v1/completions", lambda schema, strict: {"prompt": "a", "guided_json": schema}, "guided_json"),
        ("/v1/chat/completions", lambda schema, strict: {"messages": ASK, "json_schema": schema}, "json_schema"),
        ("/api/chat", lambda schema, strict: {"messages": ASK, "format": schema, "stream": False}, "response_format"),
        (
            "/v1/messages",
            lambda schema, strict: {
                "messages": ASK,
                "max_tokens": 5,
                "output_config": {"format": {"type": "json_schema", "schema": schema}},
            },
            "response_format",
        ),
    ],
)
def test_schemas_of_answers(
    at: Listening, engine: FakeEngine, tokenizer: Any, route: str, change: Any, place: str
) -> None:
    response = at.http.post(route, json={"model": "reader"} | change(EVERYDAY, False))
    assert response.status_code == 200, response.text
    assert sorted(response.headers["x-kvboost-ignored"].split(", ")) == sorted(
        f"{place}.properties.{path}" for path in LEFT
    )
    assert _follow(engine.job.options.constraint, tokenizer, json.dumps(GOOD))
    at.http.post(route, json={"model": "reader"} | change(EVERYDAY, False))
    assert not _follow(engine.job.options.constraint, tokenizer, json.dumps(GOOD | {"tags": 1}))
    if route in ("/v1/chat/completions", "/v1/responses") and place == "response_format":
        response = at.http.post(route, json={"model": "reader"} | change(EVERYDAY, True))
        assert response.status_code == 400
        assert "`properties.tags.uniqueItems` of the schema of response_format" in response.json()["error"]["message"]


def test_a_schema_that_takes_too_long_is_left(at: Listening) -> None:
    slow = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9943)]}
    response = at.http.post(
        ROUTES[0], json={"model": "reader"} | _bodies({"properties": {"a": slow}}, None)[ROUTES[0]]
    )
    assert response.status_code == 200
    assert response.headers["x-kvboost-ignored"].startswith("tools.look.parameters")


@pytest.mark.parametrize(
    ("route", "more"),
    [
        ("/v1/chat/completions", {"json_schema": {"not": {}}}),
        (
            "/v1/messages",
            {"max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        ),
        ("/api/chat", {"format": {"type": "object", "not": {}}}),
    ],
)
def test_a_schema_that_allows_nothing_is_left(at: Listening, route: str, more: Any) -> None:
    response = at.http.post(route, json={"model": "reader", "messages": ASK} | more)
    assert response.status_code == 200
    assert response.headers["x-kvboost-ignored"] in ("json_schema", "response_format")


@pytest.mark.parametrize("route", ROUTES)
def test_strict_servers_refuse_what_would_be_left(serve: Serve, engine: FakeEngine, route: str) -> None:
    at = serve(engine, strict_requests=True)
    response = at.http.post(route, json={"model": "reader"} | _bodies(EVERYDAY, False)[route])
    assert response.status_code == 400
    assert "tools.look.parameters.properties.tags.uniqueItems" in response.json()["error"]["message"]


def test_one_tool_of_several_is_named(at: Listening, engine: FakeEngine) -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": name == "bad"}}
        for name, schema in (("good", {}), ("bad", {"properties": {"a": {"pattern": "(("}}}), ("other", EVERYDAY))
    ]
    body = {"model": "reader", "messages": ASK, "tools": tools, "tool_choice": "required"}
    response = at.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "`properties.a.pattern` of the parameters of the tool 'bad'" in response.json()["error"]["message"]
    tools[1]["function"]["strict"] = False
    response = at.http.post("/v1/chat/completions", json=body)
    assert "tools.bad.parameters.properties.a.pattern" in response.headers["x-kvboost-ignored"]
    response = at.http.post("/v1/chat/completions", json=body | {"tool_choice": "auto"})
    assert "x-kvboost-ignored" not in response.headers  # there is no grammar


def test_paths_do_not_fill_up_the_names_of_ignored_fields(at: Listening) -> None:
    for n in range(3):
        schema = {"properties": {f"p{n}\n\u00e9": {"type": "array", "uniqueItems": True}}}
        response = at.http.post(ROUTES[0], json={"model": "reader"} | _bodies(schema, None)[ROUTES[0]])
        assert response.headers["x-kvboost-ignored"] == f"tools.look.parameters.properties.p{n}??.uniqueItems"
    assert "uniqueItems" not in at.http.get("/metrics").text
