"""Reads the calls in a region of an answer piece by piece, so that arguments can be sent as they are written."""

import json
import secrets
import string
from collections.abc import Mapping, Sequence, Set
from itertools import count
from typing import Any, NamedTuple

import regex  # type: ignore[import-untyped]

from kvboost_hf.server.chats.tags import TagsReader
from kvboost_hf.server.chats.tool_formats import Tool, ToolFormat
from kvboost_hf.server.chats.values import ValueReader, arguments_of

_ID_CHARS = string.ascii_letters + string.digits
_SPACE = " \t\r\n"
_OPENING = _SPACE + "["
_BETWEEN = _SPACE + ",;[]}"  # calls, and brackets too many
_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_FIELDS = (*_NAMES, *_ARGUMENTS, "type", "id", "tool_call_id")
_MAX_HEAD = 512  # characters before arguments


class ToolCall(NamedTuple):
    """A tool call, or a piece of one. The arguments of its pieces together are a JSON object."""

    name: str
    arguments: str  # JSON, or the next part of it
    id: str  # nine letters and digits, which every chat template takes, or what the model wrote
    ended: bool = True  # whether it is the last piece
    cut: bool = False  # whether the arguments end where the model was cut, or wrote no more that is valid
    begins: bool = True  # whether it is the first piece; told with the number by who knows all calls of the answer
    number: int = 0  # of the call in its answer


def new_id() -> str:
    """An id that no other call has."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


def _unlike(id: str, known: Set[str]) -> str:
    """An id that no call of the chat has: a model may write one twice, and so does one whose call is forced.

    Example:
        >>> _unlike("functions.look:0", {"functions.look:0", "functions.look:1"})
        'functions.look:2'
    """
    if id not in known:
        return id
    name, colon, number = id.rpartition(":")
    if not (colon and number.isdecimal()):
        return new_id()
    return next(found for n in count(int(number) + 1) if (found := f"{name}:{n}") not in known)


class _Call:
    """One call, told in pieces."""

    def __init__(self, known: ToolFormat, tools: Mapping[str, Any], *, streams: bool) -> None:
        self.name: str | None = None
        self.id = new_id()
        self.pieces: list[ToolCall] = []  # that were not taken
        self.told = False  # whether there was a piece
        self._known, self._tools, self._streams = known, tools, streams
        self._waiting = ""  # arguments that were not told
        self._any = False  # whether arguments were told

    def named(self, name: str) -> bool:
        """Take the name; returns whether a tool may be called by it."""
        short = name.removeprefix("functions.")
        self.name = short if name not in self._tools and short in self._tools else name
        return self.offered

    @property
    def offered(self) -> bool:
        """Whether a tool may be called by the name."""
        return self.name is not None and (self._known.marked or self.name in self._tools)

    @property
    def properties(self) -> set[str]:
        """The arguments that the tool of the name has by its schema."""
        named = self._tools.get(self.name or "", {}).get("properties")
        return set(named) if isinstance(named, dict) else set()

    def argue(self, text: str, *, ended: bool = False, cut: bool = False) -> None:
        """Add to the arguments."""
        self._waiting += text
        if ended and not self._waiting and not self._any:
            self._waiting = "{}"
        if self.name is None or not (ended or (self._streams and self._waiting)):
            return
        if self.name != self._known.nothing or self.name in self._tools:
            self.pieces.append(ToolCall(self.name, self._waiting, self.id, ended, cut))
        self.told, self._any, self._waiting = True, True, ""


class CallsReader:
    """Reads calls of one format, one after the other.

    `ids` are those that calls of the chat have; more are added.

    With `streams` pieces of a call are told as soon as they are certain. Otherwise a call is told when it is complete,
    so that one that turns out to be none can stay text.

    Attributes:
        count: Calls that have ended.
        stuck: Whether the text goes on as no call does.
    """

    def __init__(self, known: ToolFormat, tools: Sequence[Tool], ids: set[str], *, streams: bool) -> None:
        self.count, self.stuck = 0, False
        self._ids = ids
        self._known, self._streams = known, streams
        self._tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._call: _Call | None = None
        self._reader: _HeadedCall | _ObjectCall | None = None  # of that call, while it has not ended

    @property
    def within(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._reader is not None

    @property
    def told(self) -> bool:
        """Whether pieces of the call that has begun were told."""
        return self._reader is not None and self._call is not None and self._call.told

    def read(self, text: str) -> str:
        """Read more text; returns what comes behind a call, or cannot be a part of calls."""
        if self._reader is None:
            text = text.lstrip(_BETWEEN if self.count else _OPENING)
            if not text:
                return ""
            self._begin(text[0])
        if self._reader is None:
            return text
        text = self._reader.read(text)
        self.stuck = self._reader.stuck
        if self._reader.done:
            self._end(cut=False)
        return text

    def _begin(self, char: str) -> None:
        call = _Call(self._known, self._tools, streams=self._streams)
        head = self._known.head
        if char == "{" and not (head and regex.match(head, char, partial=True)):
            self._call, self._reader = call, _ObjectCall(call, self._known)
        elif head is not None:
            self._call, self._reader = call, _HeadedCall(call, self._known, self._tools, self._ids)
        else:
            self.stuck = True

    def _end(self, *, cut: bool) -> None:
        assert self._call is not None
        self._call.argue("", ended=True, cut=cut)
        self._reader, self.count = None, self.count + 1

    def take(self) -> list[ToolCall]:
        """The pieces that were read since the last time."""
        if self._call is None:
            return []
        found, self._call.pieces = self._call.pieces, []
        return found

    def close(self, *, cut: bool) -> bool:
        """End the call that has begun; returns whether it is one, whose last piece is then told.

        `cut` says whether the answer was ended where it would have gone on.
        """
        if self._reader is None or self._call is None:
            return True
        exact = self._reader.close(cut=cut)
        if not self._call.offered or not (exact or cut or self._call.told):
            return False
        self._end(cut=not exact)
        return True

    @property
    def may_be_call(self) -> bool:
        """Whether what has come may be the beginning of a call, and of nothing else."""
        if self._known.marked or self._reader is None:
            return self._known.marked
        return self._reader.may_begin(list(self._tools))


class _HeadedCall:
    """A call whose name comes before its arguments.

    `read` returns what comes behind the call, or cannot be a part of it. `close` adds what came of the arguments, and
    tells whether these are all, and nothing but brackets was missing. `may_begin` tells whether what came may be the
    beginning of a call of one of the tools. So does `_ObjectCall`.
    """

    def __init__(self, call: _Call, known: ToolFormat, tools: Mapping[str, Any], ids: set[str]) -> None:
        self.done = self.stuck = False
        self._call, self._known, self._tools, self._ids = call, known, tools, ids
        self._head = regex.compile(known.head or "")
        self._held = ""
        self._arguments: ValueReader | TagsReader | None = None

    def read(self, text: str) -> str:
        for at, char in enumerate(text):
            if self._arguments is not None:
                return self._read(text[at:])
            self._held += char
            found = self._head.match(self._held, partial=True)
            if found is None or (found.partial and len(self._held) > _MAX_HEAD):
                self.stuck = True
                return text[at + 1 :]
            if not found.partial:
                groups = found.groupdict()
                begins = found.start("args") if groups.get("args") else found.end()
                return self._begin(groups["name"], groups.get("id"), self._held[begins:] + text[at + 1 :])
        return ""

    def _begin(self, name: str, id: str | None, rest: str) -> str:
        if id:
            self._call.id = _unlike(id, self._ids)
            self._ids.add(self._call.id)
        self.stuck = not self._call.named(name)
        if self.stuck:
            return rest
        if self._known.tags is not None:
            self._arguments = TagsReader(self._known.tags, self._tools.get(self._call.name or "", {}))
        else:
            self._arguments = ValueReader(self._known.spelling, call=self._known.python)
        return self._read(rest)

    def _read(self, text: str) -> str:
        assert self._arguments is not None
        rest = self._arguments.read(text)
        self._argue()
        self.done, self.stuck = self._arguments.done and not self.stuck, self.stuck or self._arguments.stuck
        return rest

    def _argue(self) -> None:
        reader = self._arguments
        assert reader is not None
        if reader.kind == "{":
            self._call.argue(reader.take())
        elif reader.done:  # in a string, or none
            arguments = arguments_of(reader.take())
            self._call.argue(arguments or "")
            self.stuck = arguments is None

    def close(self, *, cut: bool) -> bool:
        if self._arguments is None:
            return False
        nothing = not self._arguments.begun
        exact = self._arguments.close() or nothing
        self._argue()
        self.stuck = False
        return exact and not cut

    def may_begin(self, names: Sequence[str]) -> bool:
        held = regex.match(r"[\w.-]*", self._held)[0]
        return any(name.startswith(held) for name in names)


class _ObjectCall:
    """A call as a JSON object with a name and arguments, or with an object of these as `function`."""

    def __init__(self, call: _Call, known: ToolFormat) -> None:
        self.done = self.stuck = False
        self._call, self._known = call, known
        self._state = self._open
        self._depth = 0
        self._field = ""
        self._value: ValueReader | None = None  # of a field, or of its value
        self._text = ""  # of a value that is not told as it comes
        self._has_arguments = False
        self._others: dict[str, str] = {}  # fields that no call has

    def read(self, text: str) -> str:
        while text and not self.done and not self.stuck:
            text = self._state(text)
        return text

    def _open(self, text: str) -> str:
        self._depth, self._state, self._field = self._depth + 1, self._name_field, ""
        return text[1:]

    def _name_field(self, text: str) -> str:
        if self._value is None:
            text = text.lstrip(_SPACE + ",")
            if text[:1] == "}":
                return self._leave(text[1:])
            if not text or text[0] not in "\"'":
                self.stuck = bool(text)
                return text
            self._value = ValueReader()
        text = self._value.read(text)
        if self._value.done:
            self._field, self._value = json.loads(self._value.take()), None
            self._state = self._equals
        return text

    def _equals(self, text: str) -> str:
        text = text.lstrip(_SPACE)
        if not text:
            return ""
        self.stuck = text[0] != ":" or not (self._known.marked or self._field in _FIELDS)
        self._state, self._text = self._read_value, ""
        return text if self.stuck else text[1:]

    def _read_value(self, text: str) -> str:
        if self._value is None:
            text = text.lstrip(_SPACE)
            if self._field == "function" and text[:1] == "{":
                return self._open(text)
            if not text:
                return ""
            self._value = ValueReader(self._known.spelling)
        text = self._value.read(text)
        self._take_value()
        return text

    def _take_value(self) -> None:
        reader = self._value
        assert reader is not None
        streams = self._field in _ARGUMENTS and reader.kind == "{" and not self._has_arguments
        if streams:
            self._call.argue(reader.take())
        else:
            self._text += reader.take()
        self.stuck = reader.stuck
        if reader.done:
            self._has_arguments = self._has_arguments or streams
            self._value, self._state = None, self._name_field
            if not streams:
                self._set(self._text)

    def _set(self, value: str) -> None:
        """Take a value that came as a whole."""
        if self._field in _NAMES and self._call.name is None:
            name = json.loads(value)
            self.stuck = not (isinstance(name, str) and name and self._call.named(name))
        elif self._field in _ARGUMENTS and not self._has_arguments:
            arguments = arguments_of(value)
            self.stuck = arguments is None
            if arguments is not None and (arguments != "{}" or value.startswith('"{')):
                self._has_arguments = True
                self._call.argue(arguments)
        elif self._field not in _FIELDS:
            self._others.setdefault(self._field, value)

    def _argue_others(self) -> None:
        """Take arguments that stand beside the name, where there are no others."""
        known = self._call.properties
        pairs = [
            f"{json.dumps(name, ensure_ascii=False)}: {each}" for name, each in self._others.items() if name in known
        ]
        if pairs and not self._has_arguments:
            self._call.argue(f"{{{', '.join(pairs)}}}")

    def _leave(self, rest: str) -> str:
        self._depth -= 1
        if not self._depth:
            self._argue_others()
            self.done = self._call.offered
            self.stuck = not self.done
        return rest

    def close(self, *, cut: bool) -> bool:
        if self._state == self._read_value and self._value is not None and self._field in _ARGUMENTS:
            exact = self._value.close()
            if self._value.kind == '"' and not self._has_arguments:
                inner = ValueReader()
                inner.read(json.loads(self._text + self._value.take()))
                inner.close()
                self._call.argue(inner.take() if inner.kind == "{" else "")
                return False
            self._take_value()
            return exact and not cut
        self._argue_others()
        return self._has_arguments or (self._state == self._name_field and not cut)

    def may_begin(self, names: Sequence[str]) -> bool:
        if self._state == self._read_value and self._field in _NAMES:
            if self._value is not None and self._value.begun and self._value.kind != '"':
                return False
            return any(json.dumps(name, ensure_ascii=False).startswith(self._text) for name in names)
        return self._field in _FIELDS
