"""Runs peers whose packages must not be installed here, in temporary environments, each in a process of its own.

    PYTHON -m kvboost_hf.bench.environments SOURCE THREADS FOLDER

The process waits while other arms answer. Each line of its standard input is a JSON list, the name of a method of
`_Peers` and its arguments. The answer is a line of JSON: `{"result": …}` or `{"error": …}`.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from kvboost_hf.bench.models import ModelOrigin, Models
from kvboost_hf.bench.peers import PEERS
from kvboost_hf.bench.run import Contender
from kvboost_hf.bench.served import Served, Server, reason

_EXIT_TIMEOUT_S = 10  # for the process to end by itself


@contextmanager
def peers_at_hand(names: Sequence[str], source: ModelOrigin, *, install: bool) -> Iterator[list[Contender]]:
    """Peers, where they can run, for as long as the context lasts.

    Args:
        names: Names of `PEERS`.
        source: The model, which is loaded once more in each environment.
        install: Whether to make environments for what peers need. If not, these peers say so, and do not run.

    Yields:
        The peers. Those that need the same share a process, which waits while others have their turn.
    """
    with ExitStack() as stack:
        places: dict[str, PeerProcess | str] = {}  # or why there is none
        peers: list[Contender] = []
        for peer in (PEERS[name] for name in names):
            if peer.needs is None:
                peers.append(peer)
                continue
            if peer.needs not in places:
                folder = Path(stack.enter_context(TemporaryDirectory()))
                places[peer.needs] = _place(peer.needs, folder, source, stack) if install else _hint(peer.needs)
            place = places[peer.needs]
            peers.append(_Absent(peer.name, place) if isinstance(place, str) else PeerElsewhere(peer.name, place))
        yield peers


def _hint(needs: str) -> str:
    return f"it needs {needs}: --install-peers gets it into an environment of its own"


class PeerProcess:
    """The process; a context manager that ends it.

    Args:
        python: The interpreter.
        source: The model, which the process loads for itself.
    """

    def __init__(self, python: str, source: ModelOrigin) -> None:
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


def _place(needs: str, folder: Path, source: ModelOrigin, stack: ExitStack) -> PeerProcess | str:
    try:
        python = make_environment(folder, needs)
    except OSError as error:
        return str(error)
    return stack.enter_context(PeerProcess(python, source))


def make_environment(folder: Path, needs: str) -> str:
    """Make a virtual environment that has what this one has, and a package above it.

    What is here already, torch and transformers above all, is not installed again: peers run on the same builds.

    Args:
        folder: Where.
        needs: What pip is to install, such as `"kvboost==0.9.0"`.

    Returns:
        Its interpreter.

    Raises:
        OSError: it could not be made.
    """
    try:
        venv.create(folder, with_pip=True)
        python = venv.EnvBuilder().ensure_directories(folder).env_exe
        inside = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
        here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        lines = (f"import site; site.addsitedir({path!r})\n" for path in here)
        Path(inside, "here.pth").write_text("".join(lines), encoding="utf-8")
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", needs]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        said = [line for line in f"{error.stdout}\n{error.stderr}".splitlines() if line.strip()]
        raise OSError(f"{needs} cannot be installed: {said[-1] if said else error}") from error
    return str(python)


@dataclass(frozen=True, slots=True)
class _Absent:
    name: str
    why: str

    def refusal(self, models: Models, tokenizer: Any) -> str | None:
        return self.why

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> Server:
        raise AssertionError("who refuses is not asked")


class PeerError(Exception):
    """An error that the other process reports."""


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
        return Served(**self._peer.process.ask("answer", self._peer.name, list(ids), max_new_tokens))

    def close(self) -> None:
        with suppress(OSError):  # with its process it has ended, too
            self._peer.process.ask("close", self._peer.name)


class _Peers:
    """The peers inside the process."""

    def __init__(self, source: ModelOrigin, folder: Path) -> None:
        self._models, self._tokenizer = Models(source, folder), source.tokenizer()
        self._servers: dict[str, Server] = {}

    def refusal(self, name: str) -> str | None:
        return PEERS[name].refusal(self._models, self._tokenizer)

    def open(self, name: str) -> None:
        self._servers[name] = PEERS[name].open(self._models, self._tokenizer, None)

    def answer(self, name: str, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        return asdict(self._servers[name].answer(ids, max_new_tokens))

    def close(self, name: str) -> None:
        self._servers.pop(name).close()


def main() -> None:
    """Answer lines until there are no more."""
    _, source, threads, folder = sys.argv
    asking = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers and C code write is no answer
    torch.set_num_threads(int(threads))
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with redirect_stdout(sys.stderr):
        peers = _Peers(ModelOrigin(**json.loads(source)), Path(folder))
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            try:
                answer = {"result": getattr(peers, name)(*arguments)}
            except Exception as error:  # others are served here, too
                answer = {"error": reason(error)}
            print(json.dumps(answer), file=asking, flush=True)


if __name__ == "__main__":
    main()
