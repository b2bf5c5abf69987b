"""Reads values as models write them, piece by piece, and writes each as valid JSON."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex  # type: ignore[import-untyped]

_SPACE = " \t\r\n\ufeff\u00a0"
_WORD = re.compile(r"[\w.+\-]+")
_BARE_KEY = re.compile(r"[^\s:=,{}\[\]()<>\"']+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_RUN = {'"': re.compile(r'[^"\\\ud800-\udfff]+'), "'": re.compile(r"[^'\\\ud800-\udfff]+")}
# What comes behind a quote that ends a text, where quotes in texts are not escaped: by what the text is in. Within a
# call, a comma comes before a name, and its end before another one, so that a text may be code.
_BEHIND_QUOTE = {
    "=": regex.compile(r"\s*(?:,\s*[^\s:=,{}\[\]()<>\"']+\s*=|\)\s*[\],<])"),
    ":": regex.compile(r"\s*[,}]"),
    "": regex.compile(r"\s*[,\]]"),
    "key": regex.compile(r"\s*:"),
}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "/": "/", "\\": "\\"}
# NaN and infinities have no place in JSON: they become null, as JavaScript writes them.
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"} | {
    sign + name: "null" for name in ("NaN", "nan", "Infinity", "inf") for sign in ("", "-", "+")
}
_MAX_WORD = 4000  # characters of a number; Python reads no longer ones
MAX_DEPTH = 100  # of lists and objects in each other, as in requests


class Spelling(NamedTuple):
    """How a family of models writes values, besides JSON."""

    bare_keys: bool = False  # whether keys stand without quotes
    delimiters: tuple[str, ...] = ()  # texts that begin and end strings and keys in which nothing is escaped
    bare_quotes: bool = False  # whether quotes in strings may not be escaped


JSON = Spelling()


@dataclass(slots=True)
class _Container:
    """A list or object that is open."""

    close: str  # as the model writes it
    written: str  # as JSON has it
    equals: str = ":"
    keys: set[str] | None = None  # of an object, so far
    empty: bool = True


class ValueReader:
    """Reads one value, and writes it as JSON that json.dumps() could have written.

    What a model may get wrong is mended where that is exact: line ends in strings, escapes that JSON does not have,
    halves of characters (U+FFFD), Python's constants, NaN and numbers beyond a double (null), commas before a closing
    bracket, and keys that come twice, of which the first one counts. Nothing is written before it is certain, so that
    `close` can end the JSON at any time.

    Args:
        spelling: How the model writes values.
        call: Read the arguments of a call of Python, such as `(city="Oslo", days=3)`, as an object.

    Attributes:
        kind: The first character of the value as JSON has it, `"` for a string; empty before it, and for words.
        done: Whether the value is complete.
        stuck: Whether the text goes on as no value does.

    Example:
        >>> reader = ValueReader()
        >>> reader.read('{"city": "Os'), reader.take()
        ('', '{"city": "Os')
        >>> reader.read('lo", "days": 3,} and on'), reader.take(), reader.done
        (' and on', 'lo", "days": 3}', True)
    """

    def __init__(self, spelling: Spelling = JSON, *, call: bool = False) -> None:
        self.kind, self.done, self.stuck = "", False, False
        self._spelling, self._call = spelling, call
        self._state = self._value
        self._open: list[_Container] = []
        self._out: list[str] = []
        self._lead = ""  # a comma and a key that wait for their value
        self._muted: int | None = None  # containers around a value that is left out
        self._held = ""  # a part of a word, a key, an escape or a delimiter
        self._is_key = False
        self._end = ""  # what ends the string
        self._escaped = ""  # behind the backslash
        self._high = ""  # the first half of a character
        self._behind = ""  # a quote that may end the string
        self._back = ""  # behind the value, in a text that came before

    def read(self, text: str) -> str:
        """Read more text; returns what comes behind the value, or cannot be a part of it."""
        at = 0
        while at < len(text) and not self.done and not self.stuck:
            at = self._state(text, at)
        back, self._back = self._back, ""
        return back + text[at:]

    @property
    def begun(self) -> bool:
        """Whether any of the value has come."""
        return bool(self.kind) or self._state != self._value

    def take(self) -> str:
        """The JSON that was written since the last time."""
        found, self._out = "".join(self._out), []
        return found

    def close(self) -> bool:
        """End the JSON here; returns whether only brackets were missing, so that the value is what was meant."""
        if self._state == self._quote:
            self._end_string()
        inner = self._open[-1] if self._open else None
        between = (
            inner is not None and not inner.empty and self._state == (self._value if inner.keys is None else self._key)
        )
        exact = self.done or between or self._state == self._next
        if self._state == self._word:
            exact = self._held in _CONSTANTS
            if exact:
                self._scalar(_CONSTANTS[self._held])
        elif self._state in (self._string, self._escape, self._delimited) and not self._is_key:
            self._whole_character()
            self._write('"')
        shown = len(self._open) if self._muted is None else self._muted
        self._out += [container.written for container in reversed(self._open[:shown])]
        self._open, self._lead, self.done = [], "", True
        return exact

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return at + 1
        if self._call and not self._open and not self.kind:
            if char != "(":
                self.stuck = True
                return at
            return self._enter(_Container(")", "}", "=", set()), "{", at)
        if char in "\"'":
            self._begin_string(char, is_key=False)
            return at + 1
        if char == "{":
            return self._enter(_Container("}", "}", ":", set()), "{", at)
        if char == "[":
            return self._enter(_Container("]", "]"), "[", at)
        if self._open and self._open[-1].keys is None and char == self._open[-1].close:
            return self._leave(at)
        if any(delimiter.startswith(char) for delimiter in self._spelling.delimiters):
            self._state, self._held, self._is_key = self._delimiter, "", False
            return at
        if _WORD.match(char):
            self._state, self._held = self._word, ""
            return at
        self.stuck = True
        return at

    def _enter(self, container: _Container, written: str, at: int) -> int:
        if len(self._open) >= MAX_DEPTH:
            self.stuck = True
            return at
        self._begin(written)
        self._open.append(container)
        self._state = self._value if container.keys is None else self._key
        self._item()
        return at + 1

    def _item(self) -> None:
        """Whatever comes next in a list stands behind a comma, but for the first."""
        if self._open and self._open[-1].keys is None:
            self._lead = "" if self._open[-1].empty else ", "

    def _begin(self, written: str) -> None:
        """Write the beginning of a value."""
        self.kind = self.kind or written[0]
        if self._open and self._muted is None:
            self._open[-1].empty = False
        self._write(self._lead + written)
        self._lead = ""

    def _write(self, text: str) -> None:
        if self._muted is None:
            self._out.append(text)

    def _ended(self) -> None:
        """A value is complete."""
        if self._muted == len(self._open):
            self._muted = None
        self._state, self._lead = self._next, ""
        self.done = not self._open

    def _leave(self, at: int) -> int:
        container = self._open.pop()
        self._write(container.written)
        self._ended()
        return at + 1

    def _key(self, text: str, at: int) -> int:
        char, container = text[at], self._open[-1]
        if char in _SPACE:
            return at + 1
        if char == container.close:
            return self._leave(at)
        if char in "\"'" and container.equals == ":":
            self._begin_string(char, is_key=True)
            return at + 1
        if any(delimiter.startswith(char) for delimiter in self._spelling.delimiters):
            self._state, self._held, self._is_key = self._delimiter, "", True
            return at
        if (self._spelling.bare_keys or container.equals == "=") and _BARE_KEY.match(char):
            self._state, self._held = self._bare_key, ""
            return at
        self.stuck = True
        return at

    def _bare_key(self, text: str, at: int) -> int:
        found = _BARE_KEY.match(text, at)
        if found is None:
            self._named(self._held)
            return at
        self._held += found[0]
        return found.end()

    def _named(self, key: str) -> None:
        container = self._open[-1]
        assert container.keys is not None
        if key in container.keys and self._muted is None:
            self._muted = len(self._open)
        container.keys.add(key)
        self._lead = ("" if container.empty else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._state = self._equals

    def _equals(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        if text[at] != self._open[-1].equals:
            self.stuck = True
            return at
        self._state = self._value
        return at + 1

    def _next(self, text: str, at: int) -> int:
        char, container = text[at], self._open[-1]
        if char in _SPACE:
            return at + 1
        if char == container.close:
            return self._leave(at)
        if char != ",":
            self.stuck = True
            return at
        self._state = self._value if container.keys is None else self._key
        self._item()
        return at + 1

    def _word(self, text: str, at: int) -> int:
        found = _WORD.match(text, at)
        if found is not None:
            self._held += found[0]
            self.stuck = len(self._held) > _MAX_WORD
            return found.end()
        word = self._held
        if word in _CONSTANTS:
            self._scalar(_CONSTANTS[word])
        elif _NUMBER.fullmatch(word):
            self._scalar(word if math.isfinite(float(word)) else "null")
        else:
            self.stuck = True
        return at

    def _scalar(self, written: str) -> None:
        kind = self.kind
        self._begin(written)
        self.kind = kind
        self._ended()

    def _begin_string(self, end: str, *, is_key: bool) -> None:
        self._is_key, self._end, self._held = is_key, end, ""
        self._state = self._string
        if not is_key:
            self._begin('"')

    def _chars(self, chars: str) -> None:
        if self._is_key:
            self._held += chars
        else:
            self._write(json.dumps(chars, ensure_ascii=False)[1:-1])

    def _whole_character(self) -> None:
        if self._high:
            self._high = ""
            self._chars("\ufffd")

    def _string(self, text: str, at: int) -> int:
        found = _RUN[self._end].match(text, at)
        if found is not None:
            self._whole_character()
            self._chars(found[0])
            return found.end()
        char = text[at]
        if char == "\\":
            self._state, self._escaped = self._escape, ""
            return at + 1
        self._whole_character()
        if char != self._end:
            self._chars("\ufffd")  # half a character
        elif self._spelling.bare_quotes and self._open:
            self._state = self._quote
        else:
            self._end_string()
        return at + 1

    def _end_string(self) -> None:
        if self._is_key:
            self._named(self._held)
        else:
            self._write('"')
            self._ended()
        self._again()

    def _quote(self, text: str, at: int) -> int:
        self._behind += text[at]
        container = self._open[-1]
        kind = "key" if self._is_key else container.equals if container.keys is not None else ""
        found = _BEHIND_QUOTE[kind].match(self._behind, partial=True)
        if found is None:
            self._state = self._string
            self._chars(self._end)
            self._again()
        elif not found.partial:
            self._end_string()
        return at + 1

    def _again(self) -> None:
        """Read what came behind a quote."""
        behind, self._behind = self._behind, ""
        self._back = self.read(behind) + self._back

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if self._escaped and char not in "0123456789abcdefABCDEF":
            return self._literally(f"\\{self._escaped}", at)
        self._escaped += char
        if self._escaped[0] != "u":
            self._whole_character()
            return self._literally(_ESCAPES.get(char, f"\\{char}"), at + 1)
        if len(self._escaped) == 5:
            self._code(int(self._escaped[1:], 16))
            self._state = self._string
        return at + 1

    def _literally(self, chars: str, at: int) -> int:
        self._whole_character()
        self._chars("".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in chars))
        self._state = self._string
        return at

    def _code(self, code: int) -> None:
        if 0xDC00 <= code < 0xE000 and self._high:
            self._chars(chr(0x10000 + ((ord(self._high) - 0xD800) << 10) + code - 0xDC00))
            self._high = ""
            return
        self._whole_character()
        if 0xD800 <= code < 0xDC00:
            self._high = chr(code)
        else:
            self._chars("\ufffd" if 0xDC00 <= code < 0xE000 else chr(code))

    def _delimiter(self, text: str, at: int) -> int:
        held = self._held + text[at]
        if held in self._spelling.delimiters:
            self._begin_string(held, is_key=self._is_key)
            self._state = self._delimited
        elif any(delimiter.startswith(held) for delimiter in self._spelling.delimiters):
            self._held = held
        else:
            self.stuck = True
            return at
        return at + 1

    def _delimited(self, text: str, at: int) -> int:
        self._held += text[at]
        if self._held.endswith(self._end) and self._is_key:
            self._named(self._held.removesuffix(self._end))
        elif self._held.endswith(self._end):
            self._chars(self._held.removesuffix(self._end))
            self._write('"')
            self._ended()
        elif not self._is_key and (sure := len(self._held) - overlap(self._held, self._end)) > 0:
            chars, self._held = self._held[:sure], self._held[sure:]
            self._chars(chars)
        return at + 1


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def without_half_mark(text: str, marks: Iterable[str]) -> str:
    """A text that was cut, without the beginning of a mark at its end; two characters, as of HTML, are text.

    Example:
        >>> [without_half_mark(text, ["</think>"]) for text in ("So.</thi", "a </")]
        ['So.', 'a </']
    """
    half = max((overlap(text, mark) for mark in marks), default=0)
    return text[: len(text) - half] if half > 2 else text


def json_of(text: str) -> str | None:
    """A whole value as JSON; None if it is none."""
    reader = ValueReader(JSON)
    rest = reader.read(f"{text} ")  # behind which words end
    return reader.take() if reader.done and not rest.strip() else None


def arguments_of(text: str) -> str | None:
    """Arguments as a JSON object; None if they are none. No text, and null, are no arguments: an empty object."""
    found = json_of(text) if text.strip() else "null"
    if found is not None and found.startswith('"'):  # an object in a string
        inner = json.loads(found)
        found = json_of(inner) if inner.strip() else "null"
    if found == "null":
        return "{}"
    return found if found is not None and found.startswith("{") else None


def values_in(schema: Any) -> list[Any] | None:
    """The values that a schema allows by name, with `enum` or `const`; None if it names none."""
    if not isinstance(schema, dict):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None
