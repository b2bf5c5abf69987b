"""The routes at `/v1/kv/sessions`: which sessions there are, what of them is kept, and for how long."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi import Query as QueryField

from kvboost_hf.server.apis.context import RouteContext, client
from kvboost_hf.server.apis.kvboost.schema import SessionRequest
from kvboost_hf.server.apis.posted import PostedRoute
from kvboost_hf.server.apis.request_jobs import unless_gone
from kvboost_hf.server.http.errors import ApiError
from kvboost_hf.server.http.guard import require_operator
from kvboost_hf.server.http.keys import prompt_salt
from kvboost_hf.server.http.turns import Turns, in_thread
from kvboost_hf.server.jobs import Keep, Session, SessionChange

T = TypeVar("T")

_KeyHash = Annotated[str | None, QueryField(description="Of the API key whose session it is; for operators.")]


def session_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/kv/sessions`."""
    router = APIRouter(route_class=PostedRoute)
    engine, turns = context.engine, Turns(2, context.settings.max_queue_size)

    async def run(request: Request, work: Callable[[], T]) -> T:
        async def done() -> T:
            async with turns.turn(client(request), long=True):
                return await in_thread(work)

        return await unless_gone(request, None, done())

    @router.get("/v1/kv/sessions")
    async def sessions(request: Request) -> dict[str, Any]:
        everybody = bool(request.scope.get("operator"))
        owner = None if everybody else client(request)
        found = await run(request, partial(engine.sessions, owner))
        return {"object": "list", "data": [_body(each, everybody) for each in found]}

    @router.get("/v1/kv/sessions/{id:path}")
    async def session(id: str, request: Request, key: _KeyHash = None) -> dict[str, Any]:
        found = await run(request, partial(engine.sessions, _owner(context, request, key), id))
        return _body(_required(found[0] if found else None, id), key is not None)

    @router.patch("/v1/kv/sessions/{id:path}")
    async def change(id: str, body: SessionRequest, request: Request, key: _KeyHash = None) -> dict[str, Any]:
        owner, keep = _owner(context, request, key), _keep(context, body)
        wanted = SessionChange(keep=keep, priority=body.priority)
        found = await run(request, partial(engine.change_session, owner, id, wanted))
        return _body(_required(found, id), key is not None)

    @router.delete("/v1/kv/sessions/{id:path}")
    async def drop(id: str, request: Request, key: _KeyHash = None) -> dict[str, Any]:
        owner = _owner(context, request, key)
        salt = prompt_salt(context.settings.salt, owner.decode() or None, id)
        freed = _required(await run(request, partial(engine.drop_session, owner, id, salt)), id)
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
    return {
        "object": "kv.session",
        "id": session.id,
        "first_seen": session.first_seen,
        "last_used": session.last_used,
        "requests": session.requests,
        "tokens": session.tokens,
        "prompt_tokens": session.prompt_tokens,
        "cached_tokens": session.cached_tokens,
        "cached_share": round(share, 4),
        "bytes": session.nbytes,
        "priority": session.priority,
        "ttl_s": session.ttl_s,
        "pinned": session.pinned,
        "pinned_until": session.pinned_until,
        **({"key": _hash(session.client) if session.client else None} if shows_key else {}),
    }
