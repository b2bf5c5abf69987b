"""`closed`: a JSON schema whose objects have no properties but those that it names. Pure Python."""

from collections.abc import Iterator, Mapping
from typing import Any

_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "unevaluatedItems", "unevaluatedProperties")
_SAYS_MORE = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_ADDS = ("$ref", "allOf", "anyOf", "oneOf")


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
    return "allOf" in schema or ("properties" in schema and any(name in schema for name in _ADDS))


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
