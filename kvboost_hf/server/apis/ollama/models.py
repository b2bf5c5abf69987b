"""The routes of Ollama's API about models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`, and refusals."""

import json
import re
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from fastapi import APIRouter, Request

from kvboost_hf import __version__
from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.apis.ollama.schema import OllamaShowRequest
from kvboost_hf.server.apis.posted import UntypedRoute
from kvboost_hf.server.chats.tools import ToolCallStream
from kvboost_hf.server.http.errors import ApiError, refused

_API_VERSION = "0.12.11"  # of Ollama, whose API this is: clients ask for the one that has what they need
_NEVER = "9999-12-31T23:59:59Z"
_CHANGES = {"pull": "POST", "push": "POST", "create": "POST", "copy": "POST", "delete": "DELETE"}
_THINKS = re.compile(r"enable_thinking|reasoning_effort|reasoning_content|<think>")


def ollama_model_routes(context: RouteContext) -> APIRouter:
    """Make a router with the routes about models."""
    router = APIRouter(route_class=UntypedRoute)

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": _API_VERSION, "server": f"kvboost_hf {__version__}"}

    @router.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [_listed(context, name) for name in context.settings.model_names]}

    @router.get("/api/ps")
    async def loaded() -> dict[str, Any]:
        more = {
            "expires_at": _NEVER,
            "size_vram": context.engine.model_card.gpu_bytes,
            "context_length": _context_length(context),
        }
        return {"models": [_listed(context, context.settings.model_name) | more]}

    @router.post("/api/show")
    async def show(body: OllamaShowRequest) -> dict[str, Any]:
        name = body.model or body.name
        if not name:
            raise refused("model", f"model: a name is required, such as {context.settings.model_name!r}.")
        context.require_model(name)
        return _shown(context)

    async def refuse(request: Request) -> None:
        raise ApiError(
            400,
            f"This server serves one model, {context.settings.model_name!r}, and cannot change models: "
            f"{request.url.path} is not served. Start a server with `kvboost-hf serve --model NAME` for another one.",
            code="not_supported",
        )

    for name, method in _CHANGES.items():
        router.add_api_route(f"/api/{name}", refuse, methods=[method], include_in_schema=False)
    return router


def _listed(context: RouteContext, name: str) -> dict[str, Any]:
    """A model of a list; names have a tag there."""
    name, card = name if ":" in name else f"{name}:latest", context.engine.model_card
    return {
        "name": name,
        "model": name,
        "modified_at": _since(context),
        "size": card.num_bytes,
        # Of what is told here: there is no file whose digest it would be.
        "digest": sha256(json.dumps([context.settings.model_name, asdict(card)], sort_keys=True).encode()).hexdigest(),
        "details": _details(context),
    }


def _details(context: RouteContext) -> dict[str, Any]:
    card = context.engine.model_card
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": card.family,
        "families": [card.family],
        "parameter_size": card.parameter_size,
        "quantization_level": card.quantization,
    }


def _shown(context: RouteContext) -> dict[str, Any]:
    card, template = context.engine.model_card, context.tokenizer.chat_template
    info = {
        "general.architecture": card.family,
        "general.basename": context.settings.model_name,
        "general.parameter_count": card.parameters,
        f"{card.family}.context_length": _context_length(context),
    }
    return {
        "modelfile": f"FROM {context.settings.model_name}",
        "parameters": "",
        "template": template if isinstance(template, str) else "",
        "details": _details(context),
        "model_info": info | {f"{card.family}.{name}": size for name, size in card.sizes.items()},
        "capabilities": _capabilities(context),
        "modified_at": _since(context),
    }


def _capabilities(context: RouteContext) -> list[str]:
    template = context.tokenizer.chat_template
    templates = "".join(template.values()) if isinstance(template, dict) else template or ""
    found = {
        "completion": True,
        "tools": _takes_tools(context.tokenizer),
        "thinking": _THINKS.search(templates) is not None,
        "embedding": context.settings.embeddings,
    }
    return [name for name, has in found.items() if has]


def _takes_tools(tokenizer: Any) -> bool:
    try:
        ToolCallStream(tokenizer, [{"type": "function", "function": {"name": "any"}}])
    except ValueError:
        return False
    return True


def _context_length(context: RouteContext) -> int:
    most = context.settings.max_model_len
    return context.engine.max_model_len if most is None else min(most, context.engine.max_model_len)


def _since(context: RouteContext) -> str:
    return datetime.fromtimestamp(context.created, UTC).isoformat()
