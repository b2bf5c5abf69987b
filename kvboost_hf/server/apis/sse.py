"""`EventStream`: a response of objects that are sent as they come, as server-sent events or as lines of JSON."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvboost_hf.server.apis.request_jobs import RequestJobs
from kvboost_hf.server.http.errors import ApiError, api_error

_log = logging.getLogger("kvboost_hf.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm:
    """How a stream is written.

    Args:
        media_type: Its content type.
        line: Writes an object.
        failed: What the object has besides the error that ends a stream which fails.
        ping: Sent when nothing else comes; clients skip it.
        end: Sent behind the last object.
    """

    media_type: str
    line: Callable[[dict[str, Any]], str]
    ping: str
    failed: Mapping[str, Any] = field(default_factory=dict)
    end: str = ""


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

    Args:
        events: What to send.
        jobs: The jobs that the objects are made of.
        ping_s: After so many silent seconds a ping is sent.
        form: How the objects are written.
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
