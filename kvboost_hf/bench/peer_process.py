"""Runs peers in another process, which waits while other arms answer.

    PYTHON -m kvboost_hf.bench.peer_process SOURCE THREADS FOLDER

The interpreter is that of an environment with the packages of the peers. Each line of standard input is a JSON list,
the name of a method of `_Peers` and its arguments. The answer is a line of JSON: `{"result": …}` or `{"error": …}`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from kvboost_hf.bench.models import Models
from kvboost_hf.bench.peers import PEERS
from kvboost_hf.bench.served import Served, Server, reason
from kvboost_hf.bench.source import ModelSource

_EXIT_TIMEOUT_S = 10  # for the process to end by itself


class PeerError(Exception):
    """An error that the other process reports."""


class PeerProcess:
    """The process; a context manager that ends it.

    Args:
        python: The interpreter.
        source: The model, which the process loads for itself.
    """

    def __init__(self, python: str, source: ModelSource) -> None:
        self._folder = TemporaryDirectory()
        threads = str(torch.get_num_threads())
        command = [python, "-P", "-m", __spec__.name, json.dumps(asdict(source)), threads, self._folder.name]
        self._said = (Path(self._folder.name) / "said").open("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, "TMPDIR": self._folder.name},  # what its compilers leave goes, too
            start_new_session=True,  # who presses Ctrl-C means the benchmark, which ends the process
        )

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if error is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_TIMEOUT_S)
        self._kill()
        self._process.stdout.close()
        self._said.close()
        self._folder.cleanup()

    def _kill(self) -> None:
        """End it, and all that it has started."""
        with suppress(ProcessLookupError):
            if hasattr(os, "killpg"):  # not on Windows
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()

    def ask(self, *asked: Any) -> Any:
        """Send a line and wait for its answer; if the wait is interrupted, the process is killed.

        Raises:
            OSError: the process has ended.
            PeerError: something has failed there; it goes on.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            answer = json.loads(line)
        except (BrokenPipeError, json.JSONDecodeError) as error:  # it has ended, or something else writes there
            self._kill()
            self._said.seek(0)
            last = [text.strip() for text in self._said if text.strip()][-1:]
            raise OSError(": ".join([f"its process has ended with status {self._process.wait()}", *last])) from error
        except BaseException:
            self._kill()
            raise
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["result"]


@dataclass(frozen=True, slots=True)
class PeerElsewhere:
    """One of `PEERS`, in another process."""

    name: str
    process: PeerProcess

    def refusal(self, models: Models, tokenizer: Any) -> str | None:
        """Why it cannot serve this model there, or None."""
        try:
            refusal: str | None = self.process.ask("refusal", self.name)
        except (OSError, PeerError) as error:
            return str(error)
        return refusal

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> Server:
        """A server that has seen nothing yet; it keeps nothing in folders."""
        self.process.ask("open", self.name)
        return _ServerElsewhere(self)


class _ServerElsewhere:
    def __init__(self, peer: PeerElsewhere) -> None:
        self._peer = peer

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:
        """See `Server.answer`."""
        return Served(**self._peer.process.ask("answer", self._peer.name, list(ids), max_new_tokens))

    def close(self) -> None:
        """See `Server.close`."""
        with suppress(OSError):  # with its process it has ended, too
            self._peer.process.ask("close", self._peer.name)


class _Peers:
    """The peers inside the process."""

    def __init__(self, source: ModelSource, folder: Path) -> None:
        self._models, self._tokenizer = Models(source, folder), source.tokenizer()
        self._servers: dict[str, Server] = {}

    def refusal(self, name: str) -> str | None:
        """See `Contender.refusal`."""
        return PEERS[name].refusal(self._models, self._tokenizer)

    def open(self, name: str) -> None:
        """See `Contender.open`."""
        self._servers[name] = PEERS[name].open(self._models, self._tokenizer, None)

    def answer(self, name: str, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """See `Server.answer`."""
        return asdict(self._servers[name].answer(ids, max_new_tokens))

    def close(self, name: str) -> None:
        """See `Server.close`."""
        self._servers.pop(name).close()


def main() -> None:
    """Answer lines until there are no more."""
    _, source, threads, folder = sys.argv
    asking = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers and C code write is no answer
    torch.set_num_threads(int(threads))
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with redirect_stdout(sys.stderr):
        peers = _Peers(ModelSource(**json.loads(source)), Path(folder))
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            try:
                answer = {"result": getattr(peers, name)(*arguments)}
            except Exception as error:  # others are served here, too
                answer = {"error": reason(error)}
            print(json.dumps(answer), file=asking, flush=True)


if __name__ == "__main__":
    main()
