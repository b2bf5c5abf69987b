"""Reads JSON schemas: references and whether they end, types, values, and objects that are closed. Pure Python."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from kvboost_hf.server.chats.values import values_in

# Of all that is referred to, how deep it is, together. What makes a grammar of it goes as deep by recursion, and from
# 1,500 on it may run out of stack, which ends the process.
MAX_LEVELS = 1000
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "unevaluatedItems", "unevaluatedProperties")
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
LISTS = ("anyOf", "oneOf", "allOf")
_JOINS = ("$ref", *LISTS, "if", "dependentSchemas")
SAYS_NOTHING = ("title", "description", "default", "examples", "$comment", "deprecated")
_SAYS_MORE = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_ADDS = ("$ref", "allOf", "anyOf", "oneOf")


def require_ends(schema: Mapping[str, Any]) -> None:
    """Raise `ValueError` for references that lead only to themselves, out of the schema, or too deep.

    Also for a part that has an `$id` of its own, from which its references would start.

    Example:
        >>> require_ends({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
        Traceback (most recent call last):
        ValueError: The schema's `$ref` '#/$defs/a' leads back to itself. Have it end at a type.
    """
    found: dict[str, Any] = {}
    _refuse_inner_ids(schema)
    new, levels = _references(schema), _depth(schema)
    while new:
        found |= {pointer: target_of(schema, pointer) for pointer in new}
        levels += sum(_depth(found[pointer]) for pointer in new)
        if levels > MAX_LEVELS:
            raise ValueError(
                f"What the schema's `$ref`s refer to must be {MAX_LEVELS} levels deep in all, got {levels}. Make it "
                "simpler."
            )
        new = set().union(*(_references(found[pointer]) for pointer in new)) - found.keys()
    endless = set(found)
    while (ending := {pointer for pointer in endless if _ends(found[pointer], endless)}) != set():
        endless -= ending
    if endless:
        raise ValueError(f"The schema's `$ref` {min(endless)!r} leads back to itself. Have it end at a type.")


def _refuse_inner_ids(schema: Mapping[str, Any]) -> None:
    for part in objects_in(list(schema.values())):
        if isinstance(part.get("$id"), str):
            raise ValueError(
                f"Only a whole schema may have an `$id`, got {part['$id'][:100]!r} inside of one. Leave it out."
            )


def _ends(schema: Any, endless: set[str]) -> bool:
    """Whether something is said of a value itself, where nothing is known yet of the references `endless`."""
    if not isinstance(schema, dict):
        return True
    parts, choices = schema.get("allOf"), schema.get("anyOf")
    return (
        schema.get("$ref") not in endless
        and not (isinstance(parts, list) and not all(_ends(part, endless) for part in parts))
        and not (isinstance(choices, list) and choices and not any(_ends(choice, endless) for choice in choices))
    )


def _references(schema: Any) -> set[str]:
    """All `$ref`s in it."""
    found = {pointer for part in objects_in(schema) if isinstance(pointer := part.get("$ref"), str)}
    for pointer in found:
        if pointer != "#" and not pointer.startswith("#/"):
            raise ValueError(
                f"A schema's `$ref` must be '#' or begin with '#/', got {pointer[:100]!r}. Put what it refers "
                "to under `$defs`."
            )
    return found


def objects_in(whole: Any) -> Iterator[dict[str, Any]]:
    """All objects in a value, itself included."""
    left = [whole]
    for part in left:
        if isinstance(part, dict):
            yield part
            left += part.values()
        elif isinstance(part, list):
            left += part


def steps(pointer: str) -> list[str]:
    """The names that a reference leads by; an escaped "/" is one, too."""
    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(pointer).split("/")[1:]]


def target_of(schema: Any, pointer: str) -> Any:
    """The target of a reference; None for none."""
    for name in steps(pointer):
        if isinstance(schema, dict):
            schema = schema.get(name)
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


def _depth(whole: Any) -> int:
    """Levels of lists and objects in each other."""
    depth, inner = 0, [whole]
    while inner := [part for part in inner if isinstance(part, dict | list)]:
        depth += 1
        inner = [part for whole in inner for part in (whole.values() if isinstance(whole, dict) else whole)]
    return depth


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema in which objects that say nothing of other properties have none.

    Where other properties may come, a small model writes them until it has no tokens left. OpenAI's strict mode wants
    such schemas; vLLM and llama.cpp take others for such. Schemas that put objects together of several parts, with
    `allOf` or a `$ref` beside `properties`, stay as they are: no part knows the properties of the others.

    Args:
        schema: Nested 100 deep at most.

    Example:
        >>> closed({"type": "object", "properties": {"a": {"type": "integer"}}})["additionalProperties"]
        False
        >>> closed({"type": "object"})
        {'type': 'object'}
    """
    return schema if any(_combines(part) for part in _parts(schema)) else _close(schema)


def _combines(schema: Mapping[str, Any]) -> bool:
    parts = schema.get("allOf", [])
    # Patterns say nothing of objects.
    joins = not isinstance(parts, list) or any(not isinstance(part, dict) or [*part] != ["pattern"] for part in parts)
    return joins or ("properties" in schema and any(name in schema for name in _ADDS))


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all schemas in it."""
    if isinstance(schema, dict):
        yield schema
        for name, inner in schema.items():
            for part in _inner(name, inner):
                yield from _parts(part)


def _inner(name: str, value: Any) -> list[Any]:
    """The schemas that the value of a keyword consists of."""
    if name in _BY_NAME and isinstance(value, dict):
        return list(value.values())
    if name in _LISTS and isinstance(value, list):
        return value
    return [value] if name in _SINGLE else []


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            found[name] = {key: _close(each) for key, each in value.items()}
        elif name in _LISTS and isinstance(value, list):
            found[name] = [_close(each) for each in value]
        elif name in _SINGLE:
            found[name] = _close(value)
    properties = schema.get("properties")
    if isinstance(properties, dict) and not any(name in schema for name in _SAYS_MORE):
        required = schema.get("required")
        if not isinstance(required, list) or properties.keys() >= {name for name in required if isinstance(name, str)}:
            found["additionalProperties"] = False
    return found


_IS: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: _IS["number"](value) and value == value // 1,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def type_named(name: Any) -> Any:
    """A name of a type, also in capitals, as Google's API has it."""
    return name.lower() if isinstance(name, str) and name.lower() in (*TYPES, "any") else None


def as_types(kind: Any) -> list[str]:
    return kind if isinstance(kind, list) else [kind]


def is_of(value: Any, kind: Any, given: Mapping[str, Any]) -> bool:
    """Whether a value is of a type, or of one of several."""
    return (value is None and given.get("nullable") is True) or any(_IS[name](value) for name in as_types(kind))


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of the same, or null: OpenAPI's `nullable`."""
    if "type" in schema and not any(name in schema for name in ("const", *_JOINS)):
        types = as_types(schema["type"])
        return schema if "null" in types else {**schema, "type": [*types, "null"]}
    if not schema:
        return schema
    return {"anyOf": [schema, {"type": "null"}]}


def holds_all(schema: Any) -> bool:
    """Whether every value is of this schema."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= set(SAYS_NOTHING))


def is_any_text(schema: Any) -> bool:
    return holds_all(schema) or (
        isinstance(schema, dict) and schema.get("type") == "string" and schema.keys() <= {"type", *SAYS_NOTHING}
    )


def denied_values(schema: Any) -> list[Any] | None:
    """The values of a schema that has nothing but such."""
    return values_in(schema) if isinstance(schema, dict) and schema.keys() <= {"const", "enum"} else None


def denied_types(schema: Any) -> list[str]:
    """The types of a schema that has nothing but such; none of numbers, of which one is a part of the other."""
    if not isinstance(schema, dict) or schema.keys() != {"type"}:
        return []
    found = as_types(schema["type"])
    return [] if any(name not in TYPES or name in ("number", "integer") for name in found) else found


def joins(schema: Mapping[str, Any]) -> bool:
    """Whether a schema puts several together."""
    return any(name in schema for name in _JOINS)


def are_apart(one: Any, other: Any) -> bool:
    """Whether no value can be of both schemas."""
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values = [values_in(schema) for schema in (one, other)]
    if None not in values:
        return not any(value in values[1] for value in values[0])  # type: ignore[operator,union-attr]
    kinds = [_kinds(schema) for schema in (one, other)]
    if not kinds[0] & kinds[1]:
        return True
    if kinds[0] & kinds[1] != {"object"}:
        return False
    both = [
        (left, right)
        for name in set(_required(one)) & set(_required(other))
        if (left := one["properties"].get(name)) is not None and (right := other["properties"].get(name)) is not None
    ]
    return any(
        values_in(left) is not None and values_in(right) is not None and are_apart(left, right) for left, right in both
    )


def _required(schema: Mapping[str, Any]) -> list[str]:
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return []
    return [name for name in required if isinstance(name, str)]


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types of values that a schema allows, with "number" for integers, too."""
    values = values_in(schema)
    if values is not None:
        return {kind for value in values for kind in TYPES if kind != "integer" and is_of(value, kind, {})}
    known = {type_named(name) for name in as_types(schema.get("type"))}
    if not known <= set(TYPES):
        return set(TYPES) - {"integer"}
    found = {"number" if kind == "integer" else str(kind) for kind in known}
    return found | {"null"} if schema.get("nullable") is True else found


def anchors_in(root: Any) -> Iterator[tuple[str, str]]:
    """Names that references may have, and the pointers that they stand for."""
    left: list[tuple[Any, str]] = [(root, "")]
    for part, pointer in left:
        if isinstance(part, dict):
            for key, prefix in (("$id", ""), ("id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
                name = part.get(key)
                if isinstance(name, str) and name.strip("#"):
                    yield (name if name.startswith("#") else prefix + name.rstrip("#")), pointer
            left += [
                (each, f"{pointer}/{escaped(name)}") for name, each in part.items() if isinstance(each, dict | list)
            ]
        elif isinstance(part, list):
            left += [(each, f"{pointer}/{n}") for n, each in enumerate(part) if isinstance(each, dict | list)]


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
