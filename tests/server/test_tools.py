"""Tools and structured answers by the openai SDK."""

import json
from typing import Any

import openai
import pytest

from tests.internals.server import Constraint
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
    reason = None
    for chunk in _ask(at, tools=TOOLS, stream=True):
        assert not chunk.choices[0].delta.content
        for call in chunk.choices[0].delta.tool_calls or ():
            calls[call.index] = call
        reason = chunk.choices[0].finish_reason
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


def _follow(constraint: Constraint | None, tokenizer: Any, text: str) -> bool:
    """Whether a text is allowed, and ends there."""
    assert constraint is not None
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not constraint.allowed()[token]:
            return False
        constraint.advance(token)
    return constraint.finished or bool(constraint.allowed()[tokenizer.eos_token_id])


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


@pytest.mark.parametrize("parallel", [None, True])
def test_a_tool_that_is_named_is_called_once(at: Listening, engine: FakeEngine, tokenizer: Any, parallel: Any) -> None:
    engine.says = (TOUCH + "\n" + TOUCH,)
    choice = {"type": "function", "function": {"name": "touch"}}
    more = {} if parallel is None else {"parallel_tool_calls": parallel}
    for text, allowed in ((TOUCH, True), (TOUCH + "\n" + TOUCH, False)):
        answer = _ask(at, tools=TOOLS, tool_choice=choice, **more)
        assert len(answer.choices[0].message.tool_calls) == 1
        assert _follow(engine.job.options.constraint, tokenizer, text) == allowed


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_call_that_is_cut_does_not_show(at: Listening, engine: FakeEngine, reason: Any) -> None:
    """By `max_tokens`, or by a stop text."""
    engine.says, engine.reason, engine.stop = ("I look. ", *LOOK[:40]), reason, "." if reason == "stop" else None
    answer = _ask(at, tools=TOOLS).choices[0]
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == (reason, "I look.", None)
    chunks = [chunk.choices[0] for chunk in _ask(at, tools=TOOLS, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look."
    assert not any(chunk.delta.tool_calls for chunk in chunks)
    assert chunks[-1].finish_reason == reason
    flat: Any = [{"type": "function", **TOOLS[0]["function"]}]
    for says, text in ((engine.says, "I look."), ((LOOK[:40],), "")):
        engine.says = says
        told = at.openai.responses.create(model="reader", input="Is it on?", tools=flat)
        assert told.output_text == text
        assert told.status == ("incomplete" if reason == "length" else "completed")


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
