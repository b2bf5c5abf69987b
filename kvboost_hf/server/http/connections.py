"""Limits connections: how many are open, how long each may be idle, and which ones are dropped to make room.

A connection is either *busy*, with a complete request that the server works on, or it *waits for its client*: for
the rest of a handshake, of a header or of a body, for the next request, or for the client to read what was written.
Anybody can open connections that wait, without a key, so these are the ones that make room for others.
"""

import asyncio
import ipaddress
import logging
import ssl
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvboost_hf.server.fair_share import FairShare

if sys.platform != "win32":
    import resource

_log = logging.getLogger("kvboost_hf.server")

TURNS = 4  # of the event loop, from when a connection is accepted until what has come on it is read
_MOST = 4096  # connections, where more descriptors may be open
_FILES = 128  # descriptors that are left for files and the like, at least
_SHORT = "not accepted for lack of descriptors"
_SHARE = 0.75  # of all connections, that one address may have alone
_RELIEF = 16  # connections that are dropped when there are no descriptors left


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How many connections may be open, and how long they may keep the server waiting."""

    most: int  # in all
    # Seconds for the handshake of TLS and the header of a request, from the beginning of a connection or from the end
    # of the last answer.
    header_s: float
    write_s: float  # seconds in which a client must read something of what was written for it

    @property
    def accepted_at_once(self) -> int:
        """Connections that are accepted in one turn of the event loop.

        Those who have sent their request must be heard before as many others as there may be have come after them.
        """
        return max(1, min(32, self.most // (4 * TURNS)))

    @property
    def sweep_s(self) -> float:
        """Seconds between two searches for connections that have waited for too long."""
        return min(1.0, self.header_s / 4, self.write_s / 4)


def connections_that_fit() -> int:
    """How many connections this process has descriptors for, with some left for files; 4096 at most."""
    if sys.platform == "win32":
        return 512 - _FILES  # as many as select() takes
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(1, min(_MOST, soft - max(_FILES, soft // 5)))


class Connections:
    """All connections of a server. Used by the thread of its event loop alone.

    Where there is no room for a new one, the one that has waited for its client for the longest time is dropped: of
    the same address, if it has some. Only where all of these are busy is the new one refused.
    """

    def __init__(self, limits: ConnectionLimits, tls: ssl.SSLContext | None = None) -> None:
        self.limits, self.tls = limits, tls
        self._all: dict[LimitedProtocol, str] = {}  # with the address
        self._addresses: FairShare[str] = FairShare(limits.most, _SHARE)
        self._waiting: dict[LimitedProtocol, float] = {}  # for their clients, since when; the longest first
        self._told: Counter[str] = Counter()  # what the log has yet to hear
        self._ends = False
        self._sweeper: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._all)

    def start(self) -> None:
        """Start to watch the connections of the running event loop, until `stop`."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed)
        self._sweep(loop)

    def stop(self) -> None:
        """Drop connections without a complete request, refuse new ones, and stop watching."""
        self._ends = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._tell()
        for connection in [one for one in self._waiting if not one.answering]:
            self._drop(connection)

    def drop_unread(self) -> None:
        """Drop connections whose clients do not read their answers."""
        for connection in [one for one in self._waiting if one.answering]:
            self._drop(connection)

    def admit(self, connection: "LimitedProtocol", address: str) -> bool:
        """Make room for a new connection; returns whether there is room."""
        if self._ends:
            return False
        if not self._addresses.has_room(address) and not self._make_room(address):
            self._told["refused"] += 1
            return False
        self._all[connection] = address
        self._addresses.add(address)
        self.waits(connection)
        return True

    def waits(self, connection: "LimitedProtocol") -> None:
        """Note that a connection waits for its client."""
        if connection in self._all:
            self._waiting.pop(connection, None)
            self._waiting[connection] = asyncio.get_running_loop().time()

    def works(self, connection: "LimitedProtocol") -> None:
        """Note that the server works on a request of a connection."""
        self._waiting.pop(connection, None)

    def forget(self, connection: "LimitedProtocol") -> None:
        """Note that a connection has ended. It may be called any number of times."""
        self._waiting.pop(connection, None)
        address = self._all.pop(connection, None)
        if address is not None:
            self._addresses.give_back(address)

    def _make_room(self, address: str) -> bool:
        """Drop what has waited longest: of an address if it has some, else of any; tells whether there was any."""
        has_own = self._addresses.held(address) > 0
        for connection in self._waiting:
            if not has_own or self._all[connection] == address:
                self._told["dropped for others"] += 1
                self._drop(connection)
                return True
        return False

    def _drop(self, connection: "LimitedProtocol") -> None:
        self.forget(connection)
        connection.drop()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection, since in list(self._waiting.items()):
            if (reason := connection.overdue(now, since)) is not None:
                self._told[reason] += 1
                self._drop(connection)
        self._tell()
        self._sweeper = loop.call_later(self.limits.sweep_s, self._sweep, loop)

    def _tell(self) -> None:
        """A line in the log for all that was dropped or refused since the last one."""
        if self._told:
            told = ", ".join(f"{count} {what}" for what, count in self._told.items())
            _log.warning("Of %d connections at most: %s.", self.limits.most, told)
            self._told.clear()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Called for failures that nothing else has caught.

        Where there are no descriptors left asyncio calls it again and again: a count in the log is enough.
        """
        message = str(context.get("message"))
        if self._ends and "_start_serving" in message:
            return  # asyncio would listen again, where it had no descriptors before
        if "accept()" not in message:
            loop.default_exception_handler(context)
            return
        if _SHORT not in self._told:
            for connection in list(self._waiting)[:_RELIEF]:
                self._told["dropped for others"] += 1
                self._drop(connection)
        self._told[_SHORT] += 1


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 on one connection, which counts among `Connections`."""

    among: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wire: asyncio.Transport | None = None  # below TLS, if there is any; None once it was refused
        self._open = False  # to HTTP
        self._early = b""  # came before the handshake was told to be over
        self._upgrading: asyncio.Task[None] | None = None
        self._unread: tuple[int, float] | None = None  # bytes that the client is to read, and since when so many

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast(asyncio.Transport, transport)
        if not self.among.admit(self, _address(wire)):
            wire.abort()
            return
        self._wire = wire
        if self.among.tls is None:
            self._begin(wire)
        else:
            self._upgrading = self.loop.create_task(self._encrypt(wire, self.among.tls))

    async def _encrypt(self, wire: asyncio.Transport, context: ssl.SSLContext) -> None:
        if wire.is_closing():  # dropped already
            return
        encrypted: asyncio.Transport | None = None
        with suppress(OSError):  # no TLS, another version, no certificate, or gone
            encrypted = await self.loop.start_tls(
                wire, self, context, server_side=True, ssl_handshake_timeout=self.among.limits.header_s
            )
        if encrypted is None:
            self.drop()
            self.among.forget(self)
            return
        self._begin(encrypted)
        if self._early:
            self.data_received(self._early)

    def _begin(self, transport: asyncio.Transport) -> None:
        self._open = True
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._open:
            super().data_received(data)
        else:
            self._early += data

    def handle_events(self) -> None:
        """Handle events, after which a request may be complete."""
        super().handle_events()
        if self._busy:
            self.among.works(self)

    def send_400_response(self, msg: str) -> None:
        """Send status 400, unless another answer has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what the app has to say would come behind it
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.drop()

    def on_response_complete(self) -> None:
        """Wait for the client's next request, unless it has come already."""
        self._unread = None
        self.among.waits(self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        if self._open:
            self._unread = None
            self.among.waits(self)
            super().pause_writing()

    def resume_writing(self) -> None:
        if self._open:
            super().resume_writing()
            if self._busy:
                self.among.works(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.among.forget(self)
        if self._open:
            super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._open and not self.transport.is_closing():
            super().shutdown()

    def drop(self) -> None:
        """Close the connection at once, and discard what was not sent."""
        if self._wire is not None:
            self._wire.abort()

    @property
    def answering(self) -> bool:
        """Whether a complete request is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def overdue(self, now: float, since: float) -> str | None:
        """Why it has waited for its client for too long; None if it has not. It does so since `since`."""
        limits, left = self.among.limits, self._wire.get_write_buffer_size() if self._wire is not None else 0
        if left:
            # Nothing is written meanwhile: it becomes less when the client reads.
            if self._unread is None or left < self._unread[0]:
                self._unread = left, now
            return "did not read their answers" if now - self._unread[1] > limits.write_s else None
        self._unread = None
        between = self.cycle is None or self.cycle.response_complete  # a body has a limit of its own
        return "sent no whole header in time" if between and now - since > limits.header_s else None

    @property
    def _busy(self) -> bool:
        return self.answering and not self.flow.write_paused

    def _should_upgrade(self) -> bool:
        """There is nothing to upgrade to, and a line in the log for each attempt would be an attacker's to write."""
        return False


def protocol_of(connections: Connections) -> type[LimitedProtocol]:
    """The protocol class for connections that count among these."""
    return type("_Protocol", (LimitedProtocol,), {"among": connections})


def _address(transport: asyncio.Transport) -> str:
    """The part of an address that counts as one client: of IPv6, the 64 bits that a network has for one site."""
    peer = transport.get_extra_info("peername")
    try:
        found = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except (IndexError, TypeError, ValueError):
        return str(peer)
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
