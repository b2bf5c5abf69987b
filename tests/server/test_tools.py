"""Tools and structured answers by the openai SDK."""

import json
from typing import Any

import openai
import pytest

from tests.internals.server import Constraint
from tests.recorded_calls import RECORDED
from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine

ASK: list[Any] = [{"role": "user", "content": "Is the lamp on?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name}.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
    for name in ("look", "touch")
]
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "lamp"}}\n</tool_call>'
BAD = {"type": 3}
MUST = {"tool_choice": "required"}
TOUCH = LOOK.replace("look", "touch")


def _ask(at: Listening, **more: Any) -> Any:
    return at.openai.chat.completions.create(**({"model": "reader", "messages": ASK} | more))


def test_a_call(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    engine.says = ("I will look. ", LOOK[:9], LOOK[9:30], LOOK[30:])
    answer = _ask(at, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "I will look."
    [call] = answer.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "look", {"at": "lamp"})
    told = tokenizer.apply_chat_template(ASK, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert list(engine.job.ids) == told
    assert engine.job.options.constraint is None
    assert not engine.job.skip_special_tokens  # some models mark calls with them


def test_calls_in_a_stream_have_indices_and_no_text_shows(at: Listening, engine: FakeEngine) -> None:
    engine.says = [*LOOK, "\n", *TOUCH]
    calls: dict[int, Any] = {}
    arguments: dict[int, str] = {}
    reason = None
    for chunk in _ask(at, tools=TOOLS, stream=True):
        assert chunk.choices[0].delta.content is None  # as in a whole answer
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
            calls.setdefault(call.index, call)
        reason = chunk.choices[0].finish_reason
    assert [json.loads(arguments[n]) for n in (0, 1)] == [{"at": "lamp"}] * 2
    assert [calls[n].function.name for n in (0, 1)] == ["look", "touch"]
    assert calls[0].id != calls[1].id
    assert reason == "tool_calls"


def test_the_streaming_helper_of_the_sdk(at: Listening, engine: FakeEngine) -> None:
    engine.says = (LOOK,)
    with at.openai.chat.completions.stream(model="reader", messages=ASK, tools=TOOLS) as stream:
        message: Any = stream.get_final_completion().choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"at": "lamp"}


def test_one_call_if_several_are_not_wanted(at: Listening, engine: FakeEngine) -> None:
    engine.says = (LOOK + "\n" + TOUCH,)
    for parallel, names in ((False, ["look"]), (True, ["look", "touch"])):
        answer = _ask(at, tools=TOOLS, parallel_tool_calls=parallel)
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == names


def test_tools_that_must_not_be_called_are_not_shown(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    engine.says = (LOOK,)
    answer = _ask(at, tools=TOOLS, tool_choice="none").choices[0]
    assert (answer.finish_reason, answer.message.tool_calls, answer.message.content) == ("stop", None, LOOK)
    assert list(engine.job.ids) == tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)


def test_results_go_back(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    engine.says = (LOOK,)
    answer = _ask(at, tools=TOOLS).choices[0].message
    [call] = answer.tool_calls
    again: list[Any] = [*ASK, answer, {"role": "tool", "tool_call_id": call.id, "content": "it is on"}]
    engine.says = ("Yes.",)
    assert _ask(at, messages=again, tools=TOOLS).choices[0].message.content
    assert "it is on" in tokenizer.decode(engine.job.ids)


def test_no_call_has_the_id_of_an_earlier_one(
    at: Listening, engine: FakeEngine, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models count the calls of an answer, and a grammar has the same number for each call that must come."""
    template, (kimi, *_) = RECORDED["KIMI"]
    monkeypatch.setattr(tokenizer, "chat_template", template + tokenizer.chat_template)
    tools = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]
    engine.says, chat = (kimi.text,), list[Any](ASK)
    for n in range(3):
        message = _ask(at, messages=chat, tools=tools).choices[0].message
        ids = [call.id for call in message.tool_calls]
        assert ids == [f"functions.get_weather:{n}", f"functions.get_time:{n + 1}"]
        chat += [message, *({"role": "tool", "tool_call_id": id, "content": "7"} for id in ids)]


def _follow(constraint: Constraint | None, tokenizer: Any, text: str) -> bool:
    """Whether a text is allowed, and ends there."""
    assert constraint is not None
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not constraint.allowed()[token]:
            return False
        constraint.advance(token)
    return constraint.finished or bool(constraint.allowed()[tokenizer.eos_token_id])


@pytest.mark.daily
@pytest.mark.parametrize(
    ("choice", "parallel", "allowed"),
    [
        ("required", True, {LOOK, TOUCH, LOOK + "\n" + TOUCH}),
        ("required", False, {LOOK, TOUCH}),
        ({"type": "function", "function": {"name": "touch"}}, False, {TOUCH}),
    ],
)
def test_calls_that_must_come(
    at: Listening, engine: FakeEngine, tokenizer: Any, choice: Any, parallel: bool, allowed: set[str]
) -> None:
    engine.says = (TOUCH,)
    for text in (LOOK, TOUCH, LOOK + "\n" + TOUCH, "No.", LOOK.replace("at", "on")):
        answer = _ask(at, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert _follow(engine.job.options.constraint, tokenizer, text) == (text in allowed)


@pytest.mark.daily
@pytest.mark.parametrize("parallel", [None, True])
def test_a_tool_that_is_named_is_called_once(at: Listening, engine: FakeEngine, tokenizer: Any, parallel: Any) -> None:
    engine.says = (TOUCH + "\n" + TOUCH,)
    choice = {"type": "function", "function": {"name": "touch"}}
    more = {} if parallel is None else {"parallel_tool_calls": parallel}
    for text, allowed in ((TOUCH, True), (TOUCH + "\n" + TOUCH, False)):
        answer = _ask(at, tools=TOOLS, tool_choice=choice, **more)
        assert len(answer.choices[0].message.tool_calls) == 1
        assert _follow(engine.job.options.constraint, tokenizer, text) == allowed


CUT = LOOK[: LOOK.index("mp")]  # in the text of an argument


def _joined_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    found: dict[int, list[str]] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.id:
                assert call.index not in found
                found[call.index] = [call.function.name, ""]
            found[call.index][1] += call.function.arguments
    return [(name, arguments) for name, arguments in found.values()]


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_call_that_is_cut_comes_as_far_as_it_got(at: Listening, engine: FakeEngine, reason: Any) -> None:
    """By `max_tokens`, or by a stop text: valid, and flagged on all routes."""
    engine.says, engine.reason, engine.stop = ("I look. ", *CUT), reason, "." if reason == "stop" else None
    answer = _ask(at, tools=TOOLS).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("length", "I look.")
    [call] = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "la"})
    chunks = list(_ask(at, tools=TOOLS, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look."
    assert _joined_calls(chunks) == [("look", '{"at": "la"}')]
    assert chunks[-1].choices[0].finish_reason == "length"
    flat: Any = [{"type": "function", **TOOLS[0]["function"]}]
    told = at.openai.responses.create(model="reader", input="Is it on?", tools=flat)
    assert (told.output_text, told.status) == ("I look.", "incomplete")
    item: Any = told.output[-1]
    assert (item.type, item.status, item.arguments) == ("function_call", "incomplete", '{"at": "la"}')
    own: Any = {"name": "look", "input_schema": TOOLS[0]["function"]["parameters"]}
    body: Any = {"model": "reader", "max_tokens": 99, "messages": ASK, "tools": [own]}
    message = at.http.post("/v1/messages", json=body).json()
    assert message["content"][-1]["input"] == {"at": "la"}
    assert message["stop_reason"] == ("max_tokens" if reason == "length" else "stop_sequence")
    chat = at.http.post("/api/chat", json={"model": "reader", "messages": ASK, "tools": TOOLS, "stream": False}).json()
    assert chat["message"]["tool_calls"][0]["function"]["arguments"] == {"at": "la"}
    assert chat["done_reason"] == "length"


def test_a_call_that_is_cut_in_its_name_does_not_show(at: Listening, engine: FakeEngine) -> None:
    engine.says, engine.reason = ("I look. ", LOOK[: LOOK.index("ok")]), "length"
    answer = _ask(at, tools=TOOLS).choices[0]
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == ("length", "I look.", None)


WRONG: dict[str, tuple[str, Any]] = {
    "half a character": ('{"at": "\\ud83d"}', {"at": "\ufffd"}),
    "NaN": ('{"at": NaN, "b": [-Infinity, 1e999]}', {"at": None, "b": [None, None]}),
    "twice": ('{"at": "a", "at": "b"}', {"at": "a"}),
    "line ends": ('{"at": "a\nb\tc\x01"}', {"at": "a\nb\tc\x01"}),
    "null": ("null", {}),
    "empty": ('""', {}),
    "a string": ('"{\\"at\\": \\"a\\"}"', {"at": "a"}),
    "Python": ("{'at': True, \"b\": None,}", {"at": True, "b": None}),
    "a large number": ('{"at": ' + "9" * 500 + "}", {"at": None}),
}


def _strict(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    text.encode()
    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


def _data(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_arguments_are_valid_json_on_all_routes(at: Listening, engine: FakeEngine, name: str, stream: bool) -> None:
    """And the call can be sent back."""
    written, wanted = WRONG[name]
    engine.says = [*f'<tool_call>{{"name": "look", "arguments": {written}}}</tool_call>']
    body: dict[str, Any] = {"model": "reader", "messages": ASK, "tools": TOOLS, "stream": stream, "max_tokens": 9999}
    if stream:
        [(_, arguments)] = _joined_calls(list(_ask(at, tools=TOOLS, stream=True, max_tokens=9999)))
    else:
        arguments = _ask(at, tools=TOOLS, max_tokens=9999).choices[0].message.tool_calls[0].function.arguments
    assert _strict(arguments) == wanted
    made = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}
    back: list[Any] = [*ASK, {"role": "assistant", "content": None, "tool_calls": [made]}]
    back.append({"role": "tool", "tool_call_id": "call00001", "content": "on"})
    assert at.http.post("/v1/chat/completions", json=body | {"messages": back}).status_code == 200
    own = [{"name": "look", "input_schema": TOOLS[0]["function"]["parameters"]}]
    response = at.http.post("/v1/messages", json=body | {"tools": own})
    if stream:
        deltas = [event["delta"] for event in _data(response.text) if "delta" in event]
        found = _strict("".join(delta.get("partial_json", "") for delta in deltas))
    else:
        found = response.json()["content"][0]["input"]
    assert found == wanted
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    asked = {"input": "Who?", "tools": flat, "stream": stream, "max_output_tokens": 9999}
    told = at.http.post("/v1/responses", json=asked)
    if stream:
        events = _data(told.text)
        sent = "".join(event["delta"] for event in events if event["type"].endswith("arguments.delta"))
        assert _strict(sent) == wanted
        output = events[-1]["response"]["output"]
    else:
        output = told.json()["output"]
    assert _strict(output[0]["arguments"]) == wanted
    lines = at.http.post("/api/chat", json=body | {"options": {"num_predict": 9999}}).text.splitlines()
    calls = [call for line in lines for call in _strict(line)["message"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == [wanted]


@pytest.mark.daily
@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_others_come_back(at: Listening, engine: FakeEngine, tokenizer: Any, name: str) -> None:
    written, wanted = WRONG[name]
    made = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": written}}
    back: list[Any] = [*ASK, {"role": "assistant", "content": None, "tool_calls": [made]}]
    plain = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | items | list | length }}"
        "{% endfor %}{{ m.content }}{% endfor %}{{ tools }}<tool_call>{name}"
    )
    try:
        response = at.http.post("/v1/chat/completions", json={"messages": back, "tools": TOOLS})
    finally:
        tokenizer.chat_template = plain
    assert response.status_code == 200, response.text
    assert str(len(wanted)) in tokenizer.decode(engine.job.ids)


def test_a_call_without_an_end_stays_text_if_nothing_has_cut_it(at: Listening, engine: FakeEngine) -> None:
    engine.says = ("I look. ", LOOK[:40])
    assert _ask(at, tools=TOOLS).choices[0].message.content == "I look. " + LOOK[:40]


def test_an_answer_with_a_schema(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "lamp", "strict": True, "schema": schema}}
    _ask(at, response_format=form, n=2)
    first, second = (ticket.job.options.constraint for ticket in engine.tickets)
    assert first is not second  # each follows its own answer
    assert _follow(first, tokenizer, '{"on": true}')
    assert not _follow(second, tokenizer, '{"on": 1}')
    flat: Any = {"format": {"type": "json_schema", "name": "lamp", "strict": True, "schema": schema}}
    told = at.openai.responses.create(model="reader", input="Is it on?", text=flat)
    assert told.text is not None
    assert _follow(engine.job.options.constraint, tokenizer, '{"on": false}')


@pytest.mark.daily
@pytest.mark.parametrize(("choice", "says"), [("auto", True), ("required", False), ("none", True)])
def test_a_schema_beside_tools(at: Listening, engine: FakeEngine, tokenizer: Any, choice: str, says: bool) -> None:
    engine.says = ("{}",) if says else (LOOK,)
    for text, allowed in (("{}", says), (LOOK, choice != "none"), ("No.", False)):
        _ask(at, tools=TOOLS, tool_choice=choice, response_format={"type": "json_object"})
        assert _follow(engine.job.options.constraint, tokenizer, text) == allowed


def test_any_json_object(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    _ask(at, response_format={"type": "json_object"})
    assert _follow(engine.job.options.constraint, tokenizer, '{"a": [1, "b"]}')
    _ask(at, response_format={"type": "json_object"})
    assert not _follow(engine.job.options.constraint, tokenizer, "[1]")
    _ask(at, response_format={"type": "text"})
    assert engine.job.options.constraint is None


@pytest.mark.daily
@pytest.mark.parametrize(
    ("change", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD, "strict": True}}},
            "response_format",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": BAD, "strict": True}}], **MUST},
            "tools",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused(at: Listening, change: Any, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        _ask(at, **change)
    assert told.value.param == param
    where = {"response_format": "of the schema of response_format", "tools": "of the parameters of the tool 'a'"}
    assert f"`type` {where[str(param)]} cannot be enforced: a type must be one of" in told.value.message


_CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
_DEEP: Any = {f"l{n}": {"allOf": [{"$ref": f"#/$defs%2Fl{n + 1}"}]} for n in range(1800)}  # once ended the process
_LONG = {"$defs": {f"a{n}": {"properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(4000)}}


@pytest.mark.parametrize("of_tool", [False, True])
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "#"}, "'#' leads back to itself"),
        ({"$ref": "#/$defs/a", **_CIRCLE}, "leads back to itself"),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"], **_CIRCLE}, "'#/$defs/a'"),
        ({"$ref": "#/$defs/a0", **_LONG}, "1000 levels"),
        ({"$ref": "#/$defs/l0", "$defs": {**_DEEP, "l1800": {"type": "null"}}}, "1000 levels"),
        ({"$ref": "#/$defs%2Fa", **_CIRCLE, "$defs/a": {"type": "null"}}, "'#/$defs/a' leads back to itself"),
        (
            {"$id": "https://a.example/s", "$ref": "https://a.example/s#/$defs/a", **_CIRCLE},
            "'#/$defs/a' leads back to itself",
        ),
        ({"$ref": "s#/$defs/a", **_CIRCLE}, "nothing in the schema that 's#/$defs/a' refers to"),
        ({"$ref": "#b", "$defs": {"a": {"$anchor": "a", "type": "null"}}}, "nothing in the schema that '#b'"),
        ({"properties": {"x": {"$id": "https://a.example/s", "$ref": "#"}}}, "`properties.x.$ref`"),
    ],
)
def test_references_without_an_end(at: Listening, schema: dict[str, Any], says: str, of_tool: bool) -> None:
    """Strict schemas are refused; what others refer to is left to the model."""
    for strict in (True, False):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
        tool = {"type": "function", "function": {"name": "look", "parameters": schema, "strict": strict}}
        body = {"tools": [tool], **MUST} if of_tool else {"response_format": form}
        response = at.http.post("/v1/chat/completions", json={"model": "reader", "messages": ASK} | body)
        field = "tools" if of_tool else "response_format"
        if strict:
            assert response.status_code == 400
            error = response.json()["error"]
            assert says in error["message"]
            assert ("the tool 'look'" if of_tool else "the schema of response_format") in error["message"]
            assert error["param"] == field
        else:
            assert response.status_code == 200
            assert response.headers["x-kvboost-ignored"].startswith("tools.look.parameters." if of_tool else field)


def test_a_constraint_knows_all_columns_of_the_logits(at: Listening, engine: FakeEngine) -> None:
    _ask(at, response_format={"type": "json_object"})
    constraint = engine.job.options.constraint
    assert constraint is not None
    assert len(constraint.allowed()) == engine.vocab_size == 1472


OLDER = [tool["function"] for tool in TOOLS]


@pytest.mark.daily
@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_an_older_form_of_tools(at: Listening, engine: FakeEngine, tokenizer: Any, stream: bool) -> None:
    engine.says = ("I look. ", LOOK, TOUCH)
    told = _ask(at, functions=OLDER, function_call="auto", stream=stream)
    choices = [chunk.choices[0] for chunk in told] if stream else [told.choices[0]]
    messages = [choice.delta if stream else choice.message for choice in choices]
    [call] = [message.function_call for message in messages if message.function_call]
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "lamp"})
    assert not any(message.tool_calls for message in messages)
    assert choices[-1].finish_reason == "function_call"
    assert list(engine.job.ids) == tokenizer.apply_chat_template(
        ASK, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )


def test_functions_in_the_history(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    made: list[Any] = [
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "it is on"},
    ]
    plain = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}{{ m }}\n{% endfor %}{{ tools }}<tool_call>{name}"
    try:
        _ask(at, messages=[*ASK, *made], functions=OLDER)
    finally:
        tokenizer.chat_template = plain
    text = tokenizer.decode(engine.job.ids)
    assert "'function': {'name': 'look', 'arguments': {}}" in text
    assert "{'role': 'tool', 'content': 'it is on', 'name': 'look'}" in text


def test_a_function_that_must_be_called(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    engine.says = (TOUCH,)
    assert _ask(at, functions=OLDER, function_call={"name": "touch"}).choices[0].message.function_call.name == "touch"
    assert _follow(engine.job.options.constraint, tokenizer, TOUCH)
    _ask(at, functions=OLDER, function_call="none")
    assert engine.job.options.constraint is None


@pytest.mark.daily
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"functions": OLDER, "tools": TOOLS}, "functions is the older form of tools"),
        ({"functions": OLDER, "function_call": "auto", "tool_choice": "auto"}, "older form of tool_choice"),
        ({"function_call": "auto"}, "function_call needs functions"),
        ({"functions": OLDER, "function_call": {"name": "taste"}}, "got 'taste'"),
        ({"functions": [{"name": "a b"}]}, "functions.0.name"),
    ],
)
def test_older_forms_that_do_not_fit(at: Listening, change: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        _ask(at, **change)
    assert says in told.value.message


@pytest.mark.daily
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_allowed(at: Listening, engine: FakeEngine, tokenizer: Any, mode: str) -> None:
    engine.says = (TOUCH,)
    named = [{"type": "function", "function": {"name": "touch"}}]
    _ask(at, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}})
    shown = tokenizer.apply_chat_template(ASK, tools=TOOLS[1:], add_generation_prompt=True, return_dict=False)
    assert list(engine.job.ids) == shown
    if mode == "required":
        assert _follow(engine.job.options.constraint, tokenizer, TOUCH)
        _ask(at, tools=TOOLS, tool_choice="any")
        assert _follow(engine.job.options.constraint, tokenizer, LOOK)
