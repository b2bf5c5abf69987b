"""Anthropic's Messages API, on the wire; `test_clients.py` has its SDK."""

import json
from typing import Any

import pytest

from tests.internals.server import MessagesRequest
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "Is it on?"}]
BODY: dict[str, Any] = {"model": "reader", "max_tokens": 50, "messages": ASK}
TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "lamp"}}</tool_call>'
SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}


def _ask(at: Listening, path: str = "", **changes: Any) -> dict[str, Any]:
    response = at.http.post(f"/v1/messages{path}", json=BODY | changes)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    return dict(response.json())


def _events(at: Listening, **changes: Any) -> list[dict[str, Any]]:
    text = at.http.post("/v1/messages", json=BODY | changes | {"stream": True}).text
    events = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def _block(text: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": control} if control else {})


def _prompt(engine: FakeEngine, tokenizer: Any) -> str:
    return str(tokenizer.decode(engine.job.ids))


def test_an_answer(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    answer = _ask(at, system=[_block("Be short."), _block("Be kind.")], temperature=0, top_k=4, stop_sequences=["x"])
    assert answer["content"] == [{"type": "text", "text": "Anna plays the piano."}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "end_turn")
    told = [{"role": "system", "content": "Be short.\n\nBe kind."}, *ASK]
    assert list(engine.job.ids) == tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
    options = engine.job.options
    assert (options.max_tokens, options.temperature, options.top_k, engine.job.stop) == (50, 0, 4, ("x",))
    assert _ask(at, path="/count_tokens", system="Be short.\n\nBe kind.") == {"input_tokens": len(engine.job.ids)}


def test_an_answer_that_has_begun(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    """Clients begin an answer to give it a form, and are given what follows."""
    engine.says = (" plays.",)
    begun = {"role": "assistant", "content": [_block("Anna", {"type": "ephemeral"})]}
    for said in ({"role": "assistant", "content": "Anna"}, begun):
        answer = _ask(at, messages=[*ASK, said])
        assert answer["content"] == [{"type": "text", "text": " plays."}]
        assert _prompt(engine, tokenizer).endswith("Anna")
        assert _ask(at, path="/count_tokens", messages=[*ASK, said]) == {"input_tokens": len(engine.job.ids)}


@pytest.mark.parametrize("blocks", [[], [{"type": "text", "text": ""}]])
def test_a_turn_without_text_is_a_turn(
    at: Listening, engine: FakeEngine, tokenizer: Any, blocks: list[dict[str, str]]
) -> None:
    said, turn = {"role": "assistant", "content": "Anna."}, dict[str, Any](role="user", content=blocks)
    set_up: dict[str, Any] = {"role": "system", "output_config": {"effort": "low"}}  # says nothing
    for messages in ([turn], [{"role": "user", "content": "Who?"}, set_up, said, turn, set_up]):
        assert at.http.post("/v1/messages", json={"max_tokens": 9, "messages": messages}).status_code == 200
        assert tokenizer.decode(engine.job.ids).count("user\n") == sum(one["role"] == "user" for one in messages)


def test_events_of_a_stream(at: Listening, engine: FakeEngine) -> None:
    engine.says = ("I look. ", CALL[:20], CALL[20:])
    events = _events(at, tools=[TOOL])
    assert [event["type"] for event in events] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert [event["index"] for event in events[1:-2]] == [0] * 3 + [1] * 3
    assert events[2]["delta"] == {"type": "text_delta", "text": "I look."}
    assert events[4]["content_block"]["input"] == {}
    assert json.loads(events[5]["delta"]["partial_json"]) == {"at": "lamp"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 3


def test_reasoning_is_a_block_with_a_signature(serve: Serve, engine: FakeEngine, tokenizer: Any) -> None:
    template = {
        "start_anchor": "\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "content": {},
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
        },
    }
    tokenizer.response_template = template
    try:
        at = serve(engine)
        engine.says = ("<think>Hm", "m.</think>", "Yes.")
        thinks: Any = {"tools": [TOOL], "thinking": {"type": "adaptive"}}
        answer, events = _ask(at, **thinks), _events(at, **thinks)
    finally:
        del tokenizer.response_template
    thinking, text = answer["content"]
    assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "Hmm.")
    assert thinking["signature"]
    assert text["text"] == "Yes."
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert kinds.index("signature_delta") == kinds.index("text_delta") - 1
    again = [*ASK, {"role": "assistant", "content": answer["content"]}, *ASK]
    assert _ask(at, messages=again)["stop_reason"] == "end_turn"


def test_results_of_calls(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "look", "input": {"at": n}} for n in range(3)]
    results = [
        {"type": "tool_result", "tool_use_id": "c0", "content": "it is on"},
        {"type": "tool_result", "tool_use_id": "c1", "content": [_block("one"), _block("two")]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "no lamp", "is_error": True},
    ]
    said = [{"type": "redacted_thinking", "data": "x"}, _block("I look."), *calls]
    history = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": [*results, _block("So?")]}]
    _ask(at, messages=[*history, {"role": "system", "content": "Hurry."}], tools=[TOOL])
    told = _prompt(engine, tokenizer).split("<|im_start|>")
    assert [turn.split("\n")[0] for turn in told[-6:]] == ["assistant", "tool", "tool", "tool", "user", "assistant"]
    written = [f'<tool_call>\n{{"name": "look", "arguments": {{"at": {n}}}}}\n</tool_call>' for n in range(3)]
    assert told[-6] == "assistant\nI look." + "\n".join(written) + "<|im_end|>\n"
    assert told[-5:-1] == [
        "tool\nit is on<|im_end|>\n",
        "tool\none\n\ntwo<|im_end|>\n",
        "tool\nError: no lamp<|im_end|>\n",
        "user\nSo?\n\nHurry.<|im_end|>\n",
    ]


_BASH = {"type": "tool_definition", "definition": {"type": "bash_20250124", "name": "bash"}}
_LAMP: dict[str, Any] = {"type": "tool_reference", "name": "look"}
_BELL: dict[str, Any] = {"type": "tool_definition", "definition": {"name": "ring", "input_schema": {}}}


@pytest.mark.parametrize(
    ("changes", "offered", "ignored"),
    [
        ([("addition", _BELL)], ["look", "ring"], ""),
        ([("removal", _LAMP), ("addition", _BELL)], ["ring"], ""),
        ([("removal", _LAMP), ("addition", _LAMP)], ["look"], ""),
        ([("removal", _LAMP)], [], ""),
        ([("addition", _LAMP | {"name": "other"}), ("removal", _LAMP | {"name": "another"})], ["look"], ""),
        ([("addition", _BASH)], ["look"], "messages.content.tool_addition"),
        (
            [("removal", {"type": "mcp_toolset_reference", "server_name": "a"})],
            ["look"],
            "messages.content.tool_removal",
        ),
    ],
)
@pytest.mark.parametrize("in_turn", [False, True])
def test_tools_that_come_and_go(
    at: Listening, engine: FakeEngine, tokenizer: Any, changes: Any, offered: list[str], ignored: str, in_turn: bool
) -> None:
    blocks = [{"type": f"tool_{kind}", "tool": tool} for kind, tool in changes]
    system = {"role": "system", "content": [*blocks, *([_block("Go on.")] if in_turn else [])]}
    body = BODY | {"messages": [*ASK, system], "tools": [TOOL]}
    assert at.http.post("/v1/messages", json=body).headers.get("x-kvboost-ignored", "") == ignored
    told = _prompt(engine, tokenizer)
    assert [name for name in ("look", "ring") if f'"name": "{name}"' in told] == offered
    assert told.count("user\n") == 1
    assert ("Is it on?\n\nGo on." in told) == in_turn


@pytest.mark.parametrize(
    ("choice", "offered", "calls"),
    [
        ({"type": "any"}, True, 2),
        ({"type": "tool", "name": "look", "disable_parallel_tool_use": True}, True, 1),
        ({"type": "none"}, False, 0),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, 1),
    ],
)
def test_tool_choice(
    at: Listening, engine: FakeEngine, tokenizer: Any, choice: Any, offered: bool, calls: int
) -> None:
    engine.says = (CALL, CALL) if offered else ("No.",)
    answer = _ask(at, tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in answer["content"]] == (["tool_use"] * calls or ["text"])
    assert ("look" in _prompt(engine, tokenizer)) == offered
    assert (engine.job.options.constraint is not None) == (choice["type"] in ("any", "tool"))


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_schemas(at: Listening, engine: FakeEngine, place: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    change: dict[str, Any] = {place: {"format": form} if place == "output_config" else form}
    _ask(at, **change)
    assert engine.job.options.constraint is not None


def test_why_an_answer_ends(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine)
    engine.stop = "two"
    answer = _ask(at, stop_sequences=["one", "two"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
    engine.stop, engine.reason = None, "length"
    assert _ask(at)["stop_reason"] == "max_tokens"
    length = len(engine.job.ids)
    short = serve(engine, max_model_len=length + 3)
    assert _ask(short, max_tokens=32_000)["stop_reason"] == "model_context_window_exceeded"
    assert engine.job.options.max_tokens == 3
    _ask(short, max_tokens=0)
    assert engine.job.options.max_tokens == 0


@pytest.mark.parametrize(
    ("rest", "reason", "stop", "says"),
    [
        ("", "stop", None, ("tool_use", None)),
        ("", "stop", ".", ("tool_use", None)),
        (CALL[:14], "length", None, ("max_tokens", None)),
        (CALL[:-20], "length", None, ("max_tokens", None)),
        ("I have", "length", None, ("max_tokens", None)),
        (CALL[:-20], "stop", ".", ("stop_sequence", ".")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ends_behind_a_call(
    at: Listening, engine: FakeEngine, rest: str, reason: Any, stop: str | None, says: Any, stream: bool
) -> None:
    engine.says, engine.reason, engine.stop = (CALL, rest), reason, stop
    told = _events(at, tools=[TOOL])[-2]["delta"] if stream else _ask(at, tools=[TOOL])
    assert (told["stop_reason"], told["stop_sequence"]) == says


def test_a_call_that_turns_out_malformed_has_not_filled_the_context(at: Listening, engine: FakeEngine) -> None:
    engine.says = (CALL[:-20], "]]]]</tool_call>")
    assert _events(at, tools=[TOOL], max_tokens=None)[-2]["delta"]["stop_reason"] == "max_tokens"
    engine.reason = "length"
    assert _events(at, tools=[TOOL], max_tokens=None)[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("changes", "five", "hour"),
    [
        ({}, None, None),
        ({"cache_control": SHORT}, "all", None),
        ({"system": [_block("Be short.", LONG)]}, None, "head"),
        ({"tools": [TOOL | {"cache_control": LONG}], "cache_control": SHORT, "system": "Be short."}, "all", "head"),
        ({"messages": [{"role": "user", "content": [_block("Here.", SHORT), _block("Is it on?")]}]}, "half", None),
        ({"messages": [{"role": "user", "content": [_block("Is it on?", LONG)]}]}, None, "all"),
    ],
)
def test_breakpoints_are_counted(
    at: Listening, engine: FakeEngine, tokenizer: Any, changes: Any, five: str | None, hour: str | None
) -> None:
    usage = _ask(at, **changes)["usage"]
    prompt, read = len(engine.job.ids), len(engine.job.ids) // 2
    told = _prompt(engine, tokenizer)

    def tokens(place: str | None) -> int:
        marks = {"head": "Be short.", "half": "Here.", "all": told, None: ""}
        return len(tokenizer(told[: told.index(marks[place]) + len(marks[place])])["input_ids"]) if place else 0

    kept = {keep.ttl_s: keep.tokens or prompt for keep in engine.job.keep}
    assert kept.keys() == {300.0} & {300.0 * bool(five)} | {3600.0} & {3600.0 * bool(hour)}
    assert all(tokens(place) <= kept.get(ttl_s, 0) <= prompt for place, ttl_s in ((five, 300.0), (hour, 3600.0)))
    whole = max(tokens(five), tokens(hour))
    created = usage["cache_creation_input_tokens"]
    assert max(whole - read, 0) <= created <= max(whole + 8 - read, 0)  # with what the template writes next
    assert usage["input_tokens"] + created + usage["cache_read_input_tokens"] == prompt
    parts = usage["cache_creation"]
    assert sum(parts.values()) == created
    if hour is None:
        assert parts["ephemeral_1h_input_tokens"] == 0
    if five is None:
        assert parts["ephemeral_5m_input_tokens"] == 0


def test_the_messages_up_to_each_breakpoint() -> None:
    said = [
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": [_block("Now?", SHORT), _block("Or?")]},
    ]
    sent = BODY | {"system": [_block("Be short.", SHORT)], "messages": [*ASK, *said], "cache_control": SHORT}
    body = MessagesRequest.model_validate(sent)
    found = [[(each.role, each.content) for each in body.up_to(point)] for point in body.breakpoints]
    head, turns = ("system", "Be short."), [("user", "Is it on?"), ("assistant", "No.")]
    assert [point.last for point in body.breakpoints] == [False, False, True]
    assert found == [[head, ("user", "")], [head, *turns, ("user", "Now?")], [head, *turns]]


def test_breakpoints_pin(reading: Listening) -> None:
    system = [_block("Anna lives in Oslo. She plays the piano. " * 20, LONG)]
    sent = BODY | {"max_tokens": 1, "system": system}
    assert reading.http.post("/v1/messages", json=sent, headers={"x-api-key": "key"}).status_code == 200
    listed = reading.http.get("/v1/kv/sessions", headers={"x-api-key": "key"}).json()["data"]
    left = [session["pinned_until"] - session["last_used"] for session in listed if session["pinned_until"]]
    assert 3600 in [round(seconds) for seconds in left]


RESULT = {"type": "tool_result", "tool_use_id": "a"}
THOUGHT = {"type": "thinking", "thinking": "a"}
USE = {"type": "tool_use", "id": "a", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"messages": [{"role": "user", "content": [THOUGHT]}]},
            "message of role 'user'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, "messages.0.content.0: blocks of type {}"),
        ({"messages": []}, "messages"),
        ({"messages": [*ASK, {"role": "assistant", "content": [USE]}]}, "send the result of the call"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        (
            {
                "tools": [TOOL, {"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "must name one of tools, got 'bash'",
        ),
        ({"tools": [{"name": "bash"}]}, "input_schema"),
        ({"tools": [TOOL | {"name": "a b"}]}, "name"),
        ({"tool_choice": {"type": "tool"}}, "must name a tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"container": "c"}, "container"),
        ({"messages": [*ASK, {"role": "system"}]}, "messages.1.content: Field required"),
        ({"messages": [{"role": "system", "output_config": {"effort": "low"}}]}, "must have one message at least"),
        ({"messages": [*ASK, {"role": "system", "content": [{"type": "tool_removal", "tool": _BELL}]}]}, "tool.type"),
        ({"thread": {"type": "create"}}, "thread: conversations are not stored; leave thread out"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "send all messages"),
        ({"compaction": {"type": "summarize"}}, "compaction: the server makes no summaries"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "ttl"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(at: Listening, engine: FakeEngine, change: dict[str, Any], says: str, stream: bool) -> None:
    response = at.http.post("/v1/messages", json=BODY | change | {"stream": stream})
    told = response.json()
    assert (response.status_code, told["type"]) == (400, "error")
    assert told["error"]["type"] == "invalid_request_error"
    assert says in told["error"]["message"]
    assert told["request_id"] == response.headers["request-id"]
    # Without this code Anthropic's tool runner, which asks for a thread by itself, would end with the error.
    code = {"error_code": "thread_unsupported_request"} if "thread" in change else None
    assert told["error"].get("details") == code
    assert not engine.tickets


def test_errors_have_the_form_of_the_api(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, api_keys=("key",), max_body_bytes=500)
    opened = {"x-api-key": "key"}
    ways: list[tuple[dict[str, Any], int, str]] = [
        ({"json": BODY}, 401, "authentication_error"),
        ({"json": BODY, "headers": {"x-api-key": "other"}}, 401, "authentication_error"),
        ({"json": BODY | {"model": "writer"}, "headers": opened}, 404, "not_found_error"),
        ({"json": BODY | {"system": "a" * 500}, "headers": opened}, 413, "request_too_large"),
        ({"content": "{", "headers": opened}, 400, "invalid_request_error"),
    ]
    for sent, status, kind in ways:
        response = at.http.post("/v1/messages", **sent)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    for headers in (opened, {"Authorization": "Bearer key"}, {"Authorization": "Bearer other"} | opened):
        assert at.http.post("/v1/messages", json=BODY, headers=headers).status_code == 200
    assert at.http.get("/v1/messages/batches", headers=opened).json()["error"]["type"] == "not_found_error"
    other = at.http.get("/v1/none", headers=opened | {"anthropic-version": "2023-06-01"})
    assert other.json()["error"]["type"] == "not_found_error"


def test_errors_of_the_engine(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, max_model_len=20)
    response = at.http.post("/v1/messages", json=BODY | {"system": "word " * 200})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt is too long: ")
    at = serve(engine)
    engine.failure = "it broke"
    assert at.http.post("/v1/messages", json=BODY).json()["error"] == {"type": "api_error", "message": "it broke"}
    assert _events(at)[-1]["error"]["type"] == "api_error"
    engine.drained = 1.0
    response = at.http.post("/v1/messages", json=BODY)
    assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error")


def test_a_silent_stream_pings(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, ping_s=0.05)
    engine.before = lambda ticket, piece: piece or ticket.cancelled.wait(0.3)
    assert "ping" in [event["type"] for event in _events(at)]


def test_shorter_answers_where_memory_is_short(reading: Listening) -> None:
    sent = BODY | {"max_tokens": 10**6, "temperature": 0}
    answer = reading.http.post("/v1/messages", json=sent, headers={"x-api-key": "key"}).json()
    assert answer["usage"]["output_tokens"] > 0


def test_the_list_of_models_is_one_of_both_apis(at: Listening) -> None:
    listed = at.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (listed["first_id"], listed["has_more"]) == ("reader", False)
    assert {"id": "reader", "type": "model", "object": "model", "display_name": "reader"}.items() <= dict(
        listed["data"][0]
    ).items()
