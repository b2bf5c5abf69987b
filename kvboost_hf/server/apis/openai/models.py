"""The routes `/v1/models`, as clients of OpenAI's and of Anthropic's API ask for them."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from kvboost_hf.server.apis.context import RouteContext


def model_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/models`."""
    router = APIRouter()
    settings = context.settings

    def described(name: str) -> dict[str, Any]:
        """As both OpenAI's and Anthropic's clients have it."""
        opened = datetime.fromtimestamp(context.created, UTC).isoformat()
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "kvboost_hf",
            "default_sampling": context.sampling.body,
            "type": "model",
            "display_name": name,
            "created_at": opened,
            "lifecycle": "active",
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = settings.model_names
        page = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return {"object": "list", "data": [described(name) for name in names]} | page

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return described(context.require_model(name))

    return router
