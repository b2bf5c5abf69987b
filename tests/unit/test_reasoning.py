"""The reasoning of an answer is found however its text is cut, and a grammar begins behind it."""

import pytest
import torch
from torch import Tensor

from tests.internals.server import (
    AfterReasoning,
    AnswerFrame,
    Parsed,
    ReasoningMarks,
    ReasoningReader,
    ToolCallStream,
    joined,
    marks_in,
)
from tests.unit.test_server_tools import ADD, TEMPLATES, TOOLS, cuts, tokenizer_for, told

pytestmark = pytest.mark.daily

THINK = ReasoningMarks("<think>", "</think>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n</tool_call>'


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nSo.\n\nIt is.\n</think>\n\nYes. ", "So.\n\nIt is.", "Yes. "),
        (False, " \n<think></think>Yes.", "", "Yes."),
        (False, "<think>So", "So", ""),
        (False, "<think>a </thin", "a", ""),  # half a mark, where the answer was cut
        (False, "Yes.", "", "Yes."),
        (False, "  Yes. <think>no</think>", "", "  Yes. <think>no</think>"),  # what comes later is text
        (False, "<thing>", "", "<thing>"),
        (False, "<thi", "", ""),
        (False, "\n</think>\n\nYes.</think>", "", "Yes.</think>"),  # no reasoning, but its end
        (False, "</think>", "", ""),
        (False, "</thi", "", ""),
        (False, "</b>", "", "</b>"),
        (False, "", "", ""),
        (True, "\nSo.</think>Yes.</think>", "So.", "Yes.</think>"),
        (True, "a < b </think>\n<think>", "a < b", "<think>"),
        (True, "\n<think>\nSo.</think>Yes.", "So.", "Yes."),  # the mark of the prompt once more
        (True, "<thing></think>Yes.", "<thing>", "Yes."),
        (True, "<thi", "", ""),
        (True, "a </", "a </", ""),
        (True, "", "", ""),
    ],
)
def test_reasoning_and_the_text_behind_it(opened: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in cuts(text):
        reader = ReasoningReader(THINK, opened=opened)
        parts = [*map(reader.push, pieces), reader.finish(cut=True)]
        assert joined(parts) == Parsed(content, (), reasoning)


def test_reasoning_comes_as_early_as_it_is_sure() -> None:
    reader = ReasoningReader(THINK, opened=False)
    found = [
        (reader.push(text)[::2], reader.thinking) for text in ("<th", "ink>", "\n So", " it </", "b>", "</think>")
    ]
    assert found == [
        (("", ""), False),
        (("", ""), True),
        (("", "So"), True),
        (("", " it"), True),
        (("", " </b>"), True),
        (("", ""), False),
    ]


def test_calls_behind_reasoning() -> None:
    """A call in the reasoning is none."""
    tokenizer = tokenizer_for(TEMPLATES["hermes"])
    for pieces in cuts(f"I could {CALL}, so:</think>\nI add. {CALL}"):
        reader = ReasoningReader(THINK, opened=True, rest=ToolCallStream(tokenizer, TOOLS))
        parsed = joined([*map(reader.push, pieces), reader.finish()])
        assert told(parsed) == ("I add.", [ADD])
        assert parsed.reasoning == f"I could {CALL}, so:"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"{{- '<|channel>thought\n' + thinking + '\n<channel|>' -}}", "<|channel>thought\nSo.\n<channel|>Yes."),
        ("{{ '<|inner_prefix|>' }} or <think>", "<|inner_prefix|>So.<|inner_suffix|>Yes."),
        ("{{ '<|think:start|>' }}", "<|think:start|>So.<|think:end|>Yes."),
        ("{{ '<mm:think>' }}", "<mm:think>So.</mm:think>Yes."),
        ("{{ '<longcat_think>\\n' }}", "<longcat_think>\nSo.\n</longcat_think>\nYes."),
        ("{{ '<think{}>'.format(mark) }}", "<think:opensource>So.</think:opensource>Yes."),
        ("{{- open_tag('think' if thinking else 'response') -}}", "<|open|>think<|sep|>So.<|close|>think<|sep|>Yes."),
        ("[|assistant|]<thought>", "<thought>\nSo.\n</thought>\n\nYes."),
        (
            "{% set start = 'Here are my reasoning steps:\n' %}",
            "Here are my reasoning steps:\nSo.\n[BEGIN FINAL RESPONSE]\nYes.",
        ),
        ("{{ '◁think▷' }}", "◁think▷So.◁/think▷Yes."),
        ("{{ message.split('</think>')[-1] }}", "<think>\nSo.\n</think>\n\nYes."),
    ],
)
def test_marks_are_those_of_the_chat_template(template: str, text: str) -> None:
    marks = marks_in(template)
    assert marks is not None
    for pieces in cuts(text):
        reader = ReasoningReader(marks, opened=False)
        assert joined([*map(reader.push, pieces), reader.finish()]) == Parsed("Yes.", (), "So.")
    assert marks_in("{{ message.content }} <thinking>") is None


@pytest.mark.parametrize(
    ("text", "cut", "content"),
    [
        ("<answer>\nYes.\n</answer>\n", False, "Yes."),
        ("\n<answer>Yes </b>.\n</ans", True, "Yes </b>."),
        ("<answer>\nSo: </answer>, and\n</answer>", False, "So: </answer>, and"),
        ("<answer>\n", True, ""),
        ("<ans", True, ""),
        ("<ans", False, "<ans"),
        (" <b>Yes.</b>\n</answer>", False, " <b>Yes.</b>\n</answer>"),
        ("<answer>\nYes.\n</ans ", False, "Yes.\n</ans "),
        ("", False, ""),
    ],
)
def test_texts_around_answers(text: str, cut: bool, content: str) -> None:
    marks = marks_in("<think> {{ content.split('<answer>')[-1].replace('</answer>', '') }}")
    assert marks is not None
    assert marks.answer is not None
    for pieces in cuts(text):
        frame = AnswerFrame(marks.answer)
        assert joined([*map(frame.push, pieces), frame.finish(cut=cut)]) == Parsed(content)


def test_calls_within_texts_around_answers() -> None:
    tokenizer = tokenizer_for(TEMPLATES["hermes"])
    for pieces in cuts(f"So.</think>\n<answer>\nI add. {CALL}\n</answer>"):
        frame = AnswerFrame(("<answer>", "</answer>"), ToolCallStream(tokenizer, TOOLS))
        reader = ReasoningReader(THINK, opened=True, rest=frame)
        assert told(joined([*map(reader.push, pieces), reader.finish()])) == ("I add.", [ADD])


XML_TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call>\\n<function=example_function_name>{% endif %}"
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntrue\n</parameter>\n</function>\n"
    "</tool_call>"
)


KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": true}<|tool_call_end|><|tool_calls_section_end|>'
)
KINDS = {
    "JSON": (TEMPLATES["hermes"], CALL),
    "XML": (XML_TEMPLATE, XML),
    "Kimi": ("{% if tools %}{{ tools }}{% endif %}<|tool_call_begin|>", KIMI),
}


@pytest.mark.parametrize(("template", "call"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("I add. {call}", "I add."),
        ("{call}\n", ""),
        ("In <tool_call> tags, so:\n\n{call}\n{call}", "In <tool_call> tags, so:"),
        ("I could {call}, so", None),
        ("I add. {call} And then", None),
        ("I add. <tool_call>", None),
        ("I add. <tool_call>\n<", None),
    ],
)
def test_calls_that_end_an_answer_within_its_reasoning(
    template: str, call: str, text: str, reasoning: str | None
) -> None:
    text, tokenizer = text.format(call=call), tokenizer_for(template)
    for pieces in cuts(text):
        stream = ToolCallStream(tokenizer, TOOLS)
        reader = ReasoningReader(THINK, opened=True, rest=stream, calls=stream.opens)
        parsed = joined([*map(reader.push, pieces), reader.finish()])
        assert told(parsed) == ("", [ADD] * text.count(call) if reasoning is not None else [])
        assert parsed.reasoning == (text.rstrip() if reasoning is None else reasoning)


class _Yes:
    """Allows token 3, once."""

    finished = False

    def allowed(self) -> Tensor:
        return torch.arange(8) == 3

    def advance(self, token: int) -> None:
        assert token == 3
        self.finished = True


def test_a_grammar_begins_behind_the_reasoning() -> None:
    constraint = AfterReasoning(_Yes(), close=5, ends=[7], vocab_size=8)
    for token in (1, 3, 0):
        assert constraint.allowed().tolist() == [True] * 7 + [False]  # reasoning must end
        constraint.advance(token)
        assert not constraint.finished
    constraint.advance(5)
    assert constraint.allowed().nonzero().tolist() == [[3]]
    constraint.advance(3)
    assert constraint.finished
    done = _Yes()
    done.finished = True
    assert not AfterReasoning(done, close=5, ends=[7], vocab_size=8).finished  # it still thinks
