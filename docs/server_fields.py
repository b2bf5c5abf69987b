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
_OPENING = """# Every field of a request

<!-- Written by `python docs/server_fields.py > docs/server-fields.md`: change the schemas. -->

**Who needs this:** you write a client, and want to know whether [the server](server.md) takes a field.

Each route with the fields that it **serves**, and with those that it **refuses** (status 400) because ignoring them
would give another answer than the client asked for. Every other field is **ignored**: the header `x-kvboost-ignored`
of the answer names it, and so do the log and `/metrics`. With `--strict-requests` such a field is refused, too. A
field with the value `null` counts as left out. The objects in fields are at the end.
"""
_TABLE = ("| field | takes | |", "| --- | --- | --- |")


def page() -> str:
    """All routes and their fields in Markdown."""
    lines, inner = [_OPENING], dict[str, Any]()
    for route, schema in _ROUTES.items():
        refused = {name for name, field in schema.model_fields.items() if _refusal(field)}
        told = schema.model_json_schema()
        inner |= told.pop("$defs", {})
        lines += [f"## `{route}`", "", *_TABLE, *_rows(told, refused), *_refusals(schema), ""]
    for name, told in sorted(inner.items()):
        lines += [f"## {name}", "", told.get("description", ""), "", *_TABLE, *_rows(told), ""]
    return "\n".join(lines)


def _rows(told: Mapping[str, Any], left_out: Collection[str] = ()) -> Iterator[str]:
    """Rows of the fields in a JSON schema, the required ones first."""
    required = told.get("required", ())
    for name, field in sorted(told["properties"].items(), key=lambda item: item[0] not in required):
        if name not in left_out:
            about = re.sub(r"\s+", " ", field.get("description", ""))
            about = " ".join(filter(None, ("Required." if name in required else "", about)))
            yield f"| `{name}` | {_kind(field)} | {about} |"


def _refusals(schema: type[BaseModel]) -> Iterator[str]:
    for name, field in schema.model_fields.items():
        if (refusal := _refusal(field)) is not None:
            yield f"| `{name}` | | Refused: {refusal.why}. |"


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
