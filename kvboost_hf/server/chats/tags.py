"""Reads arguments that are written as tags, and writes them as JSON of the types that a tool's schema has."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import regex  # type: ignore[import-untyped]

from kvboost_hf.server.chats.tool_formats import Tags
from kvboost_hf.server.chats.values import MAX_DEPTH, ValueReader, json_of, overlap, values_in, without_half_mark

_MAX_TAG = 512  # characters
_KINDS = {
    **{dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"},
    type(None): "null",
}
_SURROGATE = regex.compile("[\ud800-\udfff]")


class TagsReader:
    """Reads the arguments of one call, as a `ValueReader` does.

    A text is told as it comes; a value of another type when it is complete. Without a schema, a value is a text. Of
    arguments that come twice the first one counts. Where tags have lines of their own, a value that lacks its closing
    tag ends before another argument that the schema has, and before the end of the call. Some models write an object
    in place of the tags.

    Example:
        >>> from kvboost_hf.server.chats.tool_formats import QWEN_XML
        >>> reader = TagsReader(QWEN_XML.tags, {"properties": {"days": {"type": "integer"}}})
        >>> reader.read("<parameter=days>\\n3\\n</parameter>\\n</function>"), reader.take(), reader.done
        ('', '{"days": 3}', True)
    """

    kind = "{"

    def __init__(self, tags: Tags, schema: Mapping[str, Any]) -> None:
        self.done = self.stuck = False
        self._tags, self._schema = tags, schema
        self._open = regex.compile(tags.open)
        self._next = regex.compile(rf"\n(?:{tags.open}|{regex.escape(tags.call_close)}\s*{regex.escape(tags.behind)})")
        self._out: list[str] = []
        self._held = ""  # of a tag, or of a value
        self._key: str | None = None  # of the value that is read
        self._opening = ""  # what may still stand before the value
        self._close = self._end_mark = ""  # what ends the value; with its line end
        self._object: ValueReader | None = None  # that stands in place of tags
        self._types: set[str] = set()  # that the value may have
        self._keys: set[str] = set()
        self._is_text = self._starts = self._muted = self._any = False

    def read(self, text: str) -> str:
        """Read more text; returns what comes behind the call, or cannot be a part of it."""
        while text and not self.done and not self.stuck:
            text = self._next_reader()(text)
        return text

    def _next_reader(self) -> Callable[[str], str]:
        if self._object is not None and not self._object.done:
            return self._read_object
        return self._read_tag if self._key is None else self._read_value

    @property
    def begun(self) -> bool:
        """Whether any of the arguments has come."""
        return self._any or self._key is not None or bool(self._held) or self._object is not None

    def take(self) -> str:
        """The JSON that was written since the last time."""
        found, self._out = "".join(self._out), []
        return found

    def close(self) -> bool:
        """End the JSON here; returns whether no argument was cut."""
        if self._key is not None and (found := self._unclosed(self._held, None)) is not None:
            before = self._held[: found.start()]
            if found[0].startswith(f"\n{self._tags.call_close}"):
                self._end(before)
            elif len(self._held) > len(before) + 2:  # as in `without_half_mark`
                self._held = before
        exact = self._key is None and not self._held
        if self._object is not None and not self._object.done:
            exact = self._object.close()
            self._out.append(self._object.take())
        if self._key is not None and self._is_text:
            held = "" if self._opening else without_half_mark(self._held, (self._end_mark, self._close))
            self._write(_escaped(held) + '"')
        if exact or self._any:
            self._finish()
        return exact

    def _finish(self) -> None:
        self._muted = False
        if self._object is None:
            self._write("}" if self._any else "{}")
        self.done = True

    def _write(self, text: str) -> None:
        if not self._muted:
            self._out.append(text)

    def _read_tag(self, text: str) -> str:
        for at, char in enumerate(text, 1):
            self._held = (self._held + char).lstrip()
            if not self._held:
                continue
            if self._held == "{" and not self._keys and self._object is None:
                self._held, self._object = "", ValueReader()
                return text[at - 1 :]
            found = self._open.match(self._held, partial=True) if self._object is None else None
            if found is not None and not found.partial:
                self._begin(found["key"].strip(), found.groupdict().get("text"))
                return text[at:]
            if found is not None and len(self._held) <= _MAX_TAG:
                continue
            ends = [self._tags.call_close, *([] if self._keys or self._object is not None else [self._tags.empty])]
            if any(end.startswith(self._held) for end in ends):
                if self._held in ends:
                    self._finish()
                    return text[at:]
                continue
            rest, self._held, self.stuck = self._held + text[at:], "", True
            return rest
        return ""

    def _read_object(self, text: str) -> str:
        assert self._object is not None
        rest = self._object.read(text)
        self._out.append(self._object.take())
        self.stuck = self._object.stuck
        return rest

    def _begin(self, key: str, text: str | None) -> None:
        self._key, self._held, self._starts = key, "", self._tags.lines
        self._opening, self._close = self._tags.quotes[0], self._tags.close.replace("{key}", key)
        self._end_mark = self._tags.end(key)
        self._muted = key in self._keys
        self._keys.add(key)
        types = types_of(self._property(key), self._schema)
        if text is not None:  # the model says whether the value is a text, which a schema may leave open
            known = types or {*_KINDS.values()}
            types = (known & {"string"} if text in ("true", "string") else known - {"string"}) or types
        # Where objects may be tags, what has no type shows it at its end.
        self._types, self._is_text = types, not types - {"string"} and bool(types or not self._tags.nested)
        if self._is_text:
            self._write_key()
            self._write('"')

    def _write_key(self) -> None:
        if self._muted or self._key is None:
            return
        self._write((", " if self._any else "{") + f'"{_escaped(self._key)}": ')
        self._any = True

    def _read_value(self, text: str) -> str:
        held = self._held + text
        if self._opening:
            if self._opening.startswith(held):
                self._held = held
                return ""
            if held.startswith(self._opening):
                held, self._close = held.removeprefix(self._opening), self._tags.quotes[1] + self._close
            self._opening = ""
        if self._starts:
            held, self._starts = held.removeprefix("\n"), False
        nested = self._tags.nested and not self._is_text
        end = self._end_of(held, self._key or "") if nested else held.find(self._close)
        unclosed = self._unclosed(held, end if end >= 0 else None)
        if unclosed is not None and not unclosed.partial:
            self._end(held[: unclosed.start()])
            return held[unclosed.start() :]
        if end < 0:
            sure = len(held) - max(overlap(held, self._end_mark), overlap(held, self._close))
            sure = sure if unclosed is None else min(sure, unclosed.start())
            if self._is_text:
                self._write(_escaped(held[:sure]))
                held = held[sure:]
            self._held = held
            return ""
        value = held[:end]
        self._end(value.removesuffix("\n") if self._tags.lines else value)
        return held[end + len(self._close) :]

    def _end(self, value: str) -> None:
        """End the value that is read; `value` is all of it, of a text what was not told yet."""
        if self._is_text:
            self._write(_escaped(value) + '"')
        else:
            self._write_key()
            self._write(self._typed(value))
        self._key, self._held, self._muted = None, "", False

    def _unclosed(self, held: str, end: int | None) -> Any:
        """The tag before `end` that may come behind a value without a closing tag, as a match; None for none."""
        at = held.find("\n<", 0, end) if self._tags.lines else -1
        while at >= 0:
            found = self._next.match(held, at, partial=True)
            if found is not None and (found.partial or found["key"] is None or self._is_new(found["key"].strip())):
                return found
            at = held.find("\n<", at + 1, end)
        return None

    def _is_new(self, key: str) -> bool:
        """Whether the schema has an argument that has not come yet."""
        return key not in self._keys and self._property(key) is not None

    def _property(self, key: str) -> Any:
        """What the schema says of an argument; None for nothing."""
        properties = self._schema.get("properties")
        return properties.get(key) if isinstance(properties, dict) else None

    def _typed(self, value: str) -> str:
        return self._json(value, self._property(self._key or ""), self._types, MAX_DEPTH)

    def _json(self, value: str, schema: Any, types: set[str], depth: int) -> str:
        """A value, in which objects and lists may be tags, as JSON."""
        parts = self._parts(value) if self._tags.nested and depth else []
        if parts and (not types or types & {"object", "array"}):
            is_list = types & {"object", "array"} != {"object"} and all(key == "item" for key, _ in parts)
            found: dict[str, str] = {}
            for n, (key, inner) in enumerate(parts):
                child = _child(schema, None if is_list else key, self._schema)
                written = self._json(inner, child, types_of(child, self._schema), depth - 1)
                found.setdefault(str(n) if is_list else key, written)
            if is_list:
                return f"[{', '.join(found.values())}]"
            return "{" + ", ".join(f'"{_escaped(key)}": {each}' for key, each in found.items()) + "}"
        if self._tags.nested and not value.strip() and types & {"object", "array"} and "string" not in types:
            return "{}" if "object" in types else "[]"
        return _of_types(value, types, schema)

    def _parts(self, value: str) -> list[tuple[str, str]]:
        """The tags that a value consists of, with what is in them; none where there is anything else."""
        found, at, stop = list[tuple[str, str]](), 0, len(value.rstrip())
        opened = regex.compile(rf"\s*{regex.escape(self._tags.nested)}<(?P<key>[^<>/]+)>")
        while at < stop:
            tag = opened.match(value, at)
            end = self._end_of(value, tag["key"], tag.end()) if tag is not None else -1
            if end < 0:
                return []
            found.append((tag["key"], value[tag.end() : end]))
            at = end + len(self._tags.close.replace("{key}", tag["key"]))
        return found

    def _end_of(self, text: str, key: str, at: int = 0) -> int:
        """Where a value ends that begins at `at`, behind those in it of the same `key`; -1 where it does not."""
        close, opened = self._tags.close.replace("{key}", key), f"{self._tags.nested}<{key}>"
        end = text.find(close, at)
        inner = text.find(opened, at) if self._tags.nested else -1
        while 0 <= inner < end:
            end = text.find(close, end + len(close))
            inner = text.find(opened, inner + len(opened))
        return end


def _of_types(value: str, types: set[str], schema: Any) -> str:
    """A value as JSON of one of its types; as a text if it is of none of them."""
    values, bare = values_in(schema), value.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    if "string" not in types or (values is not None and value not in values):
        words = ("true", "false") if types & {"integer", "number"} else ("true", "1", "false", "0")
        if "boolean" in types and bare.lower() in words:
            return "true" if bare.lower() in ("true", "1") else "false"
        found = json_of(bare)
        if found is not None and (found := _as_one_of(found, types)) is not None:
            return found
    return f'"{_escaped(value)}"'


def _as_one_of(written: str, types: set[str]) -> str | None:
    value = json.loads(written)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return str(int(value))
    kind = _KINDS[type(value)]
    return written if kind in types or (kind == "integer" and "number" in types) else None


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> set[str]:
    """The JSON types that a schema allows; empty if it says nothing of them."""
    if not isinstance(schema, dict) or not depth:
        return set()
    declared = schema.get("type")
    named = declared if isinstance(declared, list) else [declared]
    found = {one.lower() for one in named if isinstance(one, str)}  # Google's API has them in capitals
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(name) or () if isinstance(schema.get(name), list) else ():
            found |= types_of(part, root, depth - 1)
    if not found:
        found = {_KINDS[type(one)] for one in values_in(schema) or ()}
    if not found:
        found = types_of(_target(schema, root), root, depth - 1)
    if not found:
        found = {kind for name, kind in (("properties", "object"), ("items", "array")) if name in schema}
    return found | ({"null"} if schema.get("nullable") is True else set())


def _target(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """What a schema refers to; None for nothing."""
    pointer = schema.get("$ref")
    if not (isinstance(pointer, str) and pointer.startswith("#/")):
        return None
    target: Any = root
    for step in pointer[2:].split("/"):
        target = target.get(step) if isinstance(target, dict) else None
    return target


def _child(schema: Any, key: str | None, root: Mapping[str, Any], depth: int = 8) -> Any:
    """What a schema says of a property, or of the items of a list where `key` is None; None for nothing."""
    if not isinstance(schema, dict) or not depth:
        return None
    own = schema.get("items")
    if key is not None:
        properties = schema.get("properties")
        own = properties.get(key) if isinstance(properties, dict) else None
        own = schema.get("additionalProperties") if own is None else own
    if isinstance(own, dict):
        return own
    lists = [schema[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)]
    parts = [_target(schema, root), *(part for each in lists for part in each)]
    return next((found for part in parts if (found := _child(part, key, root, depth - 1)) is not None), None)


def _escaped(text: str) -> str:
    return json.dumps(_SURROGATE.sub("\ufffd", text), ensure_ascii=False)[1:-1]
