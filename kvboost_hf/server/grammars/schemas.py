"""Checks the references of a JSON schema before a grammar is made of it, and closes its objects. Pure Python."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# Of all that is referred to, how deep it is, together. What makes a grammar of it goes as deep by recursion, and from
# 1,500 on it may run out of stack, which ends the process.
MAX_LEVELS = 1000
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "unevaluatedItems", "unevaluatedProperties")
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
