"""Tools that are equal as JSON have equal prompts, whatever the order of their keys; nothing of it crosses clients."""

import json
from typing import Any

import pytest

from tests.internals.server import KnownTools
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "Who?"}]


def _tools(turned: bool, count: int = 8) -> list[Any]:
    schema = {
        "type": "object",
        "properties": {"at": {"type": "string", "description": "Where."}, "times": {"type": "integer", "minimum": 1}},
        "required": ["at", "times"],
    }
    tools = [
        {"type": "function", "function": {"name": f"look_{n}", "description": "Looks.", "parameters": schema}}
        for n in range(count)
    ]
    return list(map(_turned, tools)) if turned else tools


def _turned(value: Any) -> Any:
    """With the keys of all objects in the reverse order."""
    if isinstance(value, dict):
        return {name: _turned(each) for name, each in reversed(value.items())}
    return [_turned(each) for each in value] if isinstance(value, list) else value


def _shared(one: list[int], other: list[int]) -> int:
    return next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def _ask(at: Listening, tools: list[Any], route: str = "/v1/chat/completions", **more: Any) -> Any:
    body: dict[str, Any] = {"model": "reader", "messages": ASK, "tools": tools, "max_tokens": 5}
    if route == "/v1/messages":
        body["tools"] = [
            {"input_schema": tool["function"]["parameters"], "name": tool["function"]["name"]} for tool in tools
        ]
    if route == "/v1/responses":
        body = {"model": "reader", "input": ASK, "tools": [{**tool["function"], "type": "function"} for tool in tools]}
    response = at.http.post(route, json=body, **more)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_another_order_of_keys_has_the_same_prompt(
    serve: Serve, engine: FakeEngine, tokenizer: Any, route: str
) -> None:
    at = serve(engine)
    assert "x-kvboost-changed" not in _ask(at, _tools(False), route).headers
    assert _ask(at, _tools(True), route).headers["x-kvboost-changed"] == "tools-in-known-order"
    assert "x-kvboost-changed" not in _ask(at, _tools(False), route).headers
    first, second, third = (list(ticket.job.ids) for ticket in engine.tickets)
    assert first == second == third
    _ask(serve(engine), _tools(True), route)  # a server that has not seen the others
    other = list(engine.job.ids)
    assert _shared(first, other) < len(first) / 10


def test_other_tools_are_others(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    for tools in (_tools(False), _tools(False)[::-1], _tools(False, 7)):
        assert "x-kvboost-changed" not in _ask(at, tools).headers
        shown = tokenizer.apply_chat_template(ASK, tools=tools, add_generation_prompt=True, return_dict=False)
        assert list(engine.job.ids) == shown


def test_nothing_crosses_keys_and_salts(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, api_keys=("one", "two"))
    for key in ("one", "two"):
        for turned in (key == "one", key == "two"):
            headers = {"authorization": f"Bearer {key}"}
            changed = _ask(at, _tools(turned), headers=headers).headers.get("x-kvboost-changed")
            assert changed == ("tools-in-known-order" if turned != (key == "one") else None)
    one, _, two, _ = (list(ticket.job.ids) for ticket in engine.tickets)
    assert one != two


def test_memory_is_bounded() -> None:
    known = KnownTools()
    for owner in range(50):
        for n in range(40):
            known.ordered([{"name": f"{n}", "type": "function"}], (b"%d" % owner, b""))
    assert len(known._lists) == 256
    assert known.ordered([{"type": "function", "name": "39"}], (b"49", b""))[1]
    assert not known.ordered([{"type": "function", "name": "3"}], (b"49", b""))[1]
    for size, is_known in ((2**19, True), (2**19 + 1, False)):
        large = {"name": "a" * (size - len('[{"name": "", "type": "function"}]')), "type": "function"}
        assert len(json.dumps([large])) == size
        known.ordered([large], (b"1", b""))
        assert known.ordered([_turned(large)], (b"1", b""))[1] is is_known
