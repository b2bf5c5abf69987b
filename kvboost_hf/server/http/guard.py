"""`RequestGuard`: checks host name, API key and size of every request, gives it an id, and logs it without its text.

`Hosts` checks the header `Host`, so that a foreign web page cannot reach the server by a name of its own.
`RequestBody` reads bodies within limits of size and time, and to their end even if the answer comes before.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
import zlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import dropwhile
from typing import Any, Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost_hf.server.fair_share import FairShare, in_thread
from kvboost_hf.server.http.errors import ApiError, api_error
from kvboost_hf.server.settings import ServerSettings

_PROBES = frozenset({"/health", "/ready"})
OPEN = _PROBES | {"/", "/docs"}  # to everybody; the pages ask for the key that they send
_POLLED = _PROBES | {"/metrics", "/v1/stats"}  # over and over: the log would hold nothing else
_log = logging.getLogger("kvboost_hf.server.requests")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY_HEADERS = ("authorization", "x-api-key")
_PATH = 256  # characters of a path in the log
_BODIES = 16  # of the largest size, that may be in memory at the same time
_BODIES_OF_ONE = 0.75  # of these, that may be of one client alone
_ABSOLUTE = re.compile(r"https?://(?P<host>[^/?#]*)(?P<path>[^?#]*)", re.IGNORECASE)  # RFC 9112, 3.2.2
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(:[0-9]*)?", re.IGNORECASE)
_ENCODINGS = ("gzip", "x-gzip", "deflate")
_ANY_ZLIB = 47  # for zlib: finds out by itself which of them it is
_SHOWN = 64  # characters of a header in an error
_PREFIXES = ("v1", "api")
_HEARD = 8  # times the limit, so that who has sent too much reads the answer in place of a reset


class RequestBody:
    """Stands between an app and its server for one request, and unpacks what is compressed by gzip or deflate.

    A client that sends its body to the end before it reads would miss an answer that comes earlier: the connection
    would be reset under it. So what it still sends is read and thrown away when it is answered, for as long as a body
    may take and up to eight times the limit; then the connection is closed.

    `max_bytes` bounds the body as it comes and as it is unpacked, `timeout_s` the time for all of it. `held` counts
    the bytes of bodies in memory, where they stay until their requests are answered.

    Attributes:
        client: Whose it is.
        gone: Whether the client went away before it had sent all.
    """

    def __init__(
        self, headers: Headers, receive: Receive, send: Send, max_bytes: int, timeout_s: float, held: FairShare[str]
    ) -> None:
        self._receive, self._send = receive, send
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._bytes = 0
        length = headers.get("content-length", "")
        self.length = int(length) if length.isdecimal() else 0
        self.whole = not self.length and "transfer-encoding" not in headers
        self._on_demand = headers.get("expect", "").lower() == "100-continue"
        self.gone, self.client = False, ""
        self._all, self._held = held, 0
        self.unpacked = Unpacked(headers.get("content-encoding", ""))

    async def receive(self) -> Message:
        """The next message; `HTTPException` for a body that is too large, too slow, or has no room beside others."""
        if self.whole:
            return await self._receive()
        self._on_demand = False  # now it was asked for
        message = await self._next()
        if self._bytes > self._max_bytes:
            raise HTTPException(413, self.too_large)
        if self.unpacked.packed and message["type"] == "http.request":
            body = await self.unpacked.read(message.get("body", b""), self._max_bytes - self._held, last=self.whole)
            message = {**message, "body": body}
            if len(body) + self._held > self._max_bytes:
                raise HTTPException(413, self.too_large)
        count = len(message.get("body", b""))
        if not self._all.take(self.client, count):
            why = "The server has no memory for this body beside those of other requests. Try again later."
            raise HTTPException(429, why, {"Retry-After": "1"})
        self._held += count
        return message

    def forget(self) -> None:
        """Note that the body is no longer in memory."""
        self._all.give_back(self.client, self._held)
        self._held = 0

    async def send(self, message: Message) -> None:
        if not self.whole:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            elif not message.get("more_body"):
                await self._send({**message, "more_body": True})
                await self._hear_out()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    @property
    def too_large(self) -> str:
        """The error for a body that is too large."""
        return f"A body may have {self._max_bytes} bytes, got more. Send less text."

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"A body must come within {self._timeout_s:g} s. Send it faster.") from None
        self._bytes += len(message.get("body", b""))
        self.gone = message["type"] == "http.disconnect"
        self.whole = self.gone or not message.get("more_body")
        return message

    async def _hear_out(self) -> None:
        if self._on_demand:
            return  # none comes any more
        with suppress(HTTPException):
            while not self.whole and self._bytes <= _HEARD * self._max_bytes:
                await self._next()


class Unpacked:
    """Unpacks a body that comes in pieces."""

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower()
        self.packed = name not in ("", "identity")
        self._encoding, self._stream = name, zlib.decompressobj(_ANY_ZLIB)

    @property
    def refusal(self) -> ApiError | None:
        """Why the encoding cannot be unpacked, or None."""
        if not self.packed or self._encoding in _ENCODINGS:
            return None
        return ApiError(
            415,
            f"The header Content-Encoding must be one of {', '.join(_ENCODINGS)}, got {self._encoding[:_SHOWN]!a}. "
            "Leave it out, and send the body as it is.",
            code="unsupported_encoding",
            headers={"Accept-Encoding": ", ".join(_ENCODINGS)},
        )

    async def read(self, piece: bytes, most: int, *, last: bool) -> bytes:
        """Unpack the next piece, in a thread; one byte more than `most` bytes at most."""
        try:
            found = await in_thread(lambda: self._read(piece, most + 1))
        except zlib.error as error:
            raise HTTPException(400, f"{self._wrong}, and is not: {error}. Send it as it is.") from error
        if last and len(found) <= most and not self._stream.eof:
            raise HTTPException(400, f"{self._wrong}, but it ends too early. Send all of it.")
        return found

    def _read(self, piece: bytes, most: int) -> bytes:
        found = self._stream.decompress(piece, most)
        while self._stream.eof and self._stream.unused_data and len(found) < most:  # a file of gzip may have parts
            rest = self._stream.unused_data
            self._stream = zlib.decompressobj(_ANY_ZLIB)
            found += self._stream.decompress(rest, most - len(found))
        return found

    @property
    def _wrong(self) -> str:
        return f"The body must be packed as {self._encoding}, as its header Content-Encoding says"


class RequestGuard:
    """Middleware around all routes. A request for `HEAD` is answered as `GET`, without the body.

    Paths that only lack `/v1`, or have a slash too many, are those of the route that is meant. Whole URLs are, too.

    Sets `scope["api_key"]` to the key that a request was let in with, `scope["operator"]` to whether it may read
    figures of all clients, `scope["is_ollama"]` to whether it is one of Ollama's API by its path, and
    `scope["is_anthropic"]` to whether it is one of Anthropic's: by its path, or by the header that all of its clients
    send.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, paths: Collection[str] = ()) -> None:
        self._app, self._settings, self._paths = app, settings, frozenset(paths)
        self._keys = [key.encode() for key in settings.api_keys]
        self._operators = [key.encode() for key in settings.operator_keys]
        self._held: FairShare[str] = FairShare(_BODIES * settings.max_body_bytes, _BODIES_OF_ONE)
        # With keys a page of somebody else's gets no further than here.
        self._hosts = Hosts(settings.allowed_hosts or (("*",) if settings.api_keys else ()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (absolute := _ABSOLUTE.match(scope["path"])) is not None:  # whose host counts, and not the header's
            others = [header for header in scope["headers"] if header[0] != b"host"]
            host = absolute["host"].encode("latin-1", "replace")
            scope = {**scope, "path": absolute["path"] or "/", "headers": [(b"host", host), *others]}
        headers, start, status = Headers(scope=scope), time.perf_counter(), 499
        asked = headers.get("x-request-id", "")
        request_id = asked if _ID.fullmatch(asked) else uuid.uuid4().hex
        bare = scope["method"] == "HEAD"
        line = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:_PATH]}
        root = scope.get("root_path", "")  # where the app is mounted
        method = "GET" if bare else scope["method"]
        path = meant_path(scope["path"].removeprefix(root), self._paths)
        api = api_of(path)
        anthropic = api == "anthropic" or "anthropic-version" in headers
        scope = {**scope, "method": method, "path": path}
        if path.startswith(root):  # Starlette would take it off once more
            scope["root_path"] = ""
        scope |= {"request_id": request_id, "is_anthropic": anthropic, "is_ollama": api == "ollama"}
        limits = self._settings
        body = RequestBody(headers, receive, send, limits.max_body_bytes, limits.body_timeout_s, self._held)
        answered = False

        async def tell(message: Message) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = 499 if body.gone else message["status"], True
                told = MutableHeaders(scope=message)
                told["X-Request-Id"] = request_id
                if "reuse" in scope:
                    told["X-KVBoost-Reuse"] = scope["reuse"]
                if "length" in scope:
                    told["X-KVBoost-Length"] = scope["length"]
                if scope["is_anthropic"]:
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
                ending = "The server ends, and gave the request up."
                error = ApiError(503, ending, code="draining", headers={"Retry-After": "5"})
                await error.response(scope)(scope, body.receive, tell)
        except Exception as failure:
            status = 500
            if answered:
                raise
            _log.exception("a request failed", extra={"fields": line})
            await api_error(failure).response(scope)(scope, body.receive, tell)
        finally:
            body.forget()
            seconds = round(time.perf_counter() - start, 6)
            quiet = scope["path"] in _POLLED and status < 400
            fields = line | {"status": status, "seconds": seconds} | scope.get("figures", {})
            fields |= {name: scope[name] for name in ("ignored", "changed") if name in scope}
            _log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})

    def _refusal(self, scope: Scope, headers: Headers, body: RequestBody) -> ApiError | None:
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
        if "transfer-encoding" in headers and "content-length" in headers:  # a proxy may have read the other one
            return ApiError(400, "A body has Content-Length or Transfer-Encoding, but not both. Leave one out.")
        if not body.whole and (unknown := body.unpacked.refusal) is not None:
            return unknown
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


def meant_path(path: str, known: Collection[str]) -> str:
    """The path of a route that a client means, whose base URL lacks `/v1`, has it twice, or ends with a slash.

    Example:
        >>> known = ["/v1/models", "/v1/chat/completions", "/api/chat"]
        >>> [meant_path(path, known) for path in ("//v1/models/", "/chat/completions", "/v1/api/chat", "/v1/other")]
        ['/v1/models', '/v1/chat/completions', '/api/chat', '/v1/other']
    """
    if path in known:
        return path
    before, rest = _parted(path)
    heads = [head for head in _PREFIXES if head == "v1" or head in before]
    tried = ["/" + "/".join([*before, *rest]), *("/" + "/".join([head, *rest]) for head in heads)]
    found = next((each for each in tried if each in known), None)
    if found is None and rest[:1] == ["models"] and "/v1/models" in known:
        return "/" + "/".join(["v1", *rest])  # and the name of one
    return found or "/" + path.lstrip("/")


def api_of(path: str) -> Literal["anthropic", "ollama"] | None:
    """Whose API a path is of, whether it has a route or not; None for OpenAI's.

    Example:
        >>> [api_of(path) for path in ("/messages/batches", "/v1/api/nope", "/v1/files")]
        ['anthropic', 'ollama', None]
    """
    before, rest = _parted(path)
    if "api" in before:
        return "ollama"
    return "anthropic" if rest[:1] == ["messages"] else None


def _parted(path: str) -> tuple[list[str], list[str]]:
    """The parts of a path: the prefixes that it begins with, and the rest."""
    parts = [part for part in path.split("/") if part]
    rest = list(dropwhile(lambda part: part in _PREFIXES, parts))
    return parts[: len(parts) - len(rest)], rest


class PrivateNetwork:
    """Middleware that answers browsers which ask whether a page of the public internet may call this machine.

    The app decides of which origins pages may call the server at all.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = b"access-control-request-private-network"
        if scope["type"] != "http" or scope["method"] != "OPTIONS" or asks not in dict(scope["headers"]):
            await self._app(scope, receive, send)
            return

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                MutableHeaders(scope=message)["Access-Control-Allow-Private-Network"] = "true"
            await send(message)

        # Some releases of Starlette refuse it.
        others = [header for header in scope["headers"] if header[0] != asks]
        await self._app({**scope, "headers": others}, receive, tell)


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


class Hosts:
    """Tells names of this server from others that lead to its address (DNS rebinding).

    Browsers let a page read what comes from its own name. Whoever owns a name can have it lead to 127.0.0.1 a moment
    later, so that a page of theirs reads what a server there says. Only the header `Host` shows it.

    Args:
        names: That are taken besides those of this machine; `"*"` takes all, `"*.example.org"` all of a domain.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name.lower().rstrip(".") for name in names}

    def takes(self, host: str | None, address: str | None) -> bool:
        """Whether a request with this header `Host`, which no browser leaves out, is for this server.

        `address` is where the connection has arrived, if that is known; a name where there is no connection.
        """
        if "*" in self._names or host is None:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found["name"].lower().rstrip(".")
        if name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        if address is not None and name == address.lower():
            return True
        if any(each.startswith("*.") and name.endswith(each[1:]) for each in self._names):
            return True
        literal = _ip(name.strip("[]"))
        return literal is not None and (literal.is_loopback or literal == _ip(address))


def _ip(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address((text or "").partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
