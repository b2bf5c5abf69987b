"""The routes for whoever operates the server: `/health`, `/ready`, `/metrics` and `/v1/stats`."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.http.guard import require_operator


def operator_routes(context: RouteContext) -> APIRouter:
    """Make a router with these routes; those of figures require an operator."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> Response:
        stats = context.engine.stats()
        full = stats.get("waiting", 0) >= context.settings.max_queue_size
        status = "draining" if stats.get("draining") else "busy" if full else "ready"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        require_operator(request.scope)
        return Response(context.meter.page(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/stats")
    async def stats(request: Request) -> dict[str, Any]:
        require_operator(request.scope)
        return context.engine.stats()

    return router
