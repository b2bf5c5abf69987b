"""Models that several processes compute together (`tp_plan`, gloo): the ranks agree on what is reused."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.conftest import as_inputs, make_model, random_ids
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


class Beside:
    """This process as one of two ranks. The other one holds and finds so many tokens less, or refuses all."""

    rank, size = 0, 2

    def __init__(self, held: int = 0, found: int = 0, refuses: bool = False) -> None:
        self.held, self.found, self.refuses, self.inside = held, found, refuses, False

    def least(self, values: Sequence[int]) -> list[int]:
        assert self.inside
        return [max(0, value - self.found) for value in values]

    def all(self, value: bool) -> bool:
        assert self.inside
        return value and not self.refuses

    def agree(self, value: int) -> tuple[int, bool]:
        assert self.inside
        less, self.held = self.held, 0
        return max(0, value - less), not less

    @contextmanager
    def together(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False


def test_what_the_other_rank_lacks_is_not_reused() -> None:
    """In the layers, in the store, and in pieces of a prompt; what it refuses is computed whole by all."""
    model: Any = make_model("llama")
    ids = random_ids(90, seed=1)
    plain = model.generate(**as_inputs(ids), max_new_tokens=2)
    store = ChunkStore(model, chunk_size=16)
    ChunkReuseCache(model, store)  # so that the model is probed before
    kept = ChunkReuseCache(model, store)

    def forwarded(cache: ChunkReuseCache, *ranks: Any, **more: Any) -> tuple[int, str | None]:
        store.ranks = Beside(*ranks)  # type: ignore[assignment]
        assert torch.equal(model.generate(**as_inputs(ids), max_new_tokens=2, cache=cache, **more), plain)
        return cache.report.forwarded_tokens, cache.report.bypass_reason

    assert forwarded(kept) == (90, None)
    assert forwarded(kept) == (1, None)
    assert forwarded(kept, 20, 100) == (21, None)
    assert forwarded(ChunkReuseCache(model, store), 0, 20) == (21, None)
    assert forwarded(ChunkReuseCache(model, store), 0, 20, prefill_chunk_size=40) == (52, None)  # 21 of two pieces
    other = "another of the ranks that compute the model cannot reuse it"
    assert forwarded(kept, 0, 0, True) == (90, other)
    assert forwarded(kept, 0, 0, True, prefill_chunk_size=40) == (90, other)
    store.ranks = Beside()  # type: ignore[assignment]
    for policy, message in (
        (ReusePolicy(mode="blend"), "`mode` must be 'exact'"),
        (ReusePolicy(audit_rate=0.5), "`audit_rate` must be 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ChunkReuseCache(model, store, policy)
    states: Any = make_model("qwen3_next")
    store = ChunkStore(states, chunk_size=16)
    store.ranks = Beside()  # type: ignore[assignment]
    cache = ChunkReuseCache(states, store)
    states.generate(**as_inputs(ids), max_new_tokens=1, cache=cache)
    assert cache.report.bypass_reason == "its cache has states, and several ranks compute the model (tp_plan)"
