"""The server as it is started, in a thread or as a process, and clients that speak to its sockets directly."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from tests.internals.server import Engine, FrontServer, make_app
from tests.server.conftest import SETTINGS
from tests.servers import free_port

WAIT_S, START_S = 30, 300
CHAT = "/v1/chat/completions"
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


def until(holds: Callable[[], Any], otherwise: str, timeout_s: float = WAIT_S) -> Any:
    """Wait for something to be true; returns it."""
    end = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)
    return found


def post(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    """A request as it is on the wire."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def post_json(body: Any, path: str = CHAT) -> bytes:
    """A request that is whole."""
    content = json.dumps(body).encode()
    return post(content, f"Content-Length: {len(content)}", path=path)


class Wire:
    """A server at a port of this machine.

    Attributes:
        server: In this process; None for another one.
    """

    def __init__(self, port: int, server: FrontServer | None = None) -> None:
        self.port, self.server = port, server
        self.url = f"http://127.0.0.1:{port}"

    def open(self, sent: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
        """A connection on which something was sent."""
        found = socket.socket()
        if receive_buffer is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        found.settimeout(WAIT_S)
        try:
            found.connect(("127.0.0.1", self.port))
            found.sendall(sent)
        except OSError:
            found.close()
            raise
        return found

    def health(self, timeout_s: float = 2) -> int:
        """The status of `/health`, in time and of a new connection: of a second one if the first is reset."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                return httpx.get(f"{self.url}/health", timeout=max(0.01, end - time.monotonic())).status_code
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                continue


@contextmanager
def running(engine: Engine, tokenizer: Any, **changes: Any) -> Iterator[Wire]:
    """The server in a thread; keywords change the settings."""
    settings = replace(SETTINGS, **({"port": 0, "drain_s": 1.0} | changes))
    with in_a_thread(FrontServer(make_app(engine, tokenizer, settings), engine, settings)) as wire:
        yield wire


@contextmanager
def in_a_thread(server: FrontServer) -> Iterator[Wire]:
    """A server in a thread, until it is left."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive(), "it never started")
    try:
        yield Wire(server.servers[0].sockets[0].getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


@contextmanager
def process(
    log: Path, *options: str, environment: Mapping[str, str] | None = None, **how: Any
) -> Iterator[tuple[subprocess.Popen[str], Wire]]:
    """`kvboost-hf serve` on the embedded model, in a process of its own.

    Its temporary folder is that of the log, where no other server has planned to use memory.
    """
    wire = Wire(free_port())
    command = [sys.executable, "-m", "kvboost_hf", "serve", "--device", "cpu", "--port", str(wire.port), *options]
    with log.open("w") as stderr:
        fixed = {"OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)}
        server = subprocess.Popen(
            command, stderr=stderr, text=True, env={**os.environ, **fixed, **(environment or {})}, **how
        )
    try:
        until(lambda: _answers(wire) or server.poll() is not None, "it never listened", START_S)
        assert server.poll() is None, log.read_text()
        yield server, wire
    finally:
        server.kill()
        server.wait()


def _answers(wire: Wire) -> bool:
    try:
        return wire.health() == 200
    except httpx.TransportError:
        return False


class Slow:
    """Many connections that send a byte now and then, and never a whole request."""

    def __init__(self, wire: Wire, count: int) -> None:
        self._open = []
        self._stop = threading.Event()
        for _ in range(count):
            try:
                self._open.append(wire.open(HALF))
            except OSError:  # refused
                continue
        self._thread = threading.Thread(target=self._drip, args=(wire,), daemon=True)

    def __enter__(self) -> "Slow":
        self._thread.start()
        return self

    def _drip(self, wire: Wire) -> None:
        while not self._stop.wait(0.1):
            for place, one in enumerate(self._open):
                try:
                    one.sendall(b"a")
                except OSError:  # dropped: another one in its place
                    one.close()
                    try:
                        self._open[place] = wire.open(HALF)
                    except OSError:
                        continue

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        for one in self._open:
            one.close()
