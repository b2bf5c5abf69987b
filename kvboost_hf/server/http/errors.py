"""Errors as clients of OpenAI's API expect them: `{"error": {"message", "type", "param", "code"}}` and a status.

Clients of Anthropic's API get `{"type": "error", "error": {"type", "message"}, "request_id"}`, those of Ollama's
`{"error": message}`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from kvboost_hf.server.protocol import DrainingError, QueueFullError, TooLongError


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: The status of the HTTP response.
        message: For people: value, constraint and remedy.
        param: The field of the request that it is about.
        code: For programs.
        headers: To be sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers
        self.more: dict[str, Any] = {}  # told besides

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response, in OpenAI's form."""
        told = {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}
        return {"error": told | self.more}

    def told(self, scope: Scope) -> dict[str, Any]:
        """The JSON object of the response, in the form of the API that the request is for."""
        if is_ollama(scope):
            return {"error": self.message}
        if not is_anthropic(scope):
            return self.body
        kind = _ANTHROPIC_TYPES.get(_anthropic_status(self), "api_error" if self.status >= 500 else _INVALID)
        # By these words Claude Code knows that it has to shorten a conversation.
        known = "prompt is too long: " if self.code == _TOO_LONG else ""
        error = {"type": kind, "message": known + self.message}
        return {"type": "error", "error": error, "request_id": scope.get("request_id")}

    def response(self, scope: Scope) -> JSONResponse:
        """The answer to a request."""
        status = _anthropic_status(self) if is_anthropic(scope) else self.status
        return JSONResponse(self.told(scope), status, self.headers)


def is_ollama(scope: Scope) -> bool:
    """Whether a request is one of Ollama's API."""
    return str(scope["path"]).startswith("/api/")


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API: by its path, or by the header that all of its clients send."""
    return scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """The error for a field whose value is refused."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception) -> ApiError:
    """The error that a client receives for an exception."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, str(error), code="queue_full", headers=wait)
        case TooLongError():
            found = ApiError(413, str(error), code=_TOO_LONG)
            found.more["max_prompt_tokens"] = error.max_prompt_tokens
            return found
        case DrainingError():
            return ApiError(503, str(error), code="draining", headers={"Retry-After": "5"})
        case RequestValidationError():
            # A value that fits no kind of a union has an error for each; those of its own kind say more.
            first = min(error.errors(), key=lambda one: str(one["type"]).endswith("_type"))
            return _invalid(first, error.body)
        case HTTPException():
            code = _CODES.get(error.status_code)
            return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
        case _:
            # uvicorn closes a connection whose request has failed: a client that reused it would get no answer.
            close = {"Connection": "close"}
            return ApiError(500, "The server failed; its log says why.", code="internal_error", headers=close)


def add_handlers(app: FastAPI) -> None:
    """Make an app answer all errors in this form."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response(request.scope)

    for kind in (ApiError, QueueFullError, TooLongError, DrainingError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(Exception, handle)


_INVALID, _TOO_LONG = "invalid_request_error", "context_length_exceeded"
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "body_too_large", 429: "busy"}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    529: "overloaded_error",
}


def _type(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else _INVALID)


def _anthropic_status(error: ApiError) -> int:
    return 400 if error.code == _TOO_LONG else {503: 529}.get(error.status, error.status)


def _invalid(first: Mapping[str, Any], body: Any) -> ApiError:
    param = _path(first["loc"], body)
    match first["type"]:
        case "unknown_field":
            param = ".".join(filter(None, (param, first["ctx"]["field"].encode(errors="replace").decode())))
            return ApiError(400, f"{first['msg']}.", param=param, code="unsupported_parameter")
        case "json_invalid":
            return ApiError(400, f"The body must be JSON: {first['ctx']['error']}.", code="invalid_json")
        case "missing":
            param = ".".join(filter(None, (param, str(first["loc"][-1]))))
    message = str(first["msg"]).removeprefix("Value error, ").removesuffix(".")
    return ApiError(400, f"{param or 'body'}: {message}.", param=param, code="invalid_value")


def _path(steps: Sequence[str | int], body: Any) -> str | None:
    """Where in the body something is; steps that name a choice of the schema, such as `"list[str]"`, are left out."""
    found = []
    for step in steps[1:]:
        match body, step:
            case (dict(), _) if step in body:
                body = body[step]
            case (list(), int()) if step < len(body):
                body = body[step]
            case _:
                continue
        found.append(str(step))
    return ".".join(found).encode(errors="replace").decode() or None
