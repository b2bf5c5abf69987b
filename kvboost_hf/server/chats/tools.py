"""Finds tool calls in answers, and sends them on as they are written.

The regions of an answer are found by transformers' parser of responses: by the tokenizer's `response_template` if it
has one, else by the `fields` of the format that its chat template shows. What is in a region of calls is read by
`CallsReader`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from kvboost_hf.server.chats.calls import CallsReader, ToolCall, new_id
from kvboost_hf.server.chats.tool_formats import Tool, ToolFormat, format_of, known_format, template_for
from kvboost_hf.server.chats.values import arguments_of, overlap, without_half_mark

REASONING_FIELDS = ("thinking", "reasoning", "reasoning_content")
_RESCANNED = 64  # characters of what only began like a call, in which a call may begin


class Parsed(NamedTuple):
    """A part of an answer, or all of it."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


def joined(parts: Sequence[Parsed]) -> Parsed:
    """Join parts of an answer, and the pieces of each call."""
    calls = joined_calls(call for part in parts for call in part.calls)
    return Parsed("".join(part.content for part in parts), calls, "".join(part.reasoning for part in parts))


def joined_calls(pieces: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Join the pieces of each call."""
    found: list[ToolCall] = []
    for piece in pieces:
        if found and not found[-1].ended:
            piece = piece._replace(arguments=found.pop().arguments + piece.arguments)
        found.append(piece)
    return tuple(found)


class ToolCallStream:
    """Finds calls in a text that comes in pieces; the result is the same however it is cut.

    Held back is what may begin a call, and white space, which is left out around calls.

    Args:
        tokenizer: The tokenizer of the model.
        tools: That were offered. Without any, calls of a response template stay text.
        prefix: The prompt's text; a response template needs it where the prompt begins the answer.
        streams: Tell pieces of calls as they are written. A call whose arguments turn out malformed is then ended as
            valid JSON, and `cut`; otherwise it stays text.
        ids: The ids of earlier calls of the chat. No call of the answer gets one of them.

    Attributes:
        thinking: Whether the next text is reasoning, as a response template marks it.

    Raises:
        ValueError: the chat template has no place for tools, or it is not known how the model writes calls.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Tool],
        *,
        prefix: str = "",
        streams: bool = False,
        ids: Iterable[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self._template: dict[str, Any] | None = None  # that of the tokenizer
        self._known: ToolFormat | None = None  # None for the tokenizer's own response template
        self._streams = streams
        if getattr(tokenizer, "response_template", None) is None:
            self._known = format_of(tokenizer, tools) if tools else known_format(str(tokenizer.chat_template))
            assert self._known is not None
            self._template = {"start_anchor": "\n", "fields": self._known.fields}
            prefix = ""
        elif tools:
            template_for(tokenizer, tools)
        else:
            self._template = dict(tokenizer.response_template)
        if not tools and self._template is not None:
            self._template = _without_calls(self._template)
        self._parser = self._new_parser(prefix)
        self._calls: CallsReader | None = None  # in the region of calls that is open
        self._ids = {*ids}  # that calls have
        self._untold = ""  # what came since, as it is
        self._spaces = ""  # held back
        self._called = False  # nothing but space since the last call
        self._calling = False  # in a call of a response template
        self._ignores = False  # to the end of the region: a call in it was malformed, after pieces of it were told
        self._plain = False  # whether no call can come any more
        self.thinking = False
        self._follow(self._parser.initial_events)

    @property
    def opens(self) -> tuple[str, ...]:
        """Texts that calls of the tools begin with, and no other text, as far as is known."""
        return self._known.opens if self._known is not None and self._tools else ()

    def push(self, text: str) -> Parsed:
        """Add text; returns what is certain now and was not before."""
        parts: list[Parsed] = []
        while text:
            if self._plain:
                parts.append(Parsed(self._content(text)))
                break
            if self._calls is not None and self._calls.within and not self._calls.stuck:
                rest = self._calls.read(text)
                # What is given back may have begun in an earlier piece.
                taken = len(text) - len(rest)
                self._untold = self._untold + text[:taken] if taken >= 0 else self._untold[:taken]
                parts.append(self._told())
                text = rest
                continue
            size = self._plain_size(text)
            part, again = self._feed(text[:size])
            parts.append(part)
            text = again + text[size:]
        return joined(parts)

    def finish(self, *, cut: bool = False) -> Parsed:
        """Return the rest, after the last text.

        Args:
            cut: Whether the answer was ended where it would have gone on. A call that has begun is told as far as it
                came, if its name did; what only began like a call is left out.
        """
        if self._plain:
            return Parsed(self._spaces)
        calls = self._calls
        if calls is not None and calls.within:
            if calls.close(cut=cut):
                return self._told()
            return Parsed() if cut and calls.may_be_call else Parsed(self._untold)
        if calls is not None:
            return Parsed() if calls.count or (cut and calls.may_be_call) else Parsed(self._untold)
        left_out = cut and (
            self._calling or (self._known is not None and self._untold.lstrip().startswith(self._known.marker))
        )
        try:
            parsed = self._read(self._parser.finalize()[1])
        except (ValueError, KeyError):  # of a mark by a pattern, which only its end shows to be one
            left_out = left_out or (cut and self._known is not None and self._known.marked)
            return Parsed() if left_out else Parsed(self._untold)
        if left_out or (cut and self._known is not None and parsed.content.lstrip().startswith(self._known.heads)):
            return parsed._replace(content="")
        if cut and self._known is None:  # the parser holds back what may be a mark alone
            fields = self._tokenizer.response_template["fields"].values()
            sides = [field[side] for field in fields for side in ("open", "close") if side in field]
            marks = [mark for side in sides for mark in ([side] if isinstance(side, str) else side)]
            content, reasoning = (without_half_mark(text, marks) for text in (parsed.content, parsed.reasoning))
            parsed = parsed._replace(content=content, reasoning=reasoning)
        return parsed._replace(content=parsed.content + ("" if self._called else self._spaces))

    def _plain_size(self, text: str) -> int:
        """How many characters to feed: as many as surely are text, or one.

        One at a time, what has come is known to end where a call does.
        """
        if self._known is None or self._calls is not None or self._untold.strip():
            return 1
        starts = self._known.starts
        return max(1, next((at for at, char in enumerate(text) if char in starts), len(text)))

    def _feed(self, text: str) -> tuple[Parsed, str]:
        """Add text outside of calls; returns what is certain, and what is to be added once more."""
        self._untold += text
        try:
            return self._read(self._parser.feed(text)), ""
        except (ValueError, KeyError):
            if self._calls is not None and self._calls.told:
                self._calls.close(cut=True)
                told, self._ignores = self._told(), True
                return told, ""
            text, self._untold = self._untold, ""
            self._parser, self._calls, self._calling = self._new_parser(""), None, False
            self._spaces, self._called = "", False
            if self._known is not None and not self._known.marked:
                self._plain = True
            elif self._known is not None and len(text) <= _RESCANNED:
                begun = len(text) - len(text.lstrip()) + 1
                return Parsed(text[:begun]), text[begun:]
            return Parsed(text), ""

    def _told(self) -> Parsed:
        """The pieces of calls that were read."""
        assert self._calls is not None
        pieces = self._calls.take()
        if not self._calls.within:
            self._forget()
            self._spaces, self._called = "", True
        return Parsed("", tuple(pieces))

    def _new_parser(self, prefix: str) -> Any:
        return self._tokenizer.get_response_parser(self._template, prefix=prefix, tools=self._tools)

    def _read(self, events: list[dict[str, Any]]) -> Parsed:
        parts: list[Parsed] = []
        for event in events:
            kind, field = event["type"], event["field"]
            self._follow([event])
            if field.endswith("tool_calls"):
                parts.append(self._read_known(event) if self._known is not None else self._read_own(event))
            elif kind == "region_chunk" and field == "content":
                parts.append(Parsed(self._content(event["text"])))
            elif kind == "region_chunk" and field in REASONING_FIELDS:
                parts.append(Parsed(reasoning=event["text"]))
            if kind == "region_close" and field != "content":
                self._forget()
        return joined(parts)

    def _forget(self) -> None:
        """What has come is told, but for the beginning of the next call, which may have ended the last one."""
        marker = self._known.marker if self._known is not None else None
        self._untold = marker if marker and self._untold.endswith(marker) else ""

    def _read_known(self, event: dict[str, Any]) -> Parsed:
        """Follow a region of calls in a format that is known here."""
        kind = event["type"]
        if kind == "region_open":
            assert self._known is not None
            self._calls = CallsReader(self._known, self._tools, self._ids, streams=self._streams)
            return Parsed()
        calls = self._calls
        assert calls is not None
        if kind == "region_close":
            ignores, self._ignores = self._ignores, False
            if not ignores and not (calls.close(cut=False) and calls.count):
                raise ValueError("A call must have a name and arguments.")
            told = self._told()
            self._calls = None
            return told
        if not self._ignores and (calls.stuck or calls.read(event["text"])):
            raise ValueError("A call must have a name and arguments.")
        before = calls.count
        return self._told() if calls.count > before or calls.within else Parsed()

    def _read_own(self, event: dict[str, Any]) -> Parsed:
        """Follow a region of calls of the tokenizer's response template."""
        self._calling = event["type"] != "region_close"
        if self._calling:
            return Parsed()
        values = event["value"] if isinstance(event["value"], list) else [event["value"]]
        calls = tuple(map(_call, values))
        self._spaces, self._called = "", True
        return Parsed("", calls)

    def _follow(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self.thinking = event["field"] in REASONING_FIELDS and event["type"] != "region_close"

    def _content(self, text: str) -> str:
        """`text` behind the white space that was held back, but for the white space at its end."""
        whole = text.lstrip() if self._called else self._spaces + text
        self._called = self._called and not whole
        content = whole.rstrip()
        self._spaces = whole[len(content) :]
        if content:
            _, found, rest = self._untold.partition(content)
            # The first character of a text may have shown the end of a mark, and been forgotten with it.
            self._untold = rest if found else self._untold[overlap(content, f"{self._untold} ") :]
        return content


def _call(value: Any) -> ToolCall:
    """A call as a response template has it."""
    function = value["function"] if isinstance(value, dict) else {}
    name, given = function.get("name"), function.get("arguments", function.get("parameters"))
    arguments = arguments_of(given if isinstance(given, str) else json.dumps(given))
    if not isinstance(name, str) or arguments is None:
        raise ValueError(f"A call must have the name of a tool, and arguments, got {value!r}.")
    return ToolCall(name, arguments, new_id())


def _without_calls(template: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: field for name, field in template["fields"].items() if not name.endswith("tool_calls")}
    return {**template, "fields": fields}
