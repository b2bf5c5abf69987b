"""Request bodies: reads them within limits of size and time, and to their end even if the answer comes before."""

import asyncio
from collections import Counter
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Send

_HEARD = 8  # times the limit, so that who has sent too much reads the answer in place of a reset


class HeldBytes:
    """Counts the bytes of request bodies in memory, where they stay until their requests are answered.

    Args:
        most: At most so many, of which one client has three quarters at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_client: Counter[str] = Counter()

    def take(self, client: str, count: int) -> bool:
        """Hold more bytes for a client, if there is room; returns whether there is."""
        if self._by_client.total() + count > self._most or self._by_client[client] + count > self._most * 3 // 4:
            return False
        self._by_client[client] += count
        return True

    def give_back(self, client: str, count: int) -> None:
        """Hold so many bytes less for a client."""
        self._by_client[client] -= count
        if not self._by_client[client]:
            del self._by_client[client]


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
        held: Of all bodies.

    Attributes:
        client: Whose it is.
        gone: Whether the client went away before it had sent all.
    """

    def __init__(
        self, headers: Headers, receive: Receive, send: Send, max_bytes: int, timeout_s: float, held: HeldBytes
    ) -> None:
        self._receive, self._send = receive, send
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._bytes = 0
        length = headers.get("content-length", "")
        self.length = int(length) if length.isdecimal() else 0
        self._whole = not self.length and "transfer-encoding" not in headers
        self._on_demand = headers.get("expect", "").lower() == "100-continue"
        self.gone, self.client = False, ""
        self._all, self._held = held, 0

    async def receive(self) -> Message:
        """See ASGI.

        Raises:
            HTTPException: it is too large, takes too long, or there is no memory for it beside others.
        """
        if self._whole:
            return await self._receive()
        self._on_demand = False  # now it was asked for
        message = await self._next()
        if self._bytes > self._max_bytes:
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
        self._whole = self.gone or not message.get("more_body")
        return message

    async def _hear_out(self) -> None:
        if self._on_demand:
            return  # none comes any more
        with suppress(HTTPException):
            while not self._whole and self._bytes <= _HEARD * self._max_bytes:
                await self._next()
