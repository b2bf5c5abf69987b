"""The server's own routes: `/v1/kv/sessions`, `/v1/warm`, and those of its operator, such as `/health`."""

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import anyio
from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryField
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.convertors import PathConvertor, register_url_convertor

from kvboost_hf.cache.prompt.chats import why_not_stored
from kvboost_hf.server.apis.answers import RequestJobs, unless_gone
from kvboost_hf.server.apis.context import PostedRoute, RouteContext, client
from kvboost_hf.server.fair_share import Turns
from kvboost_hf.server.http.errors import ApiError
from kvboost_hf.server.http.guard import require_operator
from kvboost_hf.server.jobs import Finished, Job, Keep, SamplingOptions, Session, SessionChange, prompt_salt
from kvboost_hf.server.protocol import QueueFullError, UnreachableTierError
from kvboost_hf.server.requests.texts import SessionRequest, WarmRequest

T = TypeVar("T")
_KeyHash = Annotated[str | None, QueryField(description="Hash of the API key whose session it is; for operators.")]


class _SessionConvertor(PathConvertor):
    """Any text, also with slashes and line ends: the `prompt_cache_key` of a request."""

    regex = "(?s:.+)"


register_url_convertor("session", _SessionConvertor())


def session_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/kv/sessions`."""
    router = APIRouter(route_class=PostedRoute)
    engine, turns = context.engine, Turns(2, context.settings.max_requests)

    async def run(request: Request, work: Callable[[], T]) -> T:
        return await unless_gone(request, None, turns.run(client(request), work, long=True))

    @router.get("/v1/kv/sessions")
    async def sessions(request: Request) -> dict[str, Any]:
        everybody = bool(request.scope.get("operator"))
        owner = None if everybody else client(request)
        found = await run(request, partial(engine.sessions, owner))
        return {"object": "list", "data": [_body(each, everybody) for each in found]}

    @router.get("/v1/kv/sessions/{id:session}")
    async def session(id: str, request: Request, key: _KeyHash = None) -> dict[str, Any]:
        found = await run(request, partial(engine.sessions, _owner(context, request, key), id))
        return _body(_required(found[0] if found else None, id), key is not None)

    @router.patch("/v1/kv/sessions/{id:session}")
    async def change(id: str, body: SessionRequest, request: Request, key: _KeyHash = None) -> dict[str, Any]:
        owner, keep = _owner(context, request, key), _keep(context, body)
        wanted = SessionChange(keep=keep, priority=body.priority)
        found = await run(request, partial(engine.change_session, owner, id, wanted))
        return _body(_required(found, id), key is not None)

    @router.delete("/v1/kv/sessions/{id:session}")
    async def drop(id: str, request: Request, key: _KeyHash = None) -> dict[str, Any]:
        owner = _owner(context, request, key)
        context.histories.drop(owner, id)
        # Earlier releases have kept a named session under a salt of its own.
        salt = prompt_salt(context.settings.salt, owner.decode() or None, id)
        try:
            freed = _required(await run(request, partial(engine.drop_session, owner, id, salt)), id)
        except UnreachableTierError as error:
            told = f"The session was removed here, but not from everywhere. {error} Send the request again."
            raise ApiError(503, told, code="tier_unreachable") from None
        return {"object": "kv.session.deleted", "id": id, "deleted": True, "freed_bytes": freed}

    return router


def _keep(context: RouteContext, body: SessionRequest) -> Keep | Literal[False] | None:
    if body.pinned is False:
        return False
    return context.keep(body.ttl_s) if body.pinned or body.ttl_s is not None else None


def _owner(context: RouteContext, request: Request, key_hash: str | None) -> bytes:
    """Whose session is meant: the client's own, or for operators that of the key with a hash."""
    if key_hash is None:
        return client(request)
    require_operator(request.scope)
    keys = (*context.settings.api_keys, *context.settings.operator_keys)
    found = next((key for key in keys if _hash(key.encode()) == key_hash), None)
    if found is None:
        raise ApiError(404, f"There is no API key with the hash {key_hash[:64]!a}.", param="key", code="not_found")
    return found.encode()


def _required(found: T | None, id: str) -> T:
    if found is None:
        raise ApiError(404, f"There is no session {id[:64]!a}. GET /v1/kv/sessions lists yours.", code="not_found")
    return found


def _hash(key: bytes) -> str:
    """Tells API keys apart without showing them."""
    return hashlib.sha256(b"kvboost session" + key).hexdigest()[:12]


def _body(session: Session, shows_key: bool) -> dict[str, Any]:
    share = session.cached_tokens / session.prompt_tokens if session.prompt_tokens else 0.0
    told: dict[str, Any] = {"object": "kv.session"}
    for name, value in asdict(session).items():
        if name == "nbytes":
            told |= {"cached_share": round(share, 4), "bytes": value}
        elif name != "client":
            told[name] = value
    return told | ({"key": _hash(session.client) if session.client else None} if shows_key else {})


def warm_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/warm`."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/warm")
    async def warm(body: WarmRequest, request: Request) -> dict[str, Any]:
        salt = context.salt(request, body.cache_salt)
        if body.messages is not None:
            start, reason = await context.encode_start(body, request)
            prompts = [start.tolist()]
        else:
            prompts = [await context.encode(text, request, new=0) for text in body.texts or ()]
            reason = await context.encoder.why_never(prompts, client(request))
        reason = next(filter(None, (why_not_stored(len(ids)) for ids in prompts)), reason)
        keep, name, options = (context.keep(None),), body.prompt_cache_key, SamplingOptions(max_tokens=0)
        jobs = [replace(context.job(ids, options, salt=salt), keep=keep, session=name) for ids in prompts]

        async def finish() -> dict[str, Any]:
            found = [event async for event in _one_by_one(context, jobs, request)]
            return {
                "object": "warm",
                "prompt_tokens": sum(event.prompt_tokens for event in found),
                "cached_tokens": sum(event.cached_tokens for event in found),
                "pinned": all(bool(event.pinned) for event in found),
                "start_reason": reason,
            }

        return await unless_gone(request, None, finish())

    return router


async def _one_by_one(context: RouteContext, jobs: Sequence[Job], request: Request) -> AsyncIterator[Finished]:
    """Run jobs so that only one is in the queue, however many there are."""
    submitted: RequestJobs | None = None
    for job in jobs:
        while True:
            try:
                submitted = context.start([job], request)
                break
            except QueueFullError as error:
                if submitted is None:
                    raise
                await anyio.sleep(error.retry_after_s)  # what was computed would be in vain
        try:
            async for _, event in submitted.events():
                if isinstance(event, Finished):
                    yield event
        finally:
            submitted.cancel()


def operator_routes(context: RouteContext) -> APIRouter:
    """Make a router with these routes; those of figures require an operator."""
    router, turns = APIRouter(), Turns(2, context.settings.max_requests)

    async def figures(request: Request, find: Callable[[], T]) -> T:
        require_operator(request.scope)
        return await unless_gone(request, None, turns.run(client(request), find, long=True))

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> Response:
        load, settings = context.engine.load(), context.settings
        taken = load.get("prompts", 0) + load.get("running", 0)
        full = load.get("waiting", 0) + min(taken, settings.max_batch_size) >= settings.max_requests
        status = "draining" if load.get("draining") else "busy" if full else "ready"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        return Response(await figures(request, context.meter.page), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/stats")
    async def stats(request: Request) -> dict[str, Any]:
        return await figures(request, context.engine.stats)

    return router
