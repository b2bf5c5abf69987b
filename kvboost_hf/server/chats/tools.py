"""Finds tool calls in answers, in the formats in which models write them.

A model's calls are found by transformers' parser of responses: by the tokenizer's `response_template` if it has one,
else by the one given here for the format that its chat template shows.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}

_CONTENT = {"content_args": {"strip": False}}
_REASONING_FIELDS = ("thinking", "reasoning", "reasoning_content")
_OTHER_NAME = re.compile(r'"name"\s*(?:[^:\s]|:\s*[^"\s])')
_NAME = re.compile(r'"name"\s*:\s*"([^"]*"?)')
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The format in which a model writes tool calls.

    Args:
        sign: A pattern that the chat templates of such models have.
        fields: Those of its response template.
        before: Text before the first call.
        call: Text before the name, before the arguments and behind them.
        between: Text between calls; None if there is one call at most.
        after: Text behind the last call.
        marker: A text that nothing but calls begins with.
        marked: Whether no other text looks like a call.
    """

    sign: str
    fields: Mapping[str, Mapping[str, Any]]
    before: str = ""
    call: tuple[str, str, str]
    between: str | None
    after: str = ""
    marker: str
    marked: bool = True


def _function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


HERMES = ToolFormat(  # Qwen 2.5 and 3, too
    sign=r"<tool_call>(\\n|\W)*name",
    fields={
        "content": _CONTENT,
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": _function("{content.name}", "{content.arguments}"),
        },
    },
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    between="\n",
    marker="<tool_call>",
)
_MISTRAL_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "content": _CONTENT,
    "tool_calls": {
        "open_pattern": r"\[TOOL_CALLS\](?=\s*\[)",
        "content": "json",
        "transform_each": True,
        "transform": _function("{name}", "{arguments}"),
    },
    "named_tool_calls": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\s*\{)",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "repeats": True,
        "content": "json",
        "transform": _function("{name}", "{content}"),
    },
}
MISTRAL_NAMED = ToolFormat(  # since its eleventh tokenizer
    sign=r"\[TOOL_CALLS\](.|\n)*\[ARGS\]",
    fields=_MISTRAL_FIELDS,
    call=("[TOOL_CALLS]", "[ARGS]", ""),
    between="",
    marker="[TOOL_CALLS]",
)
MISTRAL = ToolFormat(
    sign=r"\[TOOL_CALLS\]",
    fields=_MISTRAL_FIELDS,
    before="[TOOL_CALLS][",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    after="]",
    marker="[TOOL_CALLS]",
)
LLAMA = ToolFormat(
    sign=r"<\|python_tag\|>|\\?\"parameters\\?\"",
    fields={
        "content": _CONTENT,
        "tool_calls": {
            "open_pattern": r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"name")',
            "content": "json",
            "transform": _function("{content.name}", "{content.parameters}"),
        },
    },
    call=('{"name": "', '", "parameters": ', "}"),
    between=None,
    marker="<|python_tag|>{",
    marked=False,
)
_FORMATS = (HERMES, MISTRAL_NAMED, MISTRAL, LLAMA)


class ToolCall(NamedTuple):
    """A tool call."""

    name: str
    arguments: str  # JSON
    id: str  # nine letters and digits, which every chat template takes


class Parsed(NamedTuple):
    """A part of an answer, or all of it."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


def format_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> ToolFormat:
    """The format in which a model writes tool calls, by its chat template.

    Raises:
        ValueError: the chat template has no place for tools, or shows none of the formats that are known here.
    """
    template = _chat_template(tokenizer, tools)
    for known in _FORMATS:
        if re.search(known.sign, template):
            return known
    raise ValueError(
        "`tools` needs a model that writes calls as Hermes, Qwen, Mistral or Llama 3 do, and the chat template of "
        "this one shows another format. Give its tokenizer a `response_template`."
    )


def joined(parts: Sequence[Parsed]) -> Parsed:
    """Join parts of an answer."""
    calls = tuple(call for part in parts for call in part.calls)
    return Parsed("".join(part.content for part in parts), calls, "".join(part.reasoning for part in parts))


class ToolCallStream:
    """Finds calls in a text that comes in pieces; the result is the same however it is cut.

    Held back is what may begin a call, and white space, which is left out around calls.

    Args:
        tokenizer: The tokenizer of the model.
        tools: That were offered. Without any, calls of a response template stay text.
        prefix: The prompt's text; a response template needs it where the prompt begins the answer.

    Attributes:
        thinking: Whether the next text is reasoning, as a response template marks it.

    Raises:
        ValueError: the chat template has no place for tools, or it is not known how the model writes calls.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool], *, prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self._template: dict[str, Any] | None = None  # that of the tokenizer
        self._names: set[str] | None = None  # None for any
        self._marker: str | None = None  # None for none that is known
        if getattr(tokenizer, "response_template", None) is None:
            known = format_of(tokenizer, tools)
            self._template = {"start_anchor": "\n", "fields": known.fields}
            prefix, self._marker = "", known.marker
            if not known.marked:
                self._names = {tool["function"]["name"] for tool in tools}
        elif tools:
            _chat_template(tokenizer, tools)
        else:
            self._template = _without_calls(tokenizer.response_template)
        self._parser = self._new_parser(prefix)
        self._untold = ""  # what came since, as it is
        self._spaces = ""  # held back
        self._called = False  # nothing but space since the last call
        self._calling = False  # in a call that has not ended
        self.thinking = False
        self._follow(self._parser.initial_events)

    def push(self, text: str) -> Parsed:
        """Add text; returns what is certain now and was not before."""
        return joined([self._push(char) for char in text])

    def finish(self, *, cut: bool = False) -> Parsed:
        """Return the rest, after the last text.

        Args:
            cut: Whether the answer was ended where it would have gone on. A call that has begun is then left out, if
                it is not complete but for its end.
        """
        left_out = cut and self._in_call()
        try:
            parsed = self._read(self._parser.finalize()[1])
        except (ValueError, KeyError):
            return Parsed() if left_out else Parsed(self._untold)
        if left_out:
            return parsed._replace(content="")
        return parsed._replace(content=parsed.content + ("" if self._called else self._spaces))

    def _push(self, char: str) -> Parsed:
        # One at a time: what has come is then known to end where a call does.
        self._untold += char
        try:
            return self._read(self._parser.feed(char))
        except (ValueError, KeyError):
            malformed = Parsed(self._untold)
            self._parser = self._new_parser("")
            self._untold, self._spaces, self._called, self._calling = "", "", False, False
            return malformed

    def _in_call(self) -> bool:
        """Whether what has not been told is the beginning of a call, and of nothing else."""
        text = self._untold.lstrip()
        if self._marker is not None and text.startswith(self._marker):
            return True
        if not self._calling or self._names is None:
            return self._calling
        # Other JSON may begin with a name, too.
        found = _NAME.search(text)
        if found is None:
            return _OTHER_NAME.search(text) is None
        return any(f'{name}"'.startswith(found[1]) for name in self._names)

    def _new_parser(self, prefix: str) -> Any:
        return self._tokenizer.get_response_parser(self._template, prefix=prefix, tools=self._tools)

    def _read(self, events: list[dict[str, Any]]) -> Parsed:
        content, reasoning, calls = "", "", list[ToolCall]()
        for event in events:
            kind, field = event["type"], event["field"]
            self._follow([event])
            if field.endswith("tool_calls"):
                self._calling = kind != "region_close"
            if kind == "region_chunk" and field == "content":
                content += self._content(event["text"])
            elif kind == "region_chunk" and field in _REASONING_FIELDS:
                reasoning += event["text"]
            elif kind == "region_close" and field.endswith("tool_calls"):
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                calls += [self._call(value) for value in values]
                self._spaces, self._called = "", True
            if kind == "region_close" and field != "content":  # which the next call may bring about
                self._untold = self._marker if self._marker and self._untold.endswith(self._marker) else ""
        return Parsed(content, tuple(calls), reasoning)

    def _follow(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self.thinking = event["field"] in _REASONING_FIELDS and event["type"] != "region_close"

    def _content(self, text: str) -> str:
        """`text` behind the white space that was held back, but for the white space at its end."""
        whole = text.lstrip() if self._called else self._spaces + text
        self._called = self._called and not whole
        content = whole.rstrip()
        self._spaces = whole[len(content) :]
        self._untold = self._untold.partition(content)[2] if content else self._untold
        return content

    def _call(self, value: Any) -> ToolCall:
        function = value["function"] if isinstance(value, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict) or (self._names and name not in self._names):
            raise ValueError(f"A call must have the name of a tool, and arguments, got {value!r}.")
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False), _new_id())


def _chat_template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> str:
    template = tokenizer.get_chat_template(tools=[dict(tool) for tool in tools]) if tokenizer.chat_template else ""
    if "tools" not in template:
        raise ValueError(
            "`tools` needs a model whose chat template has a place for them, and that of this one has none. "
            "Leave `tools` out, or load a tokenizer with such a template."
        )
    return template


def _without_calls(template: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: field for name, field in template["fields"].items() if not name.endswith("tool_calls")}
    return {**template, "fields": fields}


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
