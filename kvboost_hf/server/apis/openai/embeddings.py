"""The route `/v1/embeddings`, where the operator has turned it on."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from kvboost_hf.server.apis.answers import large
from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.apis.embed import embed, require_embeddings
from kvboost_hf.server.apis.posted import PostedRoute
from kvboost_hf.server.requests.texts import EmbeddingRequest


def embedding_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/embeddings`."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        require_embeddings(context)
        model = context.require_model(body.model)
        found, tokens = await embed(context, body.texts, request, "input")
        tell = _as_base64 if body.encoding_format == "base64" else list

        def embedded() -> dict[str, Any]:
            data = [{"object": "embedding", "index": n, "embedding": tell(numbers)} for n, numbers in enumerate(found)]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return {"object": "list", "data": data, "model": model, "usage": usage}

        return await large(embedded)

    return router


def _as_base64(numbers: Sequence[float]) -> str:
    """Base64 of the numbers as float32, little-endian."""
    return base64.b64encode(np.asarray(numbers, dtype="<f4").tobytes()).decode()
