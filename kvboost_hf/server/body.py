"""The body of one request: read within a limit and a time, and heard to its end when it is answered before."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Send

_HEARD = 8  # times the limit, so that who has sent too much reads the answer in place of a reset


class Body:
    """Stands between an app and its server for one request.

    A client that sends its body to the end before it reads would miss an answer that comes earlier: the connection
    would be reset under it. So what it still sends is read and thrown away when it is answered, for as long as a body
    may take and up to eight times the limit; then the connection is closed.

    Args:
        headers: Of the request.
        receive: Of the server.
        send: Of the server.
        max_bytes: Of the body.
        timeout_s: Seconds for all of it.

    Attributes:
        gone: Whether the client went away before it had sent all.
    """

    def __init__(self, headers: Headers, receive: Receive, send: Send, max_bytes: int, timeout_s: float) -> None:
        self._receive, self._send = receive, send
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._bytes = 0
        length = headers.get("content-length", "")
        self.length = int(length) if length.isdecimal() else 0
        self._whole = not self.length and "transfer-encoding" not in headers
        self._on_demand = headers.get("expect", "").lower() == "100-continue"
        self.gone = False

    async def receive(self) -> Message:
        """See ASGI.

        Raises:
            HTTPException: it is too large, or takes too long.
        """
        if self._whole:
            return await self._receive()
        self._on_demand = False  # now it was asked for
        message = await self._next()
        if self._bytes > self._max_bytes:
            raise HTTPException(413, self.too_large)
        return message

    async def send(self, message: Message) -> None:
        """See ASGI."""
        if not self._whole:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            elif not message.get("more_body"):
                await self._send({**message, "more_body": True})
                await self._hear_out()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    @property
    def too_large(self) -> str:
        """What a client is told whose body is."""
        return f"A body may have {self._max_bytes} bytes, got more. Send less text."

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"A body must come within {self._timeout_s:g} s. Send it faster.") from None
        self._bytes += len(message.get("body", b""))
        self.gone = message["type"] == "http.disconnect"
        self._whole = self.gone or not message.get("more_body")
        return message

    async def _hear_out(self) -> None:
        if self._on_demand:
            return  # none comes any more
        with suppress(HTTPException):
            while not self._whole and self._bytes <= _HEARD * self._max_bytes:
                await self._next()
