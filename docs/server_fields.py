"""The page of all fields of requests, from their schemas: `python docs/server_fields.py > docs/server-fields.md`."""

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvboost_hf.server.apis.anthropic.schema import CountRequest, MessagesRequest
from kvboost_hf.server.apis.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from kvboost_hf.server.apis.openai.responses_schema import ResponseRequest
from kvboost_hf.server.requests.chat import ChatRequest
from kvboost_hf.server.requests.fields import Refusal
from kvboost_hf.server.requests.texts import CompletionRequest, EmbeddingRequest, WarmRequest

_ROUTES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/v1/responses/input_tokens": ResponseRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/warm": WarmRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/show": OllamaShowRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
}
_COMMON = ("id", "status", "cache_control", "index")  # of many objects
_OPENING = """# Every field of a request

<!-- Written by `python docs/server_fields.py > docs/server-fields.md`: change the schemas. -->

**Who needs this:** you write a client, and want to know whether [the server](server.md) takes a field.

Each field that routes **serve** stands below the names of these routes, with its values, unless it is a string; `*`
marks those that a request must have. Fields that are **refused** (status 400), because ignoring them would give
another answer than the client asked for, come next. Every other field is **ignored**: the header `x-kvboost-ignored`
of the answer names it, and so do the log and `/metrics`. With `--strict-requests` such a field is refused, too. A
field with the value `null` counts as left out. [The objects](#objects) in fields are at the end.
"""
_OBJECTS = """The server's `/openapi.json`, and its page `/docs`, have each object with all of its fields. Here are the
fields of which more is to be said than their names and values."""


def page() -> str:
    """All fields, with their routes, in Markdown."""
    inner, served, refused = dict[str, Any](), dict[str, list[str]](), dict[str, list[str]]()
    for route, schema in _ROUTES.items():
        refusals = {name: told for name, field in schema.model_fields.items() if (told := _refusal(field))}
        told = schema.model_json_schema()
        inner |= told.pop("$defs", {})
        for row in _rows(told, refusals):
            served.setdefault(row, []).append(route)
        for name, refusal in refusals.items():
            refused.setdefault(f"- `{name}`: {refusal.why}", []).append(route)
    lines = [_OPENING, "## Served", "", *_of_routes(served), "", "## Refused", "", *_of_routes(refused), ""]
    lines += ["## Objects", "", _OBJECTS, ""]
    for name, told in sorted(inner.items()):
        rows = (row.removeprefix("- ").rstrip(".") for row in _rows(told, _COMMON))
        if fields := "; ".join(row for row in rows if ": " in row):
            lines.append(f"- **{name}**: {fields}.")
    return "\n".join(lines) + "\n"


def _of_routes(rows: Mapping[str, list[str]]) -> Iterator[str]:
    """Rows by their routes: those that routes share come once, under the names of these routes."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row, routes in rows.items():
        groups.setdefault(tuple(routes), []).append(row)
    for routes, group in groups.items():
        yield from (", ".join(f"`{route}`" for route in routes) + ":", "", *group, "")


def _rows(told: Mapping[str, Any], left_out: Collection[str] = ()) -> Iterator[str]:
    """Rows of the fields in a JSON schema, the required ones first."""
    required = told.get("required", ())
    for name, field in sorted(told["properties"].items(), key=lambda item: item[0] not in required):
        if name not in left_out:
            about = re.sub(r"\s+", " ", field.get("description", ""))
            kind, needed = _kind(field), "*" if name in required else ""
            values = "" if kind in ("", "string") else f" ({kind})"
            yield f"- `{name}`{needed}{values}{': ' if about else ''}{about}"


def _refusal(field: FieldInfo) -> Refusal | None:
    return next((each for each in field.metadata if isinstance(each, Refusal)), None)


def _kind(told: Mapping[str, Any]) -> str:
    """The values of a field, from its JSON schema."""
    if "anyOf" in told or "oneOf" in told:
        kinds = [_kind(one) for one in told.get("anyOf") or told["oneOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind not in ("null", "")))
    if "$ref" in told:
        return told["$ref"].rpartition("/")[2]
    if values := told.get("enum") or ([told["const"]] if "const" in told else None):
        return ", ".join(f"`{value}`" for value in values)
    if told.get("type") == "array":
        return f"list of {_kind(told['items'])}" if told.get("items") else "list"
    least, most = told.get("minimum"), told.get("maximum")
    kind = str(told.get("type", ""))
    if least is not None and most is not None:
        return f"{kind} from {least} to {most}"
    return kind if least is None or least < -100 else f"{kind} from {least}"


if __name__ == "__main__":
    sys.stdout.write(page())
