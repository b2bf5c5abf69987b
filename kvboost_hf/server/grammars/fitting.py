"""Fits JSON schemas to what a grammar can hold, and names the rest, which is left to the model.

What means the same in other words is put so. References are resolved, whatever they refer to: all of them lead to
`$defs` then. Annotations and unknown keywords are left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvboost_hf.server.chats.values import values_in
from kvboost_hf.server.grammars.patterns import rust
from kvboost_hf.server.grammars.schemas import (
    LISTS,
    SAYS_NOTHING,
    TYPES,
    anchors_in,
    are_apart,
    as_types,
    denied_types,
    denied_values,
    escaped,
    holds_all,
    is_any_text,
    is_of,
    joins,
    nullable,
    objects_in,
    require_ends,
    steps,
    target_of,
    type_named,
)

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
_COUNTS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_COUNTABLE = range(2**31)
_AS_GIVEN = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DEPENDENT = ("if", "dependentRequired", "dependentSchemas", "dependencies")
_NEVER_HELD = (
    *(*_DEPENDENT, "then", "else", "unevaluatedItems", "unevaluatedProperties", "propertyNames", "contains"),
    *("maxContains", "uniqueItems", "not"),
)
# What is left out of these may tell of other properties, so that an object cannot be closed.
_MAY_NAME_MORE = ("$ref", "$dynamicRef", "$recursiveRef", "patternProperties", *_DEPENDENT)
_NOTES = ("contentEncoding", "contentMediaType", "contentSchema")
_MOST_PATHS = 32
OBJECT: Mapping[str, Any] = {"type": "object"}


class Left(NamedTuple):
    """A part of a schema that is left to the model."""

    path: str  # the names and places that lead to it from the schema, such as `properties.tags.uniqueItems`
    why: str  # why a grammar does not hold it
    note: bool = False  # whether it only says how to read a value, so that leaving it out breaks no promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A schema as a grammar holds it."""

    schema: Mapping[str, Any]  # for the grammar
    left: tuple[Left, ...] = ()  # what is left to the model
    name: str  # the schema in errors, such as "The parameters of the tool 'look'"
    place: str  # the field that it is in, such as `tools.look.parameters`
    strict: bool  # whether the client asks for all of it

    def require(self) -> "Fitted":
        """Raise `ValueError` if the client asks for all of it, and something is left to the model."""
        found = next((left for left in self.left if not left.note), None)
        if self.strict and found is not None:
            where = f"`{found.path}` of {self.name}" if found.path else self.name
            raise ValueError(
                f"{where} cannot be enforced: {found.why}. Leave that out, or send strict: false, with which it is "
                "left to the model."
            )
        return self

    @property
    def names(self) -> list[str]:
        """The whole paths of what is left to the model; the first 32."""
        return [".".join(filter(None, (self.place, left.path))) for left in self.left[:_MOST_PATHS]]


def fit(schema: Any, *, name: str, place: str, strict: bool, is_object: bool) -> Fitted:
    """Fit a schema to what a grammar can hold.

    Args:
        schema: The JSON schema that a client has sent; nested 100 deep at most.
        name: The schema in errors.
        place: The field that it is in.
        strict: Whether the client asks for all of it.
        is_object: Whether the value is an object, whatever the schema says.

    Raises:
        ValueError: The client asks for all of it, and something cannot be held.

    Example:
        >>> schema = {"type": "array", "items": {"type": "string", "format": "colour"}, "uniqueItems": True}
        >>> found = fit(schema, name="It", place="json", strict=False, is_object=False)
        >>> found.names
        ['json.items.format', 'json.uniqueItems']
        >>> found.schema
        {'type': 'array', 'items': {'type': 'string'}}
    """
    fitter = _Fitter(schema)
    found = fitter.whole()
    result = Fitted(schema=found, left=tuple(fitter.left), name=name, place=place, strict=strict)
    if is_object and "object" not in as_types(found.get("type", list(TYPES))):
        result = replace(result, left=(*result.left, Left("type", "arguments are an object")), schema=OBJECT)
    elif is_object:
        result = replace(result, schema={**found, "type": "object"})
    try:
        require_ends(result.schema)
    except ValueError as error:
        if strict:
            raise ValueError(f"{name} cannot be enforced: {error}") from error
        return replace(result, left=(Left("$ref", str(error)),), schema=OBJECT if is_object else {})
    return result.require()


def opened(fitted: Fitted) -> Fitted:
    """Leave all of a schema to the model, besides whether it is an object; `ValueError` if it is strict."""
    left = Left("", "its grammar is too large")
    schema = OBJECT if fitted.schema.get("type") == "object" else {}
    return replace(fitted, schema=schema, left=(*fitted.left, left)).require()


@dataclass
class _Fitter:
    """Fits one schema."""

    root: Any
    left: list[Left] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)  # of what is referred to, by pointer
    _taken: set[str] = field(default_factory=set)  # of these names
    _new: list[tuple[str, Any]] = field(default_factory=list)  # of these, those to fit yet

    def whole(self) -> dict[str, Any]:
        """The schema, whose references lead to `$defs`."""
        self._anchors = dict(anchors_in(self.root))
        # In a schema with a name of its own, references begin there.
        inner = list(self.root.values()) if isinstance(self.root, dict) else []
        named = [part for part in objects_in(inner) if isinstance(part.get("$id"), str)]
        self._elsewhere = {id(part) for part in objects_in(named)}
        found = self.schema(self.root, "")
        if not isinstance(found, dict):
            if found is False:
                self._leave("", "it allows no value")
            found = {}
        defs: dict[str, Any] = {}
        while self._new:
            pointer, target = self._new.pop()
            path = ".".join(steps(pointer))
            defs[self._names[pointer]] = self.schema(target, path)
        return {**found, "$defs": defs} if defs else found

    def schema(self, given: Any, path: str) -> Any:
        """A part of it."""
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            self._leave(path, "it is no schema")
            return True
        found: dict[str, Any] = {}
        if holds_all(given.get("not")):
            return False
        self._values(given, found, path)
        self._numbers(given, found, path)
        self._text(given, found, path)
        self._array(given, found, path)
        self._object(given, found, path)
        self._joined(given, found, path)
        for name in _NEVER_HELD:
            if name in given and not self._says_nothing(name, given, found):
                self._leave(under(path, name), "a grammar has no way to say it")
        if "properties" in found and any(name in given and name not in found for name in _MAY_NAME_MORE):
            found.setdefault("additionalProperties", True)
        for name in _NOTES:
            if name in given:
                self._leave(under(path, name), "it says how to read a text", note=True)
        return nullable(found) if given.get("nullable") is True else found

    def _leave(self, path: str, why: str, *, note: bool = False) -> None:
        if len(self.left) < 4 * _MOST_PATHS or not note:
            self.left.append(Left(path, why, note))

    def _values(self, given: dict[str, Any], found: dict[str, Any], path: str) -> None:
        """`type`, `enum` and `const`."""
        asked = given.get("type")
        names = asked if isinstance(asked, list) else [asked]
        known = [type_named(name) for name in names]
        if asked is not None and "any" not in known:
            kept = list(dict.fromkeys(name for name in known if name in TYPES))
            if len(kept) < len(names) or not kept:
                self._leave(under(path, "type"), f"a type must be one of {', '.join(TYPES)}")
            else:
                found["type"] = kept if isinstance(asked, list) and len(kept) > 1 else kept[0]
        refused = given.get("not")
        for name in ("enum", "const"):
            if name not in given:
                continue
            values = given[name] if name == "enum" else [given[name]]
            if not isinstance(values, list) or not values:
                self._leave(under(path, name), "it must be a list of values, and have one at least")
                continue
            if given.get("nullable") is True and name == "enum" and None not in values:
                values = [*values, None]
            fitting = [value for value in values if "type" not in found or is_of(value, found["type"], given)]
            if not fitting:
                self._leave(under(path, "type"), f"no value of `{name}` is of this type")
                found.pop("type", None)
                fitting = values
            if denied_values(refused) is not None:
                fitting = [value for value in fitting if value not in (denied_values(refused) or ())] or fitting
            if name in given:
                found[name] = fitting if name == "enum" else fitting[0]
        if "const" in found:
            only = found["const"]
            if all(
                each != only or isinstance(each, bool) != isinstance(only, bool) for each in found.pop("enum", [only])
            ):
                self._leave(under(path, "enum"), "it does not have the value of `const`")
        elif denied_types(refused) and "type" in found:
            kept = [name for name in as_types(found["type"]) if name not in denied_types(refused)]
            if kept:
                found["type"] = kept

    def _numbers(self, given: dict[str, Any], found: dict[str, Any], path: str) -> None:
        for name in _AS_GIVEN:
            value = given.get(name)
            if value is None or isinstance(value, bool):
                continue
            if not isinstance(value, int | float) or (name == "multipleOf" and value <= 0):
                self._leave(under(path, name), f"it must be a number, got {str(value)[:40]!r}")
                continue
            found[name] = value
        for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if given.get(exclusive) is True and plain in found:  # as before draft 6
                found[exclusive] = found.pop(plain)
        for low, high in _COUNTS:
            for name in (low, high):
                value = given.get(name)
                if value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int | float) or value not in _COUNTABLE:
                    self._leave(under(path, name), f"it must be a count, got {str(value)[:40]!r}")
                else:
                    found[name] = int(value)
            if low in found and high in found and found[low] > found[high]:
                self._leave(under(path, low), f"it is above `{high}`")
                del found[low], found[high]
        bounds = [found.get(name) for name in ("minimum", "maximum")]
        if None not in bounds and bounds[0] > bounds[1]:  # type: ignore[operator]
            self._leave(under(path, "minimum"), "it is above `maximum`")
            del found["minimum"], found["maximum"]

    def _text(self, given: dict[str, Any], found: dict[str, Any], path: str) -> None:
        kind = given.get("format")
        if isinstance(kind, str) and kind in _FORMATS:
            found["format"] = kind
        elif kind is not None:
            self._leave(under(path, "format"), "no grammar is known for it", note=True)
        if "pattern" not in given:
            return
        patterns = self._patterns(given["pattern"], under(path, "pattern"))
        if patterns:
            found["pattern"] = patterns[0]
        if patterns[1:]:
            found["allOf"] = [{"pattern": pattern} for pattern in patterns[1:]]

    def _patterns(self, pattern: Any, path: str) -> tuple[str, ...]:
        if not isinstance(pattern, str):
            self._leave(path, "a pattern must be a text")
            return ()
        found, exact = rust(pattern)
        if not exact:
            self._leave(path, "a grammar does not look around, and does not remember what has matched")
        return found

    def _array(self, given: dict[str, Any], found: dict[str, Any], path: str) -> None:
        items, places = given.get("items"), given.get("prefixItems")
        if isinstance(items, list):  # as before draft 2020-12
            items, places = given.get("additionalItems"), items
        if isinstance(places, list) and places:
            found["prefixItems"] = [
                self.schema(each, f"{under(path, 'prefixItems')}.{n}") for n, each in enumerate(places)
            ]
        if items is not None:
            found["items"] = self.schema(items, under(path, "items"))
        if "items" not in found and "unevaluatedItems" in given and not joins(given):
            found["items"] = self.schema(given["unevaluatedItems"], under(path, "unevaluatedItems"))
        if "contains" in given and given.get("minContains") != 0:
            count = given.get("minContains", 1)
            if isinstance(count, int) and count > found.get("minItems", 0):
                found["minItems"] = count

    def _object(self, given: dict[str, Any], found: dict[str, Any], path: str) -> None:
        properties = given.get("properties")
        if isinstance(properties, dict):
            found["properties"] = {
                name: self.schema(each, f"{under(path, 'properties')}.{name}") for name, each in properties.items()
            }
        elif properties is not None:
            self._leave(under(path, "properties"), "they must be schemas by name")
        by_pattern = given.get("patternProperties")
        if isinstance(by_pattern, dict):
            found |= self._by_pattern(by_pattern, path)
        if by_pattern and "patternProperties" not in found:
            found["additionalProperties"] = True
        elif "additionalProperties" in given:
            found["additionalProperties"] = self.schema(
                given["additionalProperties"], under(path, "additionalProperties")
            )
        elif "unevaluatedProperties" in given and not joins(given):
            found["additionalProperties"] = self.schema(
                given["unevaluatedProperties"], under(path, "unevaluatedProperties")
            )
        self._names_of_properties(given, found, path)
        required = given.get("required")
        if isinstance(required, list):
            names = [name for name in required if isinstance(name, str)]
            closed = found.get("additionalProperties") is False and "patternProperties" not in found
            known = found.get("properties", {})
            lost = [name for name in names if known.get(name, True) is False or (closed and name not in known)]
            if lost:
                self._leave(under(path, "required"), f"there can be no property {lost[0][:64]!r}")
            if kept := [name for name in names if name not in lost]:
                found["required"] = list(dict.fromkeys(kept))

    def _by_pattern(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for pattern, each in given.items():
            inner = f"{under(path, 'patternProperties')}.{pattern}"
            patterns, exact = rust(pattern)
            if not exact or len(patterns) > 1:
                # Names that a wider pattern matches would have to keep to what is not said of them.
                self._leave(inner, "a grammar does not look around, and does not remember what has matched")
                return {}
            found[patterns[0]] = self.schema(each, inner)
        return {"patternProperties": found} if found else {}

    def _names_of_properties(self, given: dict[str, Any], found: dict[str, Any], path: str) -> None:
        """`propertyNames`, where properties can be said by their names."""
        names = given.get("propertyNames")
        if not isinstance(names, dict) or "properties" in found or "patternProperties" in found:
            return
        rest = found.get("additionalProperties", True)
        values, pattern = values_in(names), names.get("pattern")
        if values is not None and all(isinstance(value, str) for value in values):
            found |= {"properties": {value: rest for value in values}, "additionalProperties": False}
        elif isinstance(pattern, str) and names.keys() <= {"type", "pattern", *SAYS_NOTHING}:
            patterns, exact = rust(pattern)
            if exact and len(patterns) == 1:
                found |= {"patternProperties": {patterns[0]: rest}, "additionalProperties": False}

    def _joined(self, given: dict[str, Any], found: dict[str, Any], path: str) -> None:
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if name in given and id(given) in self._elsewhere and str(given[name]).startswith("#"):
                self._leave(under(path, name), "it is in a schema that has an `$id` of its own")
            elif name in given:
                found |= self._reference(given[name], under(path, name))
        for name in LISTS:
            parts = given.get(name)
            if parts is None:
                continue
            if not isinstance(parts, list) or not parts:
                self._leave(under(path, name), "it must be a list of schemas, and have one at least")
                continue
            inner = [self.schema(each, f"{under(path, name)}.{n}") for n, each in enumerate(parts)]
            if name == "oneOf":
                if not self._are_apart(parts):
                    self._leave(under(path, name), "a value may be of several of these schemas, as with anyOf")
                name = "anyOf" if "anyOf" not in given else "allOf"
                inner = [{"anyOf": inner}] if name == "allOf" else inner
            found[name] = [*found.get(name, []), *inner]

    def _reference(self, pointer: Any, path: str) -> dict[str, Any]:
        """A reference to the same as `pointer`; nothing for what is not in the schema."""
        if not isinstance(pointer, str):
            self._leave(path, "a reference must be a text")
            return {}
        local = self._local(pointer)
        if local == "#":
            return {"$ref": "#"}
        target = target_of(self.root, local) if local is not None else None
        if local is None or not isinstance(target, dict | bool):
            self._leave(path, f"there is nothing in the schema that {pointer[:100]!r} refers to")
            return {}
        if local not in self._names:
            last = (steps(local) or ["root"])[-1]
            name = next(each for each in _numbered(last) if each not in self._taken)
            self._names[local] = name
            self._taken.add(name)
            self._new.append((local, target))
        name = escaped(self._names[local])
        return {"$ref": f"#/$defs/{name}"}

    def _local(self, pointer: str) -> str | None:
        """A reference as a pointer from the whole schema; None for what is elsewhere."""
        base, _, rest = pointer.partition("#")
        start = ""
        if base:
            known = self._anchors.get(base)
            if known is None:
                return None
            start = known
        if rest and not rest.startswith("/"):
            known = self._anchors.get(f"#{rest}")
            return None if known is None else f"#{known}"
        return f"#{start}{rest}"

    def _are_apart(self, parts: list[Any]) -> bool:
        """Whether no value can be of two of these schemas."""
        flat = [self._flat(part) for part in parts]
        return len(flat) < 65 and all(are_apart(one, other) for n, one in enumerate(flat) for other in flat[:n])

    def _flat(self, part: Any) -> Any:
        for _ in range(8):
            if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
                return part
            local = self._local(part["$ref"])
            part = self.root if local == "#" else target_of(self.root, local) if local is not None else None
        return part

    def _says_nothing(self, name: str, given: dict[str, Any], found: dict[str, Any]) -> bool:
        """Whether leaving a keyword out changes nothing, with what was found."""
        value = given[name]
        match name:
            case "not":
                return value is False or self._is_denied(value, found)
            case "uniqueItems":
                return value is not True or found.get("maxItems", 2) < 2
            case "if":
                return not {"then", "else"} & given.keys()
            case "then" | "else":
                return True  # told with `if`
            case "unevaluatedProperties":
                return value is True or not joins(given) or found.get("additionalProperties") is False
            case "unevaluatedItems":
                return value is True or not joins(given) or found.get("items") is False
            case "propertyNames":
                held = found.get("additionalProperties") is False and "additionalProperties" not in given
                known = isinstance(value, dict) and (value.keys() & {"enum", "const", "pattern"}) and held
                return bool(known) or is_any_text(value) or self._names_are_held(value, given, found)
            case "contains":
                return given.get("minContains") == 0 and "maxContains" not in given
            case "maxContains":
                return "contains" not in given
            case _:
                return not value

    def _names_are_held(self, value: Any, given: dict[str, Any], found: dict[str, Any]) -> bool:
        if not isinstance(value, dict) or "properties" in given or "patternProperties" in given:
            return False
        return ("properties" in found or "patternProperties" in found) and found["additionalProperties"] is False

    def _is_denied(self, value: Any, found: dict[str, Any]) -> bool:
        """Whether what `not` denies is not among what was found."""
        denied, types = denied_values(value), denied_types(value)
        if denied is not None:
            values = values_in(found)
            return values is not None and not any(one in denied for one in values)
        return bool(types) and "type" in found and not set(as_types(found["type"])) & set(types)


def under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1
