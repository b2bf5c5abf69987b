"""What every request passes: its id, its key, its size, and a line in the log that holds no text of prompts."""

import hmac
import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost_hf.server.errors import ApiError

OPEN = frozenset({"/", "/health", "/ready"})  # to everybody; the page asks for the key that it sends

_log = logging.getLogger("kvboost_hf.server.requests")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """Middleware around all routes.

    Args:
        app: What it guards.
        api_keys: Any of them opens it; none lets everybody in.
        max_body_bytes: Of a request.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], max_body_bytes: int) -> None:
        self._app, self._keys, self._max_bytes = app, [key.encode() for key in api_keys], max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, start, status = Headers(scope=scope), time.perf_counter(), 499
        asked = headers.get("x-request-id", "")
        request_id = asked if _ID.fullmatch(asked) else uuid.uuid4().hex

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            if scope["path"] in OPEN or self._admits(scope, headers):
                await self._app(scope, self._limited(receive), tell)
            else:
                wrong = "That API key is not one of this server's" if "authorization" in headers else "No API key"
                error = ApiError(
                    401,
                    f"{wrong}. Send the header 'Authorization: Bearer KEY'.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response(scope, receive, tell)
        except Exception:
            status = 500
            raise
        finally:
            seconds = round(time.perf_counter() - start, 6)
            line = {"request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
            _log.info("request", extra={"fields": line | {"seconds": seconds} | scope.get("run", {})})

    def _limited(self, receive: Receive) -> Receive:
        left = self._max_bytes

        async def read() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"A body may have {self._max_bytes} bytes, got more. Send less text.")
            return message

        return read

    def _admits(self, scope: Scope, headers: Headers) -> bool:
        if not self._keys:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode()
        # All are compared, each in constant time: how long it takes tells nothing of the keys.
        fits = [hmac.compare_digest(given, one) for one in self._keys]
        if scheme.lower() != "bearer" or not any(fits):
            return False
        scope["api_key"] = key.strip()
        return True


class JsonLines(logging.Formatter):
    """Formats records as one JSON object a line, with the `fields` that they were given."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)
