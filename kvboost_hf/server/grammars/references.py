"""Checks the references of a JSON schema before a grammar is made of it. Pure Python."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# Of all that is referred to, how deep it is, together. What makes a grammar of it goes as deep by recursion, and from
# 1,500 on it may run out of stack, which ends the process.
MAX_LEVELS = 1000


def require_ends(schema: Mapping[str, Any]) -> None:
    """Refuse a schema with a reference that leads only to itself, or with references that go too deep.

    Args:
        schema: Nested 100 deep at most.

    Raises:
        ValueError: it is one of these, a reference is none to a place in the schema itself, or a part of the schema
            has an `$id` of its own, from which its references would start.

    Example:
        >>> require_ends({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
        Traceback (most recent call last):
        ValueError: The schema's `$ref` '#/$defs/a' leads back to itself. Have it end at a type.
    """
    found: dict[str, Any] = {}
    _refuse_inner_ids(schema)
    new, levels = _references(schema), _depth(schema)
    while new:
        found |= {pointer: _target(schema, pointer) for pointer in new}
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
    for part in _objects(list(schema.values())):
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
    found = {pointer for part in _objects(schema) if isinstance(pointer := part.get("$ref"), str)}
    for pointer in found:
        if pointer != "#" and not pointer.startswith("#/"):
            raise ValueError(
                f"A schema's `$ref` must be '#' or begin with '#/', got {pointer[:100]!r}. Put what it refers "
                "to under `$defs`."
            )
    return found


def _objects(whole: Any) -> Iterator[dict[str, Any]]:
    """All objects in a value, itself included."""
    left = [whole]
    for part in left:
        if isinstance(part, dict):
            yield part
            left += part.values()
        elif isinstance(part, list):
            left += part


def _target(schema: Any, pointer: str) -> Any:
    """The target of a reference; None for none, which is refused later."""
    for step in unquote(pointer).split("/")[1:]:  # in this order: an escaped "/" is one, too
        name = step.replace("~1", "/").replace("~0", "~")
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
