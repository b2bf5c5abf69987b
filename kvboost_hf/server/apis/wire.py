"""Reads and sends for routes: bodies of JSON (`PostedRoute`), and streams of objects (`EventStream`).

Large bodies are parsed and checked in a thread, and the client is told which fields were ignored.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvboost_hf.server.apis.answers import RequestJobs
from kvboost_hf.server.apis.context import RouteContext, client
from kvboost_hf.server.http.errors import ApiError, api_error, most_telling
from kvboost_hf.server.http.metrics import noting
from kvboost_hf.server.requests.fields import LargeJsonError, read_json

_JSON = "application/json"
_KIND = 64  # characters of a content type in an error
_GZIP = b"\x1f\x8b"
_SMALL = 2**16  # bytes that are read faster than a thread could be asked to
_log = logging.getLogger("kvboost_hf.server")


class PostedRoute(APIRoute):
    """A route with a body of JSON, of any content type, as `curl -d` sends it. The app's `state.context` is its
    `RouteContext`.

    Pages in browsers, whose requests have an origin, must send the content type of JSON: then the browser asks first
    whether the server lets pages of that origin call it.

    The names of unknown fields are in the header `x-kvboost-ignored` of the answer and in the log, and are counted.
    What of the messages was changed for the model is in the header `x-kvboost-changed`, and in the log.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_posted(request: Request) -> Response:
            context: RouteContext = request.app.state.context
            kind = request.headers.get("content-type", "")
            if not _is_json(kind):
                if "origin" in request.headers and request.method == "POST":
                    raise ApiError(
                        415,
                        f"Web pages must send JSON as such, got the content type {kind[:_KIND]!a}. Send the header "
                        f"'Content-Type: {_JSON}'.",
                        code="unsupported_media_type",
                    )
                others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
                request.scope["headers"] = [*others, (b"content-type", _JSON.encode())]
                request.scope["sent_type"] = kind
            posted = _Posted(request.scope, request.receive, self)
            with noting(refuse=context.settings.strict_requests) as unknown:
                try:
                    response = await handle(posted)
                except HTTPException:
                    if posted.refusal is not None:
                        raise posted.refusal from None
                    raise
            if ignored := [*unknown.names, *unknown.left]:
                request.scope["ignored"] = ignored
                response.headers["x-kvboost-ignored"] = ", ".join(ignored)
                context.meter.ignored(unknown.names)
            if unknown.changes:
                request.scope["changed"] = unknown.changes
                response.headers["x-kvboost-changed"] = ", ".join(unknown.changes)
            return response

        return handle_posted


def _is_json(kind: str) -> bool:
    """Whether a content type is one of JSON, such as `application/json; charset=utf-8`."""
    name = kind.partition(";")[0].strip().lower()
    return name == _JSON or (name.startswith("application/") and name.endswith("+json"))


class _Posted(Request):
    """A request whose body is JSON.

    Attributes:
        refusal: The error that the body has, once it is found here.
    """

    def __init__(self, scope: Scope, receive: Receive, route: APIRoute) -> None:
        super().__init__(scope, receive)
        self._field = route.body_field
        self.refusal: RequestValidationError | None = None

    async def json(self) -> Any:
        """The body, parsed; a large one is an instance of its type, which FastAPI does not check again."""
        raw = await self.body()
        try:
            return await self._read(raw)
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(f"{error.msg}{self._hint(raw)}", "", 0) from error

    def _hint(self, raw: bytes) -> str:
        """What a body that is no JSON may be."""
        if raw.startswith(_GZIP):
            return ". It begins as gzip does: send the header 'Content-Encoding: gzip' with it"
        kind = self.scope.get("sent_type")
        if kind is None:
            return ""
        given = f"says {kind[:_KIND]!a}" if kind else "is not there"
        return f". The header Content-Type {given}: send JSON, and 'Content-Type: {_JSON}'"

    async def _read(self, raw: bytes) -> Any:
        try:
            if len(raw) <= _SMALL:
                return read_json(raw)
            context: RouteContext = self.app.state.context
            return await context.reading.run(client(self), partial(self._checked, raw))
        except LargeJsonError as error:
            raise HTTPException(400 if error.deep else 413, str(error)) from error

    def _checked(self, raw: bytes) -> Any:
        """The body as an instance of its type. The event loop would do nothing else while it is checked."""
        parsed = read_json(raw)
        if self._field is None:
            return parsed
        found, errors = self._field.validate(parsed, {}, loc=("body",))
        if errors:
            self.refusal = RequestValidationError([most_telling(errors)], body=parsed)
            raise HTTPException(422)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm:
    """How a stream is written."""

    media_type: str  # the content type of the response
    line: Callable[[dict[str, Any]], str]  # writes an object
    ping: str  # sent when nothing else comes; clients skip it
    # What the object has besides the error that ends a stream which fails.
    failed: Mapping[str, Any] = field(default_factory=dict)
    end: str = ""  # sent behind the last object


def _event(told: dict[str, Any]) -> str:
    """A server-sent event. Objects with a `"type"` have that as the name of their event."""
    name = f"event: {told['type']}\n" if "type" in told else ""
    # In ASCII: some clients take U+2028 and its like for the end of a line.
    return f"{name}data: {json.dumps(told)}\n\n"


EVENTS = StreamForm(
    media_type="text/event-stream",
    line=_event,
    ping=": still running\n\n",
    end="data: [DONE]\n\n",
)
NAMED_EVENTS = replace(EVENTS, failed={"type": "error"}, end="")
PINGED_EVENTS = replace(NAMED_EVENTS, ping=_event({"type": "ping"}))
JSON_LINES = StreamForm(
    media_type="application/x-ndjson",
    line=lambda told: f"{json.dumps(told)}\n",
    ping=" ",  # before an object, space means nothing; an empty line would be no JSON
)


class EventStream(StreamingResponse):
    """Sends objects as they come, and cancels their jobs when the client disconnects.

    After `ping_s` silent seconds a ping is sent.
    """

    def __init__(
        self, events: AsyncIterator[dict[str, Any]], jobs: RequestJobs, ping_s: float, *, form: StreamForm = EVENTS
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), headers=headers, media_type=form.media_type)
        self._jobs, self._events, self._ping_s, self._form = jobs, events, ping_s, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body_iterator = _lines(self._events, self._ping_s, self._form, scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._jobs.cancel()


async def _lines(
    events: AsyncIterator[dict[str, Any]], ping_s: float, form: StreamForm, scope: Scope
) -> AsyncIterator[str]:
    task: asyncio.Task[dict[str, Any] | None] | None = None
    try:
        while True:
            task = task or asyncio.create_task(_next(events))
            if not (await asyncio.wait({task}, timeout=ping_s))[0]:
                yield form.ping
                continue
            event, task = task.result(), None
            if event is None:
                break
            yield form.line(event)
    except Exception as error:
        # The status was sent long ago: the error takes the place of what would have come.
        if not isinstance(error, ApiError):
            _log.exception("a stream failed")
        yield form.line({**api_error(error).told(scope), **form.failed})
        return
    finally:
        if task is not None:
            task.cancel()
    if form.end:
        yield form.end


async def _next(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(events, None)
