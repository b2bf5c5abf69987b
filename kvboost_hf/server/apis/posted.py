"""Routes with a body of JSON: `PostedRoute`, and `UntypedRoute` for clients that do not say that it is JSON.

Large bodies are parsed in a thread, and the client is told which fields were ignored.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from kvboost_hf.server.apis.context import RouteContext, client
from kvboost_hf.server.http.errors import ApiError
from kvboost_hf.server.http.turns import in_thread
from kvboost_hf.server.requests.fields import unknown_fields
from kvboost_hf.server.requests.json_text import LargeJsonError, read_json

_JSON = "application/json"
_SMALL = 2**16  # bytes that are read faster than a thread could be asked to


class PostedRoute(APIRoute):
    """A route with a body of JSON. The app's `state.context` is its `RouteContext`.

    The names of unknown fields are in the header `x-kvboost-ignored` of the answer and in the log, and are counted.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handle = super().get_route_handler()

        async def handle_posted(request: Request) -> Response:
            context: RouteContext = request.app.state.context
            with unknown_fields(refuse=context.settings.strict_requests) as unknown:
                response = await handle(_Posted(request.scope, request.receive))
            if unknown.names:
                request.scope["ignored"] = unknown.names
                response.headers["x-kvboost-ignored"] = ", ".join(unknown.names)
                context.meter.ignored(unknown.names)
            return response

        return handle_posted


class UntypedRoute(PostedRoute):
    """A route that takes JSON of any content type, as `curl -d` sends it.

    Pages in browsers, whose requests have an origin, must send the content type of JSON: then the browser asks first
    whether the server lets pages of that origin call it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handle = super().get_route_handler()

        async def handle_untyped(request: Request) -> Response:
            if request.method == "POST" and not request.headers.get("content-type", "").startswith(_JSON):
                if "origin" in request.headers:
                    raise ApiError(415, f"Web pages must send JSON as such. Send the header 'Content-Type: {_JSON}'.")
                others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
                request.scope["headers"] = [*others, (b"content-type", _JSON.encode())]
            return await handle(request)

        return handle_untyped


class _Posted(Request):
    async def json(self) -> Any:
        raw = await self.body()
        try:
            if len(raw) <= _SMALL:
                return read_json(raw)
            context: RouteContext = self.app.state.context
            async with context.reading.turn(client(self)):
                return await in_thread(partial(read_json, raw))
        except LargeJsonError as error:
            raise HTTPException(400 if error.deep else 413, str(error)) from error
