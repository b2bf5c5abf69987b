"""Bodies of requests, read without holding up those of others."""

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from kvboost_hf.server.schema import MAX_DEPTH
from kvboost_hf.server.turns import Turns, in_thread

MAX_PARTS = 200_000  # objects, lists, and fields of objects
_SMALL = 2**16  # bytes that are read faster than a thread could be asked to


class PostedRoute(APIRoute):
    """A route with a body: JSON, which a thread reads. The app's `state.reading` has the turns of clients."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handle = super().get_route_handler()

        async def handle_posted(request: Request) -> Response:
            return await handle(_Posted(request.scope, request.receive))

        return handle_posted


class _Posted(Request):
    async def json(self) -> Any:
        raw = await self.body()
        if len(raw) <= _SMALL:
            return read_json(raw)
        turns: Turns = self.app.state.reading
        async with turns.turn(str(self.scope.get("api_key", "")).encode()):
            return await in_thread(partial(read_json, raw))


def read_json(raw: bytes) -> Any:
    """What a body says.

    Raises:
        json.JSONDecodeError: it is no JSON, or has texts that are no Unicode.
        HTTPException: it has too many parts, or they are nested too deep.

    Example:
        >>> read_json(b'{"n": 2}')
        {'n': 2}
    """
    parts = _parts(raw)
    if parts > MAX_PARTS:
        raise HTTPException(
            413,
            f"A body may have {MAX_PARTS} objects, lists and fields, got {parts}. Send several requests.",
        )
    try:
        found = from_json(raw)
    except ValueError as error:
        why = str(error)
        if "escape" in why or "unicode" in why:  # such as half of a character
            why += "; texts must be valid Unicode"
        raise json.JSONDecodeError(why, "", 0) from error
    inner = [found]
    for _ in range(MAX_DEPTH):
        inner = [part for whole in inner for part in _inside(whole) if isinstance(part, dict | list)]
    if inner:
        raise HTTPException(
            400, f"Lists and objects must be nested {MAX_DEPTH} deep at most, got more. Send flatter ones."
        )
    return found


def _inside(whole: Any) -> Any:
    if isinstance(whole, dict):
        return whole.values()
    return whole if isinstance(whole, list) else ()


def _parts(raw: bytes) -> int:
    """Objects, lists and fields, counted faster than they are read, up to where the body is no JSON."""
    if _count(raw) <= MAX_PARTS:
        return 0
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    return _count(b"".join(plain.split(b'"')[::2]))  # without texts


def _count(raw: bytes) -> int:
    return sum(raw.count(sign) for sign in (b"{", b"[", b":"))
