"""Errors as clients of OpenAI's API expect them: `{"error": {"message", "type", "param", "code"}}` and a status.

Clients of Anthropic's API get `{"type": "error", "error": {"type", "message"}, "request_id"}`, those of Ollama's
`{"error": message}`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
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
        self.counts = ""  # of a prompt that is too long, as Anthropic's API says them

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response, in OpenAI's form."""
        told = {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}
        return {"error": told | self.more}

    def told(self, scope: Scope) -> dict[str, Any]:
        """The JSON object of the response, in the form of the API that the request is for."""
        too_long = self.code == _TOO_LONG
        if scope.get("is_ollama"):
            return {
                "error": f"the input length exceeds the context length: {self.message}" if too_long else self.message
            }
        if not scope.get("is_anthropic"):
            return self.body
        kind = _ANTHROPIC_TYPES.get(_anthropic_status(self), "api_error" if self.status >= 500 else _INVALID)
        # By these words, and the numbers, Claude Code knows that it has to shorten a conversation, and by how much.
        message = (f"prompt is too long: {self.counts}" if too_long else "") + self.message
        error: dict[str, Any] = {"type": kind, "message": message}
        if self.code == NO_THREADS:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error, "request_id": scope.get("request_id")}

    def response(self, scope: Scope) -> JSONResponse:
        """The answer to a request."""
        status = _anthropic_status(self) if scope.get("is_anthropic") else self.status
        return JSONResponse(self.told(scope), status, self.headers)


def refused(param: str, message: str) -> ApiError:
    """The error for a field whose value is refused."""
    return ApiError(400, message, param=param)


def most_telling(errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The error to name: a value that fits no kind of a union has one for each, and those of its own kind say more.

    So do those that lie deeper in the body: what is around them is of the right kind.
    """

    def is_of_other_kind(one: dict[str, Any]) -> bool:
        word = one["type"] == "literal_error" and isinstance(one.get("input"), dict | list)
        return word or str(one["type"]).endswith("_type")

    def rank(one: dict[str, Any]) -> tuple[bool, int]:
        other = is_of_other_kind(one)
        return other, -len(one["loc"]) if other else 0

    return min(errors, key=rank)


def api_error(error: Exception) -> ApiError:
    """The error that a client receives for an exception."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, str(error), code="queue_full", headers=wait)
        case TooLongError():
            found = ApiError(400, _overflow(error), code=_TOO_LONG)
            found.more["max_prompt_tokens"] = error.max_prompt_tokens
            if error.tokens is not None:
                found.counts = f"{error.tokens} tokens > {error.limit} maximum. "
            return found
        case DrainingError():
            return ApiError(503, str(error), code="draining", headers={"Retry-After": "5"})
        case RequestValidationError():
            return _invalid(most_telling(error.errors()), error.body)
        case HTTPException():
            code = _CODES.get(error.status_code)
            return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
        case _:
            return ApiError(500, "The server failed; its log says why.", code="internal_error")


def add_handlers(app: FastAPI, routes: Sequence[Route]) -> None:
    """Make an app, which has these routes, answer all errors in this form."""

    async def handle(request: Request, error: Exception) -> Response:
        return api_error(error).response(request.scope)

    async def handle_http(request: Request, error: Exception) -> Response:
        methods = {
            method
            for route in routes
            if route.matches(request.scope)[0] is not Match.NONE
            for method in (route.methods or ())
        }
        methods |= {"HEAD"} if "GET" in methods else set()
        match error:
            case HTTPException(status_code=404):
                return _no_route(request.scope["path"]).response(request.scope)
            case HTTPException(status_code=405) if request.method == "OPTIONS":
                return Response(status_code=204, headers={"Allow": ", ".join(sorted(methods))})
            case HTTPException(status_code=405) if request.headers.get("upgrade", "").lower() == "websocket":
                return _no_websocket(request, methods).response(request.scope)
            case HTTPException(status_code=405):
                return _no_method(request, methods).response(request.scope)
        return await handle(request, error)

    for kind in (ApiError, QueueFullError, TooLongError, DrainingError, RequestValidationError):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(HTTPException, handle_http)


def _no_route(path: str) -> ApiError:
    why = (
        "Clients of OpenAI's API take the address with /v1 as base URL, those of Anthropic's and Ollama's without."
        if not path.startswith(_STORED)
        else "Responses and conversations are not stored: send the whole conversation with each request."
    )
    message = f"Not Found: there is no route {path[:_PATH]!a}. {why} GET /docs lists all routes."
    return ApiError(404, message, code="not_found")


def _no_method(request: Request, methods: set[str]) -> ApiError:
    told, path = ", ".join(sorted(methods)), request.scope["path"][:_PATH]
    message = f"{path!a} is served with {told}, got {request.method[:_METHOD]!a}. Send one of these."
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": told})


def _no_websocket(request: Request, methods: set[str]) -> ApiError:
    told, path = ", ".join(sorted(methods)), request.scope["path"][:_PATH]
    message = f"{path!a} is served with {told}, and not as a WebSocket. Send a request of HTTP for each answer."
    # By this status Codex asks again so at once, in place of after five more attempts.
    return ApiError(
        426, message, code="websocket_not_served", headers={"Upgrade": "HTTP/1.1", "Connection": "Upgrade"}
    )


_STORED = ("/v1/responses/", "/v1/conversations", "/v1/chat/completions/")
# By this code Anthropic's SDK knows that it has to send whole conversations.
NO_THREADS = "thread_unsupported_request"
_PATH, _METHOD = 256, 16  # characters of a path, and of a method, in an error
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
    return {503: 529}.get(error.status, error.status)


def _overflow(error: TooLongError) -> str:
    """What OpenAI's API says of a prompt that is too long, with the code: clients look for these words."""
    if error.tokens is None:
        return str(error)
    noted = " (an estimate: it was not tokenized)" if error.estimated else ""
    remedy = "Cut it into several" if error.what == "text" else f"Please reduce the length of the {error.what}"
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your {error.what} resulted in "
        f"{error.tokens} tokens{noted}. {remedy}: {error.max_prompt_tokens} tokens fit ({_TOO_LONG})."
    )


def _invalid(first: Mapping[str, Any], body: Any) -> ApiError:
    param = _path(first["loc"], body)
    match first["type"]:
        case "unknown_field":
            param = ".".join(filter(None, (param, first["ctx"]["field"].encode(errors="replace").decode())))
            return ApiError(400, f"{first['msg']}.", param=param, code="unsupported_parameter")
        case "json_invalid":
            return ApiError(400, f"The body must be JSON: {first['ctx']['error']}.", code="invalid_json")
        case "missing" if first["loc"] == ("body",):
            return ApiError(400, "The body must be JSON, but it is empty.", code="invalid_json")
        case "missing":
            param = ".".join(filter(None, (param, str(first["loc"][-1]))))
    message = str(first["msg"]).removeprefix("Value error, ").removesuffix(".")
    code = first.get("ctx", {}).get("code") or "invalid_value"
    return ApiError(400, f"{param or 'body'}: {message}.", param=param, code=code)


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
