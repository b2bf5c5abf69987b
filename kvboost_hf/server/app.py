"""`make_app`: the FastAPI app, which answers the requests of all APIs with an engine."""

import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
from fastapi import APIRouter, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse
from starlette.routing import Route

from kvboost_hf import __version__
from kvboost_hf.server.apis.anthropic.messages import message_routes
from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.apis.kvboost import operator_routes, session_routes, warm_routes
from kvboost_hf.server.apis.ollama.routes import ollama_model_routes, ollama_routes
from kvboost_hf.server.apis.openai.responses import response_routes
from kvboost_hf.server.apis.openai.routes import chat_routes, completion_routes, embedding_routes, model_routes
from kvboost_hf.server.chats.encoding import Encoder
from kvboost_hf.server.fair_share import Turns
from kvboost_hf.server.grammars.compiling import Grammars
from kvboost_hf.server.http.errors import add_handlers
from kvboost_hf.server.http.guard import PrivateNetwork, RequestGuard
from kvboost_hf.server.http.metrics import Meter
from kvboost_hf.server.jobs import SamplingDefaults
from kvboost_hf.server.protocol import Engine
from kvboost_hf.server.settings import ServerSettings

_ROUTES = (
    chat_routes,
    completion_routes,
    response_routes,
    message_routes,
    embedding_routes,
    model_routes,
    operator_routes,
    warm_routes,
    session_routes,
    ollama_routes,
    ollama_model_routes,
)
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
        from kvboost_hf.server.http.traces import TracedEngine  # of the extra `otel`

        engine = cast(Engine, TracedEngine(engine))
    context = _route_context(engine, tokenizer, settings, ends, sampling or SamplingDefaults())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.grammars.open()
        yield
        await anyio.to_thread.run_sync(engine.drain, settings.drain_s)
        context.grammars.close()

    app = FastAPI(title="kvboost_hf", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.context = context  # see `PostedRoute`
    routers = [*(routes(context) for routes in _ROUTES), _page_routes()]
    for router in routers:
        app.include_router(router)
    routes = [route for router in (app.router, *routers) for route in router.routes if isinstance(route, Route)]
    add_handlers(app, routes)
    add_middleware(app, settings, [route.path for route in routes if "{" not in route.path], tracer_provider)
    return app


def add_middleware(app: FastAPI, settings: ServerSettings, paths: Collection[str], tracer_provider: Any) -> None:
    """Add what requests pass before they come to a route; what is added last is passed first."""
    if tracer_provider is not None:
        from kvboost_hf.server.http.traces import TraceRequests

        # Inside the guard: who has no key makes no spans.
        app.add_middleware(TraceRequests, provider=tracer_provider, model=settings.model_name)
    app.add_middleware(RequestGuard, settings=settings, paths=paths)
    if settings.cors_origins:
        # Around the guard: browsers ask what they may do without a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.rstrip("/").lower() for origin in settings.cors_origins],
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                "X-Request-Id",
                "X-KVBoost-Reuse",
                "X-KVBoost-Length",
                "X-KVBoost-Ignored",
                "X-KVBoost-Changed",
                "Retry-After",
            ],
        )
        app.add_middleware(PrivateNetwork)


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
        reading=Turns(2, settings.max_requests),
        compiling=Turns(2, settings.max_requests),
        encoder=Encoder(
            tokenizer,
            context=engine.max_model_len if most is None else min(most, engine.max_model_len),
            truncates=settings.auto_truncate,
            max_waiting=settings.max_requests,
            clients=max(1, len(settings.api_keys) + len(settings.operator_keys)),
        ),
        created=int(time.time()),
    )


def _page_routes() -> APIRouter:
    """The pages for browsers: one to try the server at, and one of its description."""
    router = APIRouter()
    for path, name in _PAGES.items():
        router.add_api_route(path, partial(_page, Path(__file__).with_name(name)), include_in_schema=False)
    return router


async def _page(file: Path) -> Response:
    return FileResponse(file, headers={"Content-Security-Policy": _PAGE_POLICY})
