"""Makes temporary virtual environments for peers whose packages must not be installed in this one."""

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvboost_hf.bench.models import Models
from kvboost_hf.bench.peer_process import PeerElsewhere, PeerProcess
from kvboost_hf.bench.peers import PEERS
from kvboost_hf.bench.run import Contender
from kvboost_hf.bench.served import Server
from kvboost_hf.bench.source import ModelSource


@contextmanager
def peers_at_hand(names: Sequence[str], source: ModelSource, *, install: bool) -> Iterator[list[Contender]]:
    """Peers, where they can run, for as long as the context lasts.

    Args:
        names: Of `PEERS`.
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


def _place(needs: str, folder: Path, source: ModelSource, stack: ExitStack) -> PeerProcess | str:
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
