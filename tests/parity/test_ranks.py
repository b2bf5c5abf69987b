"""Models that several processes compute together (`tp_plan`, gloo): the ranks agree on what is reused."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.ranks import CASES, save_model
from tests.servers import BINARY, Server, free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo")
LASTING = [name for name in CASES if name != "killed"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    save_model(made / "model")
    return made


Run = Callable[..., list[int]]


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Run:
    """Run cases in so many processes; returns how each has ended."""

    def start(ranks: int, *names: str, **variables: str) -> list[int]:
        if not (tmp_path / "model").exists():
            (tmp_path / "model").symlink_to(folder / "model")
        told = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | told | variables
        command = [sys.executable, "-W", "ignore", "-m", "tests.parity.ranks", str(tmp_path), *names]
        logs = [open(tmp_path / f"log{rank}", "wb") for rank in range(ranks)]
        processes = [
            subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT, stderr=log)
            for rank, log in enumerate(logs)
        ]
        try:
            ended = [process.wait(240) for process in processes]
        finally:
            for process, log in zip(processes, logs, strict=True):
                process.kill()
                log.close()
        for name in names:
            if name != "killed":
                assert (tmp_path / f"right-{name}").exists(), "\n".join(
                    (tmp_path / f"log{rank}").read_text("utf-8")[-3000:] for rank in range(ranks)
                )
        return ended

    return start


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_forward_the_same_and_answer_as_one_process(run: Run, ranks: int) -> None:
    """Tokens, logits and tokens forwarded; with disks that lose and damage blobs, small budgets, and clears."""
    assert run(ranks, *LASTING) == [0] * ranks


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="no server")
def test_a_server_of_all_ranks(run: Run, tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        assert run(2, "tiers", RANKS_TIER=server.url) == [0, 0]
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.nightly
def test_ranks_of_two_sizes_share_a_folder_and_no_chunks(run: Run) -> None:
    """The case finds nothing at first, or fails."""
    assert run(2, "tiers") == [0, 0]
    assert run(4, "tiers") == [0] * 4


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_call_of_others(run: Run, tmp_path: Path) -> None:
    """With a clear error, and the store as it was."""
    assert run(2, "killed") == [0, 9], (tmp_path / "log0").read_text("utf-8")[-3000:]
    assert (tmp_path / "survived-0").exists()
