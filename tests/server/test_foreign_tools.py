"""Tools and items that only their makers' servers know are ignored and named, and Codex's custom tools are served."""

import json
from typing import Any

import pytest

from tests.internals.server import Message
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "Is the lamp on?"}]
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK: dict[str, Any] = {"name": "look", "description": "To look.", "parameters": PARAMETERS}
CHAT = {"type": "function", "function": LOOK}
FLAT = {"type": "function", **LOOK}
OWN = {"name": "look", "input_schema": PARAMETERS}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "lamp"}}\n</tool_call>'
PATCHED = '*** Begin Patch\n*** Add File: a\n+"é"\n*** End Patch'
PATCH_CALL = f"<tool_call>{json.dumps({'name': 'apply_patch', 'arguments': {'input': PATCHED}})}</tool_call>"

HOSTED = [
    {"type": "web_search"},
    {"type": "web_search_preview", "search_context_size": "low"},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "computer_use_preview", "display_width": 9, "display_height": 9, "environment": "browser"},
    {"type": "mcp", "server_label": "a", "server_url": "https://a.example"},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "apply_patch"},
]
ITEMS = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c", "output": "a"},
    {"type": "compaction", "encrypted_content": "abc"},
    {"type": "compaction_summary", "encrypted_content": "abc"},
    {"type": "ghost_snapshot", "ghost_commit": {}},
    {"type": "file_search_call", "id": "fs_1", "queries": [], "status": "completed"},
    {"type": "computer_call", "call_id": "c", "action": {"type": "wait"}, "status": "completed"},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1"},
    {"type": "image_generation_call", "id": "ig_1", "result": "aGk="},
    {"type": "mcp_list_tools", "server_label": "a", "tools": []},
    {"type": "mcp_call", "id": "m", "name": "x", "arguments": "{}"},
]
ANTHROPIC = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 9, "display_height_px": 9},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "mcp_toolset", "mcp_server_name": "a"},
]
BLOCKS: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
    {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "a", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
    {"type": "container_upload", "file_id": "f"},
]


def _ignored(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get("x-kvboost-ignored", "").split(", ") if name]


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
def test_hosted_tools(at: Listening, engine: FakeEngine, serve: Serve, tool: Any) -> None:
    engine.says = (CALL,)
    kind = tool["type"]
    told = at.http.post("/v1/responses", json={"input": "Who?", "tools": [tool, FLAT]})
    assert _ignored(told) == [f"tools.{kind}"]
    assert told.json()["output"][0]["name"] == "look"
    assert [one["name"] for one in told.json()["tools"]] == ["look"]
    assert _ignored(at.http.post("/v1/responses", json={"input": "Who?", "tools": [tool]})) == [f"tools.{kind}"]
    for choice in ({"type": kind}, {"type": "function", "name": kind}):
        asked = {"input": "Who?", "tools": [tool, FLAT], "tool_choice": choice}
        refused = at.http.post("/v1/responses", json=asked)
        assert refused.status_code == 400
        assert kind in refused.json()["error"]["message"]
    for path, field in (
        ("/v1/chat/completions", {"messages": ASK}),
        ("/api/chat", {"messages": ASK, "model": "reader"}),
    ):
        assert _ignored(at.http.post(path, json=field | {"tools": [tool, CHAT]})) == [f"tools.{kind}"]
    strict = serve(engine, strict_requests=True)
    refused = strict.http.post("/v1/responses", json={"input": "Who?", "tools": [tool]})
    assert refused.status_code == 400
    assert kind in refused.json()["error"]["message"]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["type"])
def test_items_of_others(at: Listening, engine: FakeEngine, tokenizer: Any, item: Any) -> None:
    talk = [{"role": "user", "content": "Who?"}, item, {"role": "user", "content": "And now?"}]
    assert _ignored(at.http.post("/v1/responses", json={"input": talk})) == [f"input.{item['type']}"]
    assert "And now?" in tokenizer.decode(engine.job.ids)
    refused = at.http.post("/v1/responses", json={"input": [item]})
    assert refused.status_code == 400
    assert item["type"] in refused.json()["error"]["message"]


@pytest.mark.parametrize("tool", ANTHROPIC, ids=lambda tool: tool["type"])
def test_tools_of_anthropic(at: Listening, engine: FakeEngine, tool: Any) -> None:
    engine.says = (CALL,)
    body: dict[str, Any] = {"model": "reader", "max_tokens": 9, "messages": ASK, "tools": [tool, OWN]}
    told = at.http.post("/v1/messages", json=body)
    assert _ignored(told) == [f"tools.{tool['type']}"]
    assert told.json()["content"][0]["input"] == {"at": "lamp"}
    assert _ignored(at.http.post("/v1/messages", json=body | {"tools": [tool]})) == [f"tools.{tool['type']}"]
    name = tool.get("name", "x")
    refused = at.http.post("/v1/messages", json=body | {"tool_choice": {"type": "tool", "name": name}})
    assert refused.status_code == 400
    assert name in refused.json()["error"]["message"]


def test_servers_and_blocks_of_anthropic(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    said = {"role": "assistant", "content": [*BLOCKS, {"type": "text", "text": "It is on."}]}
    body: dict[str, Any] = {"model": "reader", "max_tokens": 9, "messages": [*ASK, said, *ASK]}
    servers = [{"type": "url", "url": "https://a.example", "name": "a"}]
    response = at.http.post("/v1/messages", json=body | {"mcp_servers": servers})
    named = [f"messages.content.{block.get('type')}" for block in BLOCKS]
    assert sorted(_ignored(response)) == sorted([*named, "mcp_servers"])
    assert "It is on." in tokenizer.decode(engine.job.ids)


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools(at: Listening, engine: FakeEngine, tokenizer: Any, stream: bool) -> None:
    engine.says = ["So. ", *PATCH_CALL, "\n", *CALL]
    asked: dict[str, Any] = {"input": "Who?", "tools": [PATCH, FLAT], "stream": stream, "max_output_tokens": 9999}
    response = at.http.post("/v1/responses", json=asked)
    assert not _ignored(response)
    told = response.json() if not stream else None
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        told = events[-1]["response"]
        kinds = [event["type"] for event in events if "custom" in event["type"]]
        assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        assert next(event for event in events if event["type"] == kinds[0])["delta"] == PATCHED
        added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
        assert [item["type"] for item in added] == ["message", "custom_tool_call", "function_call"]
        assert added[1]["input"] == ""
    assert [item["type"] for item in told["output"]] == ["message", "custom_tool_call", "function_call"]
    item = told["output"][1]
    assert (item["name"], item["input"], item["status"]) == ("apply_patch", PATCHED, "completed")
    assert told["tools"][0]["type"] == "custom"
    prompt = tokenizer.decode(engine.job.ids)
    assert "Begin Patch" in prompt
    assert "Edit files." in prompt
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."}
    back = [{"role": "user", "content": "Who?"}, *told["output"], result]
    back.append({"type": "function_call_output", "call_id": told["output"][2]["call_id"], "output": "on"})
    response = at.http.post("/v1/responses", json=asked | {"input": back, "stream": False})
    assert not _ignored(response)
    assert "Done." in tokenizer.decode(engine.job.ids)


def test_calls_of_custom_tools_in_chats(at: Listening, tokenizer: Any) -> None:
    custom = {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": PATCHED}}
    said = {"role": "assistant", "tool_calls": [custom]}
    [call] = Message.model_validate(said).body["tool_calls"]
    function = {"name": "apply_patch", "arguments": {"input": PATCHED}}
    assert call == {"id": "c1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Done."}
    response = at.http.post("/v1/chat/completions", json={"messages": [*ASK, said, result]})
    assert (response.status_code, _ignored(response)) == (200, [])
    for wrong in ({"type": "custom"}, {"type": "custom", "custom": {"name": "apply_patch", "input": 1}}):
        said = {"role": "assistant", "tool_calls": [wrong]}
        assert at.http.post("/v1/chat/completions", json={"messages": [*ASK, said]}).status_code == 400


def test_a_custom_tool_that_must_be_called(at: Listening, engine: FakeEngine) -> None:
    engine.says = (PATCH_CALL,)
    asked = {"input": "Who?", "tools": [PATCH, FLAT], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    assert at.http.post("/v1/responses", json=asked).json()["output"][0]["input"] == PATCHED
    assert engine.job.options.constraint is not None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"patch": PATCHED}, PATCHED), ({}, ""), ({"input": PATCHED, "x": 1}, PATCHED), ({"a": 1}, '{"a": 1}')],
)
def test_inputs_by_other_names(at: Listening, engine: FakeEngine, arguments: Any, text: str) -> None:
    engine.says = (f"<tool_call>{json.dumps({'name': 'apply_patch', 'arguments': arguments})}</tool_call>",)
    told = at.http.post("/v1/responses", json={"input": "Who?", "tools": [PATCH]}).json()
    assert told["output"][0]["input"] == text


def test_arguments_of_responses_stream(at: Listening, engine: FakeEngine) -> None:
    engine.says = [*CALL]
    response = at.http.post(
        "/v1/responses", json={"input": "Who?", "tools": [FLAT], "stream": True, "max_output_tokens": 999}
    )
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 3
    assert json.loads("".join(deltas)) == {"at": "lamp"}
    [done] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done["arguments"] == "".join(deltas)


def test_arguments_of_messages_stream(at: Listening, engine: FakeEngine) -> None:
    engine.says = ["I look. ", *CALL, *CALL]
    body = {"model": "reader", "max_tokens": 999, "messages": ASK, "tools": [OWN], "stream": True}
    events = [
        json.loads(line[6:]) for line in at.http.post("/v1/messages", json=body).text.splitlines() if "{" in line
    ]
    kinds = [event["type"].removeprefix("content_block_") for event in events if event["type"].startswith("content")]
    assert [kind for kind in kinds if kind != "delta"] == ["start", "stop"] * 3
    for index in (1, 2):
        deltas = [event["delta"] for event in events if event.get("index") == index and "delta" in event]
        assert len(deltas) > 3
        assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"at": "lamp"}
    [end] = [event for event in events if event["type"] == "message_delta"]
    assert end["delta"]["stop_reason"] == "tool_use"
