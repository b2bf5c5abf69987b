"""`make_app`: the FastAPI app that answers requests of OpenAI's API with an engine."""

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from kvboost_hf import __version__
from kvboost_hf.server.chat import chat_routes
from kvboost_hf.server.completions import completion_routes
from kvboost_hf.server.context import RouteContext
from kvboost_hf.server.embeddings import embedding_routes
from kvboost_hf.server.encoding import Encoder
from kvboost_hf.server.errors import add_handlers
from kvboost_hf.server.grammars import Grammars
from kvboost_hf.server.guard import Guard, require_operator
from kvboost_hf.server.jobs import Engine, SamplingDefaults
from kvboost_hf.server.messages import message_routes
from kvboost_hf.server.metrics import Meter
from kvboost_hf.server.ollama import ollama_routes
from kvboost_hf.server.ollama_models import ollama_model_routes
from kvboost_hf.server.responses import response_routes
from kvboost_hf.server.sessions import session_routes
from kvboost_hf.server.settings import ServerSettings
from kvboost_hf.server.turns import Turns
from kvboost_hf.server.warm import warm_routes

_PAGES = {"/": "page.html", "/docs": "docs.html"}
# They load nothing from elsewhere, and nobody may put them into a frame.
_PAGE_POLICY = "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'"


def make_app(
    engine: Engine,
    tokenizer: Any,
    settings: ServerSettings,
    *,
    ends: Iterable[int] | None = None,
    tracer_provider: Any = None,
    sampling: SamplingDefaults | None = None,
) -> FastAPI:
    """Make the app of a server.

    Args:
        engine: Runs the model.
        tokenizer: The tokenizer of the model; chats need one with a chat template.
        settings: The settings of the server.
        ends: Tokens that end an answer; None for the tokenizer's end-of-sequence token.
        tracer_provider: OpenTelemetry's, for spans of requests; None for no traces.
        sampling: How tokens are chosen where a request leaves it open; None for OpenAI's defaults.

    Returns:
        The app. When it is shut down it lets the engine finish what it has taken, for `settings.drain_s` at most. What
        is left then is cancelled, and its clients are told so.
    """
    if tracer_provider is not None:
        from kvboost_hf.server.traces import TracedEngine, TraceRequests  # of the extra `otel`

        engine = cast(Engine, TracedEngine(engine))
    context = _route_context(engine, tokenizer, settings, ends, sampling or SamplingDefaults())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await anyio.to_thread.run_sync(engine.drain, settings.drain_s)
        context.grammars.close()

    app = FastAPI(title="kvboost_hf", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.context = context  # see `PostedRoute`
    add_handlers(app)
    for router in (
        chat_routes(context),
        completion_routes(context),
        response_routes(context),
        message_routes(context),
        embedding_routes(context),
        _model_routes(context),
        _operator_routes(context),
        warm_routes(context),
        session_routes(context),
        ollama_routes(context),
        ollama_model_routes(context),
    ):
        app.include_router(router)
    if tracer_provider is not None:
        # Inside the guard: who has no key makes no spans.
        app.add_middleware(TraceRequests, provider=tracer_provider, model=settings.model_name)
    app.add_middleware(Guard, settings=settings)
    if settings.cors_origins:
        # Around the guard: browsers ask what they may do without a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-KVBoost-Reuse", "X-KVBoost-Ignored", "Retry-After"],
        )
    return app


def _route_context(
    engine: Engine,
    tokenizer: Any,
    settings: ServerSettings,
    ends: Iterable[int] | None,
    sampling: SamplingDefaults,
) -> RouteContext:
    if ends is None:
        ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    ends, most = frozenset(ends), settings.max_model_len
    return RouteContext(
        engine=engine,
        tokenizer=tokenizer,
        settings=settings,
        ends=ends,
        sampling=sampling,
        meter=Meter(engine),
        grammars=Grammars(tokenizer, engine.vocab_size, ends=ends),
        reading=Turns(2, settings.max_queue_size),
        compiling=Turns(2, settings.max_queue_size),
        encoder=Encoder(
            tokenizer,
            context=engine.max_model_len if most is None else min(most, engine.max_model_len),
            truncates=settings.auto_truncate,
            max_waiting=settings.max_queue_size,
            clients=max(1, len(settings.api_keys) + len(settings.operator_keys)),
        ),
        created=int(time.time()),
    )


def _model_routes(context: RouteContext) -> APIRouter:
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


def _operator_routes(context: RouteContext) -> APIRouter:
    router = APIRouter()

    for path, name in _PAGES.items():
        router.add_api_route(path, partial(_page, Path(__file__).with_name(name)), include_in_schema=False)

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


async def _page(file: Path) -> Response:
    return FileResponse(file, headers={"Content-Security-Policy": _PAGE_POLICY})
