"""`EventStream`: a response of server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvboost_hf.server.errors import ApiError, api_error
from kvboost_hf.server.request_jobs import RequestJobs

_log = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """Sends objects as they come, and cancels their jobs when the client disconnects.

    Args:
        events: What to send. Those with a `"type"` have that as the name of their event.
        jobs: The jobs that the objects are made of.
        ping_s: After so many silent seconds a comment, or an event, is sent.
        done: Whether `[DONE]` ends it.
        ping: The event to send then; None for a comment.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        jobs: RequestJobs,
        ping_s: float,
        *,
        done: bool = True,
        ping: dict[str, Any] | None = None,
    ) -> None:
        super().__init__((), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._jobs, self._events, self._ping_s, self._done = jobs, events, ping_s, done
        self._ping = _line(ping) if ping is not None else ": still running\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body_iterator = self._lines(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._jobs.cancel()

    async def _lines(self, scope: Scope) -> AsyncIterator[str]:
        task: asyncio.Task[dict[str, Any] | None] | None = None
        try:
            while True:
                task = task or asyncio.create_task(_next(self._events))
                if not (await asyncio.wait({task}, timeout=self._ping_s))[0]:
                    yield self._ping
                    continue
                event, task = task.result(), None
                if event is None:
                    break
                yield _line(event)
        except Exception as error:
            # The status was sent long ago: the error takes the place of what would have come.
            if not isinstance(error, ApiError):
                _log.exception("a stream failed")
            yield _line(api_error(error).told(scope) | ({} if self._done else {"type": "error"}))
            return
        finally:
            if task is not None:
                task.cancel()
        if self._done:
            yield "data: [DONE]\n\n"


async def _next(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(events, None)


def _line(event: dict[str, Any]) -> str:
    name = f"event: {event['type']}\n" if "type" in event else ""
    # In ASCII: some clients take U+2028 and its like for the end of a line.
    return f"{name}data: {json.dumps(event)}\n\n"
