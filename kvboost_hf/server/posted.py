"""`PostedRoute`: parses large JSON bodies in a thread, so that they do not block other requests."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from kvboost_hf.server.context import client
from kvboost_hf.server.json_text import LargeJsonError, read_json
from kvboost_hf.server.turns import Turns, in_thread

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
        try:
            if len(raw) <= _SMALL:
                return read_json(raw)
            turns: Turns = self.app.state.reading
            async with turns.turn(client(self)):
                return await in_thread(partial(read_json, raw))
        except LargeJsonError as error:
            raise HTTPException(400 if error.deep else 413, str(error)) from error
