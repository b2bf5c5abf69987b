"""Calls of tools are found in every format, however the text is cut, and nothing else is taken for one."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvboost_hf.assets import load_embedded
from tests.internals.server import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, Parsed, ToolCallStream, format_of, joined
from tests.tool_calls import parse_tool_calls

pytestmark = pytest.mark.daily


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [
    _tool("add", a={"type": "integer", "maximum": 99, "minimum": 0}, b={"type": "boolean"}),
    _tool("weather", city={"type": "string", "maxLength": 8}),
]
TEMPLATES = {
    "hermes": r'{% if tools %}{{ tools | tojson }}<tool_call>\n{"name": .., "arguments": ..}</tool_call>{% endif %}',
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ '[TOOL_CALLS] [' }}",
    "mistral_named": "{% if tools %}{{ tools | tojson }}{% endif %}{{ '[TOOL_CALLS]' + name\n + '[ARGS]' }}",
    "llama": '{% if tools %}{{ tools | tojson }} Answer with {"name": function, "parameters": {..}}{% endif %}',
}
FORMATS = {"hermes": HERMES, "mistral": MISTRAL, "mistral_named": MISTRAL_NAMED, "llama": LLAMA}
ADD, WEATHER = ("add", {"a": 1, "b": True}), ("weather", {"city": 'Os"lo} é'})
CALLS: dict[str, dict[str, tuple[str, list[Any]]]] = {
    "hermes": {
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n</tool_call>': ("", [ADD]),
        'I look. <tool_call>{"name": "weather", "arguments": {"city": "Os\\"lo} é"}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": true}}</tool_call>\n': ("I look.", [WEATHER, ADD]),
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": true}}</tool_call>\n Done. ': ("Done. ", [ADD]),
        # No end of the call, but all of its arguments.
        'x\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n': ("x", [ADD]),
    },
    "mistral": {
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": true}}]': ("", [ADD]),
        'I look. [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Os\\"lo} é"}}, '
        '{"name": "add", "arguments": {"a": 1, "b": true}}]': ("I look.", [WEATHER, ADD]),
    },
    "mistral_named": {
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": true}': ("", [ADD]),
        '[TOOL_CALLS]weather[CALL_ID]abc123[ARGS]{"city": "Os\\"lo} é"}[TOOL_CALLS]add{"a": 1, "b": true}': (
            "",
            [WEATHER, ADD],
        ),
    },
    "llama": {
        '{"name": "add", "parameters": {"a": 1, "b": true}}': ("", [ADD]),
        '\n<|python_tag|>{"name": "weather", "parameters": {"city": "Os\\"lo} é"}}': ("", [WEATHER]),
    },
}
PLAIN = {
    "hermes": [
        "No calls, a < b and <tool",
        "<tool_call>{not json}</tool_call> and on",
        'a <tool_call>{"name": "add", "arguments": {"a": 1',
        '<tool_call>{"age": 3}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>\n',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>"add"</tool_call>',
    ],
    "mistral": [
        "a [TOOL_CALLS",
        '[TOOL_CALLS] [{"name": "add", 3}]',
        "[TOOL_CALLS][1]",
        "[TOOL_CALLS] and text",
        "[1] ",
    ],
    "mistral_named": ["[TOOL_CALLS]add[ARGS]{", '[TOOL_CALLS]add[ARGS]"a"', "\n [TOOL_CALLS]"],
    "llama": [
        '{"answer": 3}\n',
        '{"name": "Anna", "parameters": {}}',  # no tool of that name
        '{"name": "add", "age": 3}',
        '{"name": "add", "parameters": {"a": 1',
        '{"name": "add", "parameters": [1]}',
        'See {"name": "add", "parameters": {}}',
        '<|python_tag|>brave_search.call(query="x")',
    ],
}


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    tokenizer = load_embedded()[1]
    tokenizer.chat_template = template
    return tokenizer


def cuts(text: str) -> Iterator[list[str]]:
    """The text in one piece, in characters, and in two at every place."""
    yield [text]
    yield [*text]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


def told(parsed: Parsed) -> tuple[str, list[tuple[str, Any]]]:
    return parsed.content, [(call.name, json.loads(call.arguments)) for call in parsed.calls]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_calls_and_the_text_around_them(name: str) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name])
    assert format_of(tokenizer, TOOLS) is FORMATS[name]
    for text, expected in CALLS[name].items():
        assert told(parse_tool_calls(text, tokenizer, TOOLS)) == expected
        for pieces in cuts(text):
            stream = ToolCallStream(tokenizer, TOOLS)
            assert told(joined([*map(stream.push, pieces), stream.finish()])) == expected


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_what_is_no_call_stays_text(name: str) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name])
    for text in PLAIN[name]:
        for pieces in cuts(text):
            stream = ToolCallStream(tokenizer, TOOLS)
            assert joined([*map(stream.push, pieces), stream.finish()]) == Parsed(text)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_call_that_is_cut_comes_as_far_as_it_got(name: str) -> None:
    """At every place, and however the text comes; before its name is known, it is left out."""
    tokenizer = tokenizer_for(TEMPLATES[name])
    for text, (said, calls) in CALLS[name].items():
        opener = min(text.index(sign) for sign in ("<tool_call>", "[TOOL_CALLS]", '{"name"') if sign in text)
        marker = re.match(r"<tool_call>|\[TOOL_CALLS\]", text[opener:])
        sure = opener + (marker.end() if marker else len('{"name"'))
        for end in range(len(text) + 1):
            found = set()
            for pieces in ([text[:end]], [*text[:end]], [text[: end // 2], text[end // 2 : end]]):
                stream = ToolCallStream(tokenizer, TOOLS)
                parsed = joined([*map(stream.push, pieces), stream.finish(cut=True)])
                found.add((parsed.content, tuple(call._replace(id="") for call in parsed.calls)))
            [(content, made)] = found
            if end < sure and "<|python_tag|>{" not in text[:end]:
                assert (content, made) == (text[:end], ())
            else:
                behind = content.removeprefix(said)  # what only looks like the start of another call
                assert said.startswith(content) or "Done. ".startswith(behind) or "<tool_call>".startswith(behind)
                assert not any(sign in content for sign in ("<tool_call>", "[TOOL_CALLS]", '"name"', "tag|>{"))
            for call, (named, arguments) in zip(made, calls, strict=False):
                assert call.name == named
                assert json.loads(call.arguments).items() <= arguments.items() or call.cut
        assert [call.cut for call in made] == [False] * len(calls)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_what_is_no_call_stays_text_if_it_is_cut(name: str) -> None:
    tokenizer = tokenizer_for(TEMPLATES[name])
    begun: dict[str, tuple[str, list[Any]]] = {
        'a <tool_call>{"name": "add", "arguments": {"a": 1': ("a", [("add", {})]),
        "[TOOL_CALLS]add[ARGS]{": ("", [("add", {})]),
        "\n [TOOL_CALLS]": ("", []),
        '{"name": "add", "parameters": {"a": 1': ("", [("add", {})]),
        "[TOOL_CALLS][1]": ("", []),
    }
    more = {"llama": ['{"name": "Anna", "age', '{"name": 3', '{"name": "An', '{"nam']}
    for text in [*PLAIN[name], *more.get(name, ())]:
        for pieces in cuts(text):
            stream = ToolCallStream(tokenizer, TOOLS)
            parsed = joined([*map(stream.push, pieces), stream.finish(cut=True)])
            if text == '[TOOL_CALLS] [{"name": "add", 3}]':
                assert parsed == Parsed(text)
                continue
            assert told(parsed) == begun.get(text, (text, []))
            assert all(call.cut for call in parsed.calls)


def test_a_marker_that_ends_a_call_is_not_lost() -> None:
    stream = ToolCallStream(tokenizer_for(TEMPLATES["mistral_named"]), TOOLS)
    parts = [*map(stream.push, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1'), stream.finish()]
    assert told(joined(parts)) == ('[TOOL_CALLS]add[ARGS]{"a": 1', [("add", {"a": 1})])


def test_a_call_of_a_response_template_that_is_cut() -> None:
    tokenizer = tokenizer_for(TEMPLATES["hermes"])
    call = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}
    tokenizer.response_template = {"fields": {"content": {}, "tool_calls": call}, "start_anchor": "assistant:"}
    for cut, said in ((True, "So:"), (False, 'So: <call>{"a')):
        stream = ToolCallStream(tokenizer, TOOLS)
        assert joined([*map(stream.push, 'So: <call>{"a'), stream.finish(cut=cut)]) == Parsed(said)


def test_malformed_between_calls() -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": true}}</tool_call>'
    parsed = parse_tool_calls(f"A {good} <tool_call>no</tool_call> {good}", tokenizer_for(TEMPLATES["hermes"]), TOOLS)
    assert told(parsed) == ("A <tool_call>no</tool_call>", [ADD, ADD])


def test_text_comes_as_early_as_it_is_sure() -> None:
    stream = ToolCallStream(tokenizer_for(TEMPLATES["hermes"]), TOOLS)
    assert [stream.push(piece).content for piece in ["Hi ", "there", " <", "b> <tool", "s>"]] == [
        "Hi",
        " there",
        "",
        " <b>",
        " <tools>",
    ]
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    made = [len(stream.push(char).calls) for char in call]
    assert made.index(1) == call.index("</tool_call>") - 1
    assert sum(made) == 1


def test_ids_differ_and_suit_every_template() -> None:
    tokenizer = tokenizer_for(TEMPLATES["mistral"])
    text = '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]'
    ids = [call.id for call in parse_tool_calls(text, tokenizer, TOOLS).calls]
    assert len(set(ids)) == 2
    assert all(len(i) == 9 and i.isalnum() and i.isascii() for i in ids)


def test_response_templates_come_first() -> None:
    tokenizer = tokenizer_for(TEMPLATES["hermes"])
    tokenizer.response_template = {
        "start_anchor": "assistant:",
        "fields": {
            "content": {},
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"<call (?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    text = "I add.</think>So: <call add><a>1</a><b>true</b></call>\n<call weather><city>7</city></call>"
    expected = Parsed("So:", (), "I add.")
    for pieces in cuts(text):
        stream = ToolCallStream(tokenizer, TOOLS, prefix="user: 1?\nassistant:<think>")
        parsed = joined([*map(stream.push, pieces), stream.finish()])
        assert told(parsed) == ("So:", [ADD, ("weather", {"city": "7"})])  # of the types that the tools have
        assert parsed._replace(calls=()) == expected
    assert parse_tool_calls("<think>a", tokenizer, TOOLS) == Parsed("", (), "a")


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ({"name": "add", "arguments": {"a": 1}}, True),
        ({"name": "add", "parameters": '{"a": 1}'}, True),
        ({"name": 5, "arguments": {"a": 1}}, False),
        ({"arguments": {"a": 1}}, False),
        ({"name": "add", "arguments": "[1]"}, False),
        ({"name": "add", "arguments": 1}, False),
    ],
)
def test_a_call_of_a_response_template_has_a_name_and_arguments(function: Any, found: bool) -> None:
    """What has none is text."""
    tokenizer = tokenizer_for(TEMPLATES["hermes"])
    call = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
    tokenizer.response_template = {"start_anchor": "assistant:", "fields": {"content": {}, "tool_calls": call}}
    text = f"<call>{json.dumps({'function': function})}</call>"
    stream = ToolCallStream(tokenizer, TOOLS, prefix="user: 1?\nassistant:")
    parsed = joined([stream.push(text), stream.finish()])
    assert told(parsed) == (("", [("add", {"a": 1})]) if found else (text, []))


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_templates_without_a_place_for_tools(template: str | None) -> None:
    tokenizer = tokenizer_for("")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="chat template has a place for them"):
        ToolCallStream(tokenizer, TOOLS)


@pytest.mark.parametrize("shown", ["<tool_call>{function-name}", "<call>", ""])
def test_formats_that_are_not_known(shown: str) -> None:
    with pytest.raises(ValueError, match="Give its tokenizer a `response_template`"):
        parse_tool_calls("", tokenizer_for("{{ tools }}" + shown), TOOLS)
