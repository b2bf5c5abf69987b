"""Runs the app under Uvicorn: listens, limits connections, and shuts down in order."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from kvboost_hf.server.http.connections import TURNS, ConnectionLimits, Connections, connections_that_fit, protocol_of
from kvboost_hf.server.protocol import Drains
from kvboost_hf.server.settings import ServerSettings

_log = logging.getLogger("kvboost_hf.server")

_LAST_WORDS_S = 5  # for answers on their way when all requests have ended
_UNREAD_S = 0.5  # before that time is over, when answers that nobody reads are given up
_SILENT_S = 2  # that the system keeps a connection to itself on which nothing comes
_EVERYWHERE = "::"  # all addresses of this machine
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
_BACKLOG = 2048  # connections that are not accepted yet


def require_free(host: str, port: int) -> None:
    """Raise `ValueError` for an address that nobody can listen at, before a model is loaded for it."""
    for listener in _listeners(host, port):
        listener.close()


def _listeners(host: str, port: int) -> list[socket.socket]:
    """Sockets for all addresses of a name. That for all of IPv6 is for those of IPv4, too, unlike asyncio's.

    Addresses that this machine does not have, as `::1` without IPv6, are left out while there are others.
    """
    found: list[socket.socket] = []
    dual = host == _EVERYWHERE and socket.has_dualstack_ipv6()
    refused = None
    try:
        for family, _, _, _, address in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
            try:
                found.append(socket.create_server(address, family=family, dualstack_ipv6=dual))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                refused = error
        if not found and refused is not None:
            raise refused
    except OSError as error:
        for listener in found:
            listener.close()
        raise ValueError(
            f"`--host` and `--port` must be an address of this machine that is free, got {host} and {port}: "
            f"{error.strerror}. Pass another one."
        ) from error
    return found


class FrontServer(uvicorn.Server):
    """A Uvicorn server with limits of connections, which answers requests while its engine drains.

    Told to end, it goes on to listen, and the engine takes nothing new: those who ask get 503, and those under way
    have `settings.drain_s` seconds. What is left then is cancelled, and told so. Told again, it waits no longer.

    Args:
        app: The app that `make_app` has made.
        engine: What drains when the server is to end: an engine, or what hands requests on.
        settings: The settings of the server.
        started: Called with the addresses once the server listens; None logs them.
        others_listen: Other servers listen at the same address. Told to end, it leaves them all new connections, and
            answers what comes by those that it has while they are busy.
    """

    def __init__(
        self,
        app: Any,
        engine: Drains,
        settings: ServerSettings,
        started: Callable[[Sequence[str]], None] | None = None,
        *,
        others_listen: bool = False,
    ) -> None:
        tls = settings.tls.context() if settings.tls is not None else None
        most = connections_that_fit() if settings.max_connections is None else settings.max_connections
        limits = ConnectionLimits(most=most, header_s=settings.header_timeout_s, write_s=settings.write_timeout_s)
        self.connections_of = Connections(limits, tls)
        self._engine, self._settings, self._others_listen = engine, settings, others_listen
        self._started = started or _log_addresses
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="asyncio",
                http=protocol_of(self.connections_of),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=limits.accepted_at_once,
                timeout_graceful_shutdown=max(1, round(settings.drain_s)) if others_listen else _LAST_WORDS_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        made = _listeners(self._settings.host, self._settings.port) if sockets is None else ()
        self.connections_of.start()
        await super().startup(sockets or list(made))
        if made:  # Uvicorn tells of those alone that it has made itself
            self._log_started_message(made)
        for server in self.servers:
            for listener in server.sockets:
                with listener.dup() as same:
                    same.listen(_BACKLOG)
                    # Connections inherit it. asyncio sets it where a socket names its protocol, as few do.
                    same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if hasattr(socket, "TCP_DEFER_ACCEPT"):
                        # Who has sent nothing takes no place yet: many who come at once do not displace each other.
                        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal as `uvicorn.Server` does; a second one ends all waiting."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self._others_listen:
            await self._drain()
        await self._accept_no_more()
        self.connections_of.stop()
        # The answers that are left are short, and told to end again it still sends them.
        self.force_exit = False
        # Uvicorn cancels what is left then, and logs each of them as an error of the app.
        last_s = (self.config.timeout_graceful_shutdown or _LAST_WORDS_S) - _UNREAD_S
        unread = asyncio.get_running_loop().call_later(last_s, self.connections_of.drop_unread)
        await super().shutdown(sockets)
        unread.cancel()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        _log.info("The server takes no more requests, and those under way have %g s.", self._settings.drain_s)
        drained = loop.run_in_executor(None, self._engine.drain, self._settings.drain_s)
        while not drained.done():
            if self.force_exit:
                loop.run_in_executor(None, self._engine.drain, 0)
                break
            await asyncio.wait({drained}, timeout=0.05)

    async def _accept_no_more(self) -> None:
        """Let asyncio make connections of all that it has accepted: else they would stay open when it closes."""
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError):  # on Windows
            for server in self.servers:
                for listener in server.sockets:
                    loop.remove_reader(listener.fileno())
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def _log_started_message(self, listeners: Sequence[socket.SocketType]) -> None:
        """In the place of Uvicorn's, which does not know of TLS."""
        scheme = "http" if self.connections_of.tls is None else "https"
        addresses = (listener.getsockname()[:2] for listener in listeners)
        self._started([f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host, port in addresses])


def _log_addresses(urls: Sequence[str]) -> None:
    _log.info("listening at %s", ", ".join(urls))
