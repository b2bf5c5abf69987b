# ruff: noqa: E501
"""Calls are found in what models of each format write, whole and in a stream, however it is cut."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvboost_hf.assets import load_embedded
from tests.internals.server import Parsed, ToolCall, ToolCallStream, format_of, joined, tool_formats
from tests.recorded_calls import RECORDED, TOOLS, Recorded

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


@pytest.mark.parametrize("name", RECORDED)
def test_templates_show_their_format(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = RECORDED[name][0]
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
        calls = found[0].calls
        arguments = [json.loads(call.arguments) for call in calls]
        assert all(isinstance(each, dict) for each in arguments)
        assert [call.name for call in calls] == [name for name, _ in recorded.calls[: len(calls)]]
        assert all(call.ended and not call.cut for call in calls[:-1])
        assert len(calls) >= before
        before = len(calls)
        for (_, wanted), got in zip(recorded.calls, arguments, strict=False):
            assert got.keys() <= wanted.keys()


def pieces_of(parts: list[Parsed]) -> list[ToolCall]:
    return [call for part in parts for call in part.calls]


@pytest.mark.parametrize(
    "name", ["HERMES", "QWEN_XML", "GLM", "MISTRAL_NAMED", "DEEPSEEK", "KIMI", "HARMONY", "GEMMA"]
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
