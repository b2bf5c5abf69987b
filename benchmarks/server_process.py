"""Servers as processes of their own, for benchmarks."""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

OURS = (sys.executable, "-c", "from kvboost_hf.cli import serve; raise SystemExit(serve())")
START_S = 180  # until a server answers, its imports included


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Process:
    """A server that answers at a port of this machine."""

    pid: int
    port: int

    @property
    def figures(self) -> dict[str, int]:
        """Resident bytes, threads, and open file descriptors, as Linux counts them."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return {
            "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
            "threads": int(status["Threads"]),
            "descriptors": len(list(Path(f"/proc/{self.pid}/fd").iterdir())),
        }


@contextmanager
def serving(
    command: Sequence[str],
    *,
    log: IO[str] | int = subprocess.DEVNULL,
    health: str = "/health",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """Run a command that takes `--port`, wait until it answers, and end it.

    Raises:
        RuntimeError: it ends before it answers, or does not answer in time.
    """
    port = free_port()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=log,
        stderr=log,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    try:
        end = time.monotonic() + START_S
        while not _answers(port, health):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"`{' '.join(command)}` does not answer; its status is {process.returncode}.")
            time.sleep(0.1)
        yield Process(process.pid, port)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
