"""`Guard`: checks the host name, API key and size of every request, gives it an id, and logs it without its text."""

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost_hf.server.http.body import Body, HeldBytes
from kvboost_hf.server.http.errors import ApiError, is_anthropic
from kvboost_hf.server.http.hosts import Hosts
from kvboost_hf.server.settings import ServerSettings

_PROBES = frozenset({"/health", "/ready"})
OPEN = _PROBES | {"/", "/docs"}  # to everybody; the pages ask for the key that they send
_POLLED = _PROBES | {"/metrics", "/v1/stats"}  # over and over: the log would hold nothing else

_log = logging.getLogger("kvboost_hf.server.requests")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY_HEADERS = ("authorization", "x-api-key")
_PATH = 256  # characters of a path in the log
_BODIES = 16  # of the largest size, that may be in memory at the same time


class Guard:
    """Middleware around all routes. A request for `HEAD` is answered as `GET`, without the body.

    Sets `scope["api_key"]` to the key that a request was let in with, and `scope["operator"]` to whether it may read
    figures of all clients.

    Args:
        app: What it guards.
        settings: Its keys, names and limits.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._keys = [key.encode() for key in settings.api_keys]
        self._operators = [key.encode() for key in settings.operator_keys]
        self._held = HeldBytes(_BODIES * settings.max_body_bytes)
        # With keys a page of somebody else's gets no further than here.
        self._hosts = Hosts(settings.allowed_hosts or (("*",) if settings.api_keys else ()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, start, status = Headers(scope=scope), time.perf_counter(), 499
        asked = headers.get("x-request-id", "")
        request_id = asked if _ID.fullmatch(asked) else uuid.uuid4().hex
        bare = scope["method"] == "HEAD"
        line = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:_PATH]}
        scope = {**scope, "method": "GET" if bare else scope["method"], "request_id": request_id}
        limits = self._settings
        body = Body(headers, receive, send, limits.max_body_bytes, limits.body_timeout_s, self._held)
        answered = False

        async def tell(message: Message) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = 499 if body.gone else message["status"], True
                told = MutableHeaders(scope=message)
                told["X-Request-Id"] = request_id
                if "reuse" in scope:
                    told["X-KVBoost-Reuse"] = scope["reuse"]
                if is_anthropic(scope):
                    told["Request-Id"] = request_id
            elif bare:
                message = {**message, "body": b""}
            await body.send(message)

        try:
            error = self._refusal(scope, headers, body)
            body.client = scope.get("api_key", "")
            app = self._app if error is None else error.response(scope)
            await app(scope, body.receive, tell)
        except asyncio.CancelledError:
            # The server ends, and has waited for as long as it may.
            if not answered:
                await _ending().response(scope)(scope, body.receive, tell)
        except Exception:
            status = 500
            raise
        finally:
            body.forget()
            seconds = round(time.perf_counter() - start, 6)
            quiet = scope["path"] in _POLLED and status < 400
            fields = line | {"status": status, "seconds": seconds} | scope.get("figures", {})
            if "ignored" in scope:
                fields["ignored"] = scope["ignored"]
            _log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})

    def _refusal(self, scope: Scope, headers: Headers, body: Body) -> ApiError | None:
        """Why a request goes no further, or None."""
        path, host = scope["path"], headers.get("host")
        if path not in _PROBES and not self._hosts.takes(host, (scope.get("server") or (None,))[0]):
            return ApiError(
                421,
                f"This server is not known by the name {(host or '')[:_PATH]!a}. Call it by its address, or start it "
                "with `--allowed-host NAME`.",
                code="host_not_allowed",
            )
        if path not in OPEN and not self._admits(scope, headers):
            given = any(name in headers for name in _KEY_HEADERS)
            wrong = "That API key is not one of this server's" if given else "No API key"
            return ApiError(
                401,
                f"{wrong}. Send the header 'Authorization: Bearer KEY', or 'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if body.length > self._settings.max_body_bytes:
            return ApiError(413, body.too_large, code="body_too_large")
        return None

    def _admits(self, scope: Scope, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        admitted = operates = False
        for key in (headers.get("x-api-key", "").strip(), bearer.strip() if scheme.lower() == "bearer" else ""):
            known, operator = _is_one_of(key.encode(), self._keys), _is_one_of(key.encode(), self._operators)
            if known or operator:
                scope["api_key"] = key
                admitted, operates = True, operator
        # Without keys of operators, the one who has the only key sees no figures but his own.
        scope["operator"] = operates if self._operators else len(set(self._keys)) < 2
        return admitted or not self._keys


def require_operator(scope: Scope) -> None:
    """Raises an `ApiError` for a request that may not read figures of all clients."""
    if not scope.get("operator"):
        raise ApiError(
            403,
            "Figures of all clients are for the server's operator. Send the operator's key, or start the server with "
            "`--operator-key-file FILE` if it has none.",
            code="operator_key_required",
        )


def _is_one_of(given: bytes, keys: Sequence[bytes]) -> bool:
    # All are compared, each in constant time: how long it takes tells nothing of the keys.
    return any([hmac.compare_digest(given, key) for key in keys])


def _ending() -> ApiError:
    return ApiError(503, "The server ends, and gave the request up.", code="draining", headers={"Retry-After": "5"})


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
        return json.dumps(told)  # in ASCII: no character of a client's moves a terminal's cursor
