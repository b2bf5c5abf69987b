# ruff: noqa: E501, RUF001
"""Calls are found in what models of each format write, whole and in a stream, however it is cut."""

import json
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvboost_hf.assets import load_embedded
from tests.internals.server import (
    Grammars,
    Parsed,
    ToolCall,
    ToolCallStream,
    ToolSupport,
    format_of,
    joined,
    json_of,
    tool_calls,
    tool_formats,
)
from tests.recorded_calls import FILE, PARIS, RECORDED, TIME, TOOLS, Recorded

pytestmark = pytest.mark.daily

CASES = [
    pytest.param(name, template, each, id=f"{name}-{n}")
    for name, (template, recorded) in RECORDED.items()
    for n, each in enumerate(recorded)
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_embedded()[1]


def read(tokenizer: Any, template: str, pieces: list[str], *, streams: bool, cut: bool = False) -> list[Parsed]:
    tokenizer.chat_template = template
    stream = ToolCallStream(tokenizer, TOOLS, streams=streams)
    return [*map(stream.push, pieces), stream.finish(cut=cut)]


def told(parsed: Parsed) -> tuple[list[tuple[str, Any]], str, str]:
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    assert all(call.ended and not call.cut for call in parsed.calls)
    return calls, parsed.content, parsed.reasoning


def test_every_format_is_recorded() -> None:
    known = {name for name, value in vars(tool_formats).items() if isinstance(value, tool_formats.ToolFormat)}
    assert known == RECORDED.keys()
    assert len(tool_formats.FORMATS) == len(known)


@pytest.mark.parametrize(
    ("name", "template"),
    [
        *((name, template) for name, (template, _) in RECORDED.items()),
        ("LFM", '{% set ns.system = ns.system + "List of tools: [" %}{{ tools }}'),  # LFM 2.5, in which no mark stands
        ("GIGACHAT", "{{ tools }}{{ '<|role_sep|>' }}{{- 'function call' + role_sep -}}"),
        ("GRANITE", "{{ tools }} prefix function calls with functools marker: functools[{...}]"),
        ("HERMES", "{{ tools }}<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>"),
        ("HERMES", 'List of tools: [{{ tools }}] Call them so: <tool_call>{"name": f, "arguments": {}}</tool_call>'),
    ],
)
def test_templates_show_their_format(tokenizer: Any, name: str, template: str) -> None:
    tokenizer.chat_template = template
    assert format_of(tokenizer, TOOLS) is getattr(tool_formats, name)


@pytest.mark.parametrize(("name", "template", "recorded"), CASES)
def test_recorded_answers(tokenizer: Any, name: str, template: str, recorded: Recorded) -> None:
    text = recorded.text
    cuts = [[text], [*text], [text[: len(text) // 3], text[len(text) // 3 :]]]
    cuts += [[text[:at], text[at : at + 3], text[at + 3 :]] for at in range(1, len(text), max(7, len(text) // 7))]
    for streams in (False, True):
        for pieces in cuts:
            parsed = joined(read(tokenizer, template, pieces, streams=streams))
            assert told(parsed) == (recorded.calls, recorded.content, recorded.reasoning)
            ids = [call.id for call in parsed.calls]
            assert tuple(ids[: len(recorded.ids)]) == recorded.ids
            assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(("name", "template", "recorded"), CASES)
def test_answers_that_are_cut(tokenizer: Any, name: str, template: str, recorded: Recorded) -> None:
    """What arrives of the calls is valid, grows with the answer, and is the same whole and in a stream."""
    text, before = recorded.text, 0
    for end in [*range(0, len(text), 1 + len(text) // 50), len(text)]:
        found = [
            joined(read(tokenizer, template, [text[: end // 2], text[end // 2 : end]], streams=streams, cut=True))
            for streams in (False, True)
        ]
        whole, stream = ([call._replace(id="") for call in parsed.calls] for parsed in found)
        assert whole == stream
        assert found[0].content == found[1].content
        assert not any(mark in found[0].content for mark in ("<|start|>", "<|channel|>"))  # heads of gpt-oss
        calls = found[0].calls
        arguments = [json.loads(call.arguments) for call in calls]
        assert all(isinstance(each, dict) for each in arguments)
        assert [call.name for call in calls] == [name for name, _ in recorded.calls[: len(calls)]]
        assert all(call.ended and not call.cut for call in calls[:-1])
        assert len(calls) >= before
        before = len(calls)
        for (_, wanted), got in zip(recorded.calls, arguments, strict=False):
            assert got.keys() <= wanted.keys()
            for (
                key,
                value,
            ) in got.items():  # a text that is cut has no half of a mark at its end, but for two characters
                if isinstance(wanted[key], str):
                    assert any(wanted[key].startswith(value[: len(value) - n]) for n in range(3))


def test_a_call_that_ends_before_its_arguments_is_none(tokenizer: Any) -> None:
    for end in ('"arguments"', '"arguments":', '"arguments": '):
        text = f'<tool_call>\n{{"name": "get_weather", {end}'
        for streams in (False, True):
            parsed = joined(read(tokenizer, RECORDED["HERMES"][0], [text], streams=streams))
            assert (parsed.calls, parsed.content) == ((), text)


@pytest.mark.parametrize(
    ("name", "mark", "text"),
    [
        ("KIMI", "<|tool_calls_section_end|>", "<b>\n<|tool_call_begin|> so"),
        ("DEEPSEEK", "<｜tool▁calls▁end｜>", "a < b\n\n<｜tool▁call▁begin｜>"),
        ("HUNYUAN", "</tool_calls:opensource>", "<b>\n<tool_call:opensource>"),
    ],
)
def test_white_space_of_what_is_no_call_stays(tokenizer: Any, name: str, mark: str, text: str) -> None:
    """Behind a mark that is left out, too, however the answer is cut."""
    for size in (1, 2, 3, 5, 100):
        whole = mark + text
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert joined(read(tokenizer, RECORDED[name][0], pieces, streams=False)) == Parsed(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("QWEN_XML", "<tool_call>\n<function=get_weather>\n<parameter=days>\n3"),
        ("QWEN_XML", "<tool_call>\n<function=get_weather>\n<parameter=da"),
        ("GLM", "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>3"),
        ("GLM", "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_val"),
    ],
)
def test_a_call_that_ends_in_its_first_argument_is_none(tokenizer: Any, name: str, text: str) -> None:
    for streams in (False, True):
        parsed = joined(read(tokenizer, RECORDED[name][0], [text], streams=streams))
        assert (parsed.calls, parsed.content) == ((), text)


def assert_read_as(tokenizer: Any, schema: Any, text: str, read_as: Any) -> None:
    """Read a call of a tool whose argument `x` has a schema, in one piece and streamed."""
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"one": {"enum": [1]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for streams in (False, True):
        stream = ToolCallStream(tokenizer, [tool], streams=streams)
        [call] = joined([*map(stream.push, text), stream.finish()]).calls
        found = json.loads(call.arguments)["x"]
        assert (found, type(found)) == (read_as, type(read_as))


def pieces_of(parts: list[Parsed]) -> list[ToolCall]:
    return [call for part in parts for call in part.calls]


@pytest.mark.parametrize(
    "name",
    [
        "HERMES",
        "QWEN_XML",
        "GLM",
        "MISTRAL_NAMED",
        "DEEPSEEK",
        "KIMI",
        "KIMI_XTML",
        "MINIMAX_NESTED",
        "HARMONY",
        "GEMMA",
    ],
)
def test_arguments_come_as_they_are_written(tokenizer: Any, name: str) -> None:
    template, recorded = RECORDED[name]
    [text] = [each.text for each in recorded if any(call[0] == "write_file" for call in each.calls)][:1]
    parts = read(tokenizer, template, [*text], streams=True)
    pieces = [(n, piece) for n, part in enumerate(parts) for piece in part.calls if piece.name == "write_file"]
    assert len(pieces) > 20
    sent = ""
    for at, piece in pieces:
        sent += piece.arguments
        shown = text[: at + 1]
        assert sent.count("print") <= shown.count("print") <= sent.count("print") + 1
    assert [piece.ended for _, piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize(
    ("schema", "written", "read_as"),
    [
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"enum": [{"a": 1}, [2]]}, '{"a": 1}', {"a": 1}),
        ({"enum": [{"a": 1}, [2]]}, "[2]", [2]),
        ({"enum": [None, 1.5]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "None", "None"),
        ({"type": "INTEGER"}, "5", 5),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "[5]", "[5]"),
        ({"type": ["array", "number"]}, '"5"', '"5"'),
        ({"type": "STRING", "nullable": True}, "5", "5"),
        ({"enum": ["auto", True, 2]}, "auto", "auto"),
        ({"enum": ["auto", True, 2]}, "true", True),
        ({"enum": ["auto", True, 2]}, "2", 2),
        ({"enum": ["1", 1]}, "1", "1"),
        ({"type": 5}, "5", "5"),
        ({"type": ["integer", "boolean"]}, "1", 1),
        ({"type": ["integer", "boolean"]}, "True", True),
        ({"type": "boolean"}, "1", True),
        ({"anyOf": [{"const": 1}, {"type": "null"}]}, "1", 1),
        ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/one", "description": "One."}, "1", 1),
        ({}, "5", "5"),
    ],
)
def test_values_in_tags_have_a_type_of_their_schema(tokenizer: Any, schema: Any, written: str, read_as: Any) -> None:
    tokenizer.chat_template = RECORDED["QWEN_XML"][0]
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert_read_as(tokenizer, schema, text, read_as)


@pytest.mark.parametrize(
    ("schema", "told", "written", "read_as"),
    [
        ({}, "true", "5", "5"),
        ({}, "false", "5", 5),
        ({}, "false", "[1, {}]", [1, {}]),
        ({}, "false", "Oslo", "Oslo"),
        ({"type": ["string", "integer"]}, "true", "5", "5"),
        ({"type": ["string", "integer"]}, "false", "5", 5),
        ({"type": ["string", "null"]}, "true", "null", "null"),
        ({"type": ["string", "null"]}, "false", "null", None),
        ({"type": "string"}, "false", "5", "5"),
        ({"type": "integer"}, "true", "5", 5),
    ],
)
def test_a_model_may_say_whether_a_value_is_a_text(
    tokenizer: Any, schema: Any, told: str, written: str, read_as: Any
) -> None:
    tokenizer.chat_template = RECORDED["DSML"][0]
    value = f'<｜DSML｜parameter name="x" string="{told}">{written}</｜DSML｜parameter>'
    text = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{value}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    assert_read_as(tokenizer, schema, text, read_as)


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (r"\ud800\udc00\udbff\udfff", "\U00010000\U0010ffff"),
        (r"\ud800x\udbff", "\ufffdx\ufffd"),
        (r"\udc00\udfff", "\ufffd\ufffd"),
        (r"\ud7ff\ue000", "\ud7ff\ue000"),
        (
            "\\\ud800\\\udfff\\\ud7ff\\\ue000",
            "\\\ufffd\\\ufffd\\\ud7ff\\\ue000",
        ),  # behind a backslash that escapes nothing
    ],
)
def test_halves_of_characters(tokenizer: Any, written: str, read_as: str) -> None:
    """Pairs are one character, from the first pair to the last, and others a sign that there was none."""
    tokenizer.chat_template = RECORDED["HERMES"][0]
    stream = ToolCallStream(tokenizer, TOOLS)
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{written}"}}}}\n</tool_call>'
    [call] = joined([stream.push(text), stream.finish()]).calls
    assert json.loads(call.arguments) == {"city": read_as}


@pytest.mark.daily
@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("\nParis\n</function>", {"city": "Paris"}),  # and no more: neither the value's tag, nor the call's
        ("\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", {"city": "", "days": 3}),
    ],
)
def test_values_end_where_their_call_does_and_may_be_empty(tokenizer: Any, written: str, found: object) -> None:
    text = f"<tool_call>\n<function=get_weather>\n<parameter=city>{written}"
    for pieces in ([text], [*text]):
        [call] = joined(read(tokenizer, RECORDED["QWEN_XML"][0], pieces, streams=False, cut=False)).calls
        assert (json.loads(call.arguments), call.cut) == (found, False)


def test_values_that_hold_nothing() -> None:
    for text in ("[]", "{}", '{"a": [], "b": [[], {}, 1]}'):
        assert json_of(text) == text
    assert json_of("]") is None
    assert json_of('{"a": }') is None


@pytest.mark.parametrize(("spaces", "calls"), [(501, 1), (502, 0)])
def test_a_head_has_its_length(tokenizer: Any, spaces: int, calls: int) -> None:
    """512 characters before the mark that ends it."""
    tokenizer.chat_template = RECORDED["QWEN_XML"][0]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    text = f"<tool_call>\n<function=f{' ' * spaces}>\n</function>\n</tool_call>"
    stream = ToolCallStream(tokenizer, tools)
    assert len(joined([stream.push(text), stream.finish()]).calls) == calls


def test_malformed_arguments_of_a_stream_end_as_valid_json(tokenizer: Any) -> None:
    template = RECORDED["HERMES"][0]
    text = 'So: <tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": three}}</tool_call> Done.'
    whole = joined(read(tokenizer, template, [text], streams=False))
    assert whole == Parsed(text)
    for pieces in ([text], [*text], [text[:80], text[80:]]):
        stream = joined(read(tokenizer, template, pieces, streams=True))
        [call] = stream.calls
        assert (json.loads(call.arguments), call.cut, call.ended) == ({"city": "Paris"}, True, True)
        assert stream.content == "So: Done." or stream.content == "So:Done."


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("written", "found"),
    [(r'"{\"city\": \"Par', {"city": "Par"}), (r'"{\"city\": \"Paris\", \"days\": ', {"city": "Paris"}), (r'"{', {})],
)
def test_arguments_that_are_a_text_are_read_as_far_as_they_go(
    tokenizer: Any, written: str, found: object, streams: bool
) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {written}'
    for pieces in ([text], [*text]):
        [call] = joined(read(tokenizer, RECORDED["HERMES"][0], pieces, streams=streams, cut=True)).calls
        assert (json.loads(call.arguments), call.cut) == (found, True)


@pytest.mark.parametrize("streams", [False, True])
def test_of_arguments_that_come_more_than_once_the_first_ones_count(tokenizer: Any, streams: bool) -> None:
    cities = "".join(f', "arguments": {{"city": "{city}"}}' for city in ("Paris", "Rome", "Oslo"))
    text = f'<tool_call>{{"name": "get_weather"{cities}}}</tool_call>'
    [call] = joined(read(tokenizer, RECORDED["HERMES"][0], [*text], streams=streams, cut=False)).calls
    assert json.loads(call.arguments) == {"city": "Paris"}


NO_LLAMA = [
    '{% for tool in tools %}{"name": "{{ tool.name }}", "parameters": {{ tool.parameters | tojson }}}{% endfor %}',
    '{% for tool in tools %}{{ \'{"name": "\' + tool.name + \'", "parameters": \' + (tool.parameters | tojson) }}{% endfor %}',
    '{{ tools }} The "parameters" of a function are JSON.',
    "{{ tools }}{# parameters #}",
    '{% for t in tools %}# {{ t.name }}: "parameters": {{ t.parameters }}{% endfor %}',
]


@pytest.mark.parametrize("template", NO_LLAMA)
def test_templates_that_only_mention_parameters_are_not_known(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="shows none of"):
        format_of(tokenizer, TOOLS)


_BITS = [
    *"{}[]\"',:\\<()=1-e\n ",
    "\\ud83d",
    "NaN",
    "</",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    '"name"',
    "é😀",
]


def _changed(text: str, random: Random) -> str:
    chars = list(text)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(chars) + 1)
        if random.random() < 0.5:
            chars[at:at] = random.choice(_BITS)
        else:
            del chars[at : at + random.randint(1, 6)]
    return "".join(chars)[: random.choice([None, random.randint(1, len(text))])]


@pytest.mark.parametrize("name", RECORDED)
def test_whatever_a_model_writes(tokenizer: Any, name: str) -> None:
    """Arguments are JSON objects without NaN and keys that come twice, and the same however the text is cut."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    random = Random(name)
    template, recorded = RECORDED[name]
    for _ in range(25):
        text, cut = _changed(random.choice(recorded).text, random), random.random() < 0.5
        sizes = iter(lambda: random.randint(1, 6), 0)
        pieces, at = [], 0
        while at < len(text):
            pieces.append(text[at : at + (size := next(sizes))])
            at += size
        for streams in (False, True):
            whole, cuts = (joined(read(tokenizer, template, p, streams=streams, cut=cut)) for p in ([text], pieces))
            assert whole._replace(calls=()) == cuts._replace(calls=())
            assert [call._replace(id="") for call in whole.calls] == [call._replace(id="") for call in cuts.calls]
            for call in whole.calls:
                found = json.loads(call.arguments, object_pairs_hook=unique, parse_constant=pytest.fail)
                assert isinstance(found, dict)
                call.arguments.encode()


FORCED = [known for known in tool_formats.FORMATS if known.call is not None]


def _written(known: tool_formats.ToolFormat, arguments: dict[str, Any]) -> str:
    """A call of `get_weather` as its format has it."""
    assert known.call is not None
    told = json.dumps(arguments, ensure_ascii=False)
    if known.tags is not None:
        values = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
        tags = [known.tags.written.replace("{key}", key).replace("{value}", one) for key, one in values.items()]
        told = "".join(tags)
    return known.before + known.call[0] + "get_weather" + known.call[1] + told + known.call[2] + known.after


@pytest.mark.parametrize("name", RECORDED)
def test_calls_are_read_as_they_are_written(tokenizer: Any, name: str) -> None:
    """What goes into a history is what a model could have said."""
    known = getattr(tool_formats, name)
    calls = [PARIS, FILE, ("search", {"query": 'it\'s "x"', "tags": ["a"], "exact": True, "limit": None}), TIME]
    for some in ([each] for each in calls) if known.between is None else (calls,):
        text = known.written(some, str)
        assert (text is None) == (known.call is None and name != "LFM")
        if text is not None:
            assert told(joined(read(tokenizer, RECORDED[name][0], [text], streams=False))) == (some, "", "")
    assert known.written([PARIS, TIME], str) is None or known.between is not None


@pytest.mark.parametrize("known", FORCED, ids=lambda known: known.name)
def test_calls_that_must_come(tokenizer: Any, known: tool_formats.ToolFormat) -> None:
    """What the grammar allows is found as a call, and what has not the arguments that it must have is not allowed."""
    [template] = [RECORDED[name][0] for name in RECORDED if getattr(tool_formats, name) is known]
    tokenizer.chat_template = template
    tools = json.loads(json.dumps(TOOLS[:2]))
    tools[0]["function"]["parameters"]["required"] = ["city"]
    grammars = Grammars(tokenizer, len(tokenizer), ends=[tokenizer.eos_token_id])
    try:
        constraints = [grammars.constraint(tool_calls(tokenizer, tools, parallel=False)) for _ in range(4)]
    finally:
        grammars.close()
    good = [PARIS[1], {"city": "a < b é"}, {"city": "x", "units": "celsius"}]
    for constraint, arguments in zip(constraints, [*good, {"days": 3}], strict=True):
        text = _written(known, arguments)
        allowed = True
        for token in tokenizer.encode(text, add_special_tokens=False):
            allowed = allowed and bool(constraint.allowed()[token])
            if allowed:
                constraint.advance(token)
        assert allowed == (arguments in good)
        if allowed:
            assert constraint.finished or constraint.allowed()[tokenizer.eos_token_id]
            parsed = joined(read(tokenizer, template, [text], streams=True))
            assert told(parsed)[0] == [("get_weather", arguments)]


@pytest.mark.parametrize("known", [known for known in FORCED if known.tags], ids=lambda known: known.name)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["string", "null"]}, ["Oslo", None], []),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, ["Oslo", None], []),
        ({"type": ["string", "array"], "items": {"type": "integer"}}, ["Oslo"], []),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b", 1]),
        ({"enum": ["auto", True, 2]}, ["auto", True, 2], ["true or so", False]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"type": ["integer", "null"]}, [3, None], ["a"]),
    ],
)
def test_texts_in_tags_that_must_come_have_no_quotes(
    tokenizer: Any, known: tool_formats.ToolFormat, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    [template] = [RECORDED[name][0] for name in RECORDED if getattr(tool_formats, name) is known]
    tokenizer.chat_template = template
    tools = json.loads(json.dumps(TOOLS[:1]))
    tools[0]["function"]["parameters"] |= {"properties": {"city": schema}, "required": ["city"]}
    grammars = Grammars(tokenizer, len(tokenizer), ends=[tokenizer.eos_token_id])
    try:
        grammar = tool_calls(tokenizer, tools, parallel=False)
        constraints = [grammars.constraint(grammar) for _ in [*good, *bad]]
    finally:
        grammars.close()
    for constraint, value in zip(constraints, [*good, *bad], strict=True):
        text = _written(known, {"city": value})
        allowed = True
        for token in tokenizer.encode(text, add_special_tokens=False):
            allowed = allowed and bool(constraint.allowed()[token])
            if allowed:
                constraint.advance(token)
        assert allowed == (value in good), value
        if allowed:
            stream = ToolCallStream(tokenizer, tools)
            [call] = joined([stream.push(text), stream.finish()]).calls
            assert json.loads(call.arguments) == {"city": value}


def test_tags_need_properties_at_the_top(tokenizer: Any) -> None:
    """Where calls are tags, a schema that has its properties elsewhere is refused: nothing would be forced."""
    names = [name for name in RECORDED for known in FORCED if known.tags and getattr(tool_formats, name) is known]
    assert names
    own: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
    refused: list[dict[str, Any]] = [{word: [own]} for word in ("allOf", "anyOf", "oneOf")]
    refused += [{"$ref": "#/$defs/own", "$defs": {"own": own}}, {"properties": [own]}]
    for name in names:
        tokenizer.chat_template = RECORDED[name][0]

        def forced(schema: dict[str, Any]) -> str:
            return tool_calls(tokenizer, [{"type": "function", "function": {"name": "get", "parameters": schema}}])

        for schema in refused:
            with pytest.raises(ValueError, match="`parameters` must have its `properties` at its top"):
                forced(schema)
        taken: list[dict[str, Any]] = [{}, {"type": "object"}, own, {**own, "anyOf": [{"required": ["city"]}]}]
        assert all(map(forced, taken))


@pytest.mark.parametrize("name", ["LFM", "OLMO", "PYTHONIC", "GEMMA", "DSML", "KIMI_XTML"])
def test_calls_that_cannot_be_forced(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = RECORDED[name][0]
    with pytest.raises(ValueError, match="cannot be forced with this model"):
        tool_calls(tokenizer, TOOLS)


def test_what_a_start_says_of_tools(tokenizer: Any) -> None:
    for template, told, served, unknown in (
        (RECORDED["QWEN_XML"][0], "Qwen 3 Coder", True, False),
        (RECORDED["LFM"][0], "LFM2 and 2.5; tool_choice cannot force them", True, False),
        ("{{ tools }}", "no format of calls that is known", False, True),
        ("{{ messages }}", "no place for them", False, False),
        (None, "no place for them", False, False),
    ):
        tokenizer.chat_template = template
        found = ToolSupport.of(tokenizer)
        assert told in found.told
        assert (found.served, found.unknown) == (served, unknown)
