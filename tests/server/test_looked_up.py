"""A prompt is looked up once, however long it waits, and again if what is stored has changed meanwhile."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.cache import records_of
from tests.internals.server import (
    Job,
    ModelEngine,
    ModelRunner,
    Prefill,
    SamplingOptions,
    Task,
)
from tests.internals.server import (
    memory as model_runner,
)
from tests.server.test_worker import Told, numbers

CHUNK, STORED = 16, 96  # the rest of the prompt is no whole chunk
PROMPT = random_ids(100, 0)[0].tolist()
Change = Callable[[ChunkStore, PreTrainedModel], None]


def counting(monkeypatch: pytest.MonkeyPatch, store: ChunkStore) -> list[bytes]:
    """The roots under which a store is asked for a prompt from now on."""
    asked: list[bytes] = []
    records = records_of(store)
    view = records.view

    def counted(root: bytes, *args: object, **named: object) -> object:
        asked.append(root)
        return view(root, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "view", counted)
    return asked


def compute(model: PreTrainedModel, store: ChunkStore, ids: list[int], **options: object) -> ChunkReuseCache:
    cache = ChunkReuseCache(model, store, **options)  # type: ignore[arg-type]
    model.generate(**as_inputs(torch.tensor([ids])), cache=cache, max_new_tokens=1, do_sample=False)
    return cache


def runner_of(model: PreTrainedModel, store: ChunkStore) -> ModelRunner:
    return ModelRunner(model, store, ReusePolicy(), None, 10**4)


def task_of(ids: list[int]) -> Task:
    return Task(Job(ids=ids, options=SamplingOptions(max_tokens=1)), lambda event: None, time.perf_counter())


@torch.no_grad()
def run(runner: ModelRunner, task: Task, room: int = 256) -> torch.Tensor:
    """Compute a prompt piece by piece; returns the logits of its last token."""
    prefill = Prefill(runner)
    prefill.add([task])
    logits = torch.empty(0)
    while task.left:
        _, logits = prefill.compute(task, room, ())
    return logits


def reused(task: Task) -> int:
    assert task.cache is not None
    return task.cache.report.reused_tokens


def right(model: PreTrainedModel, ids: list[int], logits: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(model(torch.tensor([ids])).logits[:, -1], logits, atol=1e-4)


@pytest.mark.parametrize("room", [256, 8])
def test_a_prompt_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    model = make_model("llama")
    with ChunkStore(model, chunk_size=CHUNK) as store:
        compute(model, store, PROMPT)
        runner, task = runner_of(model, store), task_of(PROMPT)
        asked = counting(monkeypatch, store)
        assert runner.look_up(task).filled == STORED
        logits = run(runner, task, room)
        assert (reused(task), len(asked)) == (STORED, 1)
        assert right(model, PROMPT, logits)


def test_a_prompt_that_goes_on_otherwise_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first piece ends before the prompt does, and what is known is of the whole prompt."""
    model, longer = make_model("llama"), [*PROMPT[:75], *random_ids(55, 1)[0].tolist()]
    with ChunkStore(model, chunk_size=CHUNK) as store:
        compute(model, store, PROMPT)
        runner, task = runner_of(model, store), task_of(longer)
        asked = counting(monkeypatch, store)
        runner.look_up(task)
        with torch.no_grad():
            Prefill(runner).compute(task, 16, ())
        assert (reused(task), len(asked), task.left) == (75, 1, len(longer) - 91)
        logits = run(runner, task)
        assert reused(task) == 75
        assert right(model, longer, logits)


def evict(store: ChunkStore, model: PreTrainedModel) -> None:
    """Have other prompts take the room."""
    for seed in range(2, 8):
        compute(model, store, random_ids(100, seed)[0].tolist())


CHANGES: dict[str, Change] = {
    "cleared": lambda store, model: store.clear(),
    "evicted": evict,
    "discarded": lambda store, model: records_of(store).discard([each.key for each in records_of(store).held()]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_gone_is_noticed(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    compute(model, probe := ChunkStore(model, chunk_size=CHUNK), PROMPT)
    with ChunkStore(model, chunk_size=CHUNK, max_bytes=2 * int(probe.stats()["bytes"])) as store:
        compute(model, store, PROMPT)
        runner, task = runner_of(model, store), task_of(PROMPT)
        known = runner.look_up(task)
        assert known.plan is not None
        assert known.filled == STORED
        change(store, model)
        known.let_go()
        assert known.plan is None  # nothing of what was evicted takes memory any longer
        asked = counting(monkeypatch, store)
        logits = run(runner, task)
        assert (reused(task), len(asked)) == (0, 1)
        assert right(model, PROMPT, logits)


def test_without_the_check_it_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail."""
    model = make_model("llama")
    monkeypatch.setattr(ModelRunner, "_is_current", lambda *_: True)
    with ChunkStore(model, chunk_size=CHUNK) as store:
        compute(model, store, PROMPT)
        runner, task = runner_of(model, store), task_of(PROMPT)
        runner.look_up(task)
        store.clear()
        run(runner, task)
        assert reused(task) == STORED


def test_what_was_stored_meanwhile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    with ChunkStore(model, chunk_size=CHUNK) as store:
        runner, task = runner_of(model, store), task_of(PROMPT)
        assert runner.look_up(task).filled == 0
        compute(model, store, PROMPT[:64])
        assert runner.look_up(task).filled == 64
        logits = run(runner, task)
        assert reused(task) == 64
        assert right(model, PROMPT, logits)


def test_what_another_process_has_deleted_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tiers = make_model("llama"), [f"disk:{tmp_path}:1GB"]
    with ChunkStore(model, chunk_size=CHUNK, tiers=tiers) as store:
        compute(model, store, PROMPT)
        store.flush()
    with ChunkStore(model, chunk_size=CHUNK, tiers=tiers) as store:
        runner, task = runner_of(model, store), task_of(PROMPT)
        assert runner.look_up(task).filled == STORED
        for file in tmp_path.rglob("*"):
            if file.is_file() and "index" not in file.name:
                file.unlink()
        logits = run(runner, task)
        assert reused(task) == 0
        assert right(model, PROMPT, logits)


def test_what_another_process_takes_back_is_not_served(tmp_path: Path) -> None:
    """What host memory has of it, too."""
    model, tiers = make_model("llama"), [f"disk:{tmp_path}:1GB"]
    with (
        ChunkStore(model, chunk_size=CHUNK, tiers=tiers) as store,
        ChunkStore(model, chunk_size=CHUNK, tiers=tiers) as other,
    ):
        compute(model, store, PROMPT)
        store.flush()
        runner, task = runner_of(model, store), task_of(PROMPT)
        assert runner.look_up(task).filled == STORED
        records_of(other).remove(
            [each.root for each in records_of(store).held()], lambda found: [each.key for each in found]
        )
        logits = run(runner, task)
        assert reused(task) == 0
        assert right(model, PROMPT, logits)


def test_what_others_store_is_found_a_moment_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tiers = make_model("llama"), [f"disk:{tmp_path}:1GB"]
    with (
        ChunkStore(model, chunk_size=CHUNK, tiers=tiers) as store,
        ChunkStore(model, chunk_size=CHUNK, tiers=tiers) as other,
    ):
        compute(model, other, PROMPT[:20])
        other.flush()
        runner, task = runner_of(model, store), task_of(PROMPT)
        before = runner.look_up(task).filled
        compute(model, other, PROMPT)
        other.flush()
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 2)
        assert runner.look_up(task).filled == STORED > before


def test_another_salt_is_looked_up_for_itself() -> None:
    model = make_model("llama")
    with ChunkStore(model, chunk_size=CHUNK) as store:
        compute(model, store, PROMPT)
        runner, task = runner_of(model, store), task_of(PROMPT)
        known = runner.look_up(task)
        other = Task(Job(ids=PROMPT, options=SamplingOptions(max_tokens=1), salt=b"other"), lambda event: None, 0.0)
        other.known = known
        assert runner.look_up(other).filled == 0
        run(runner, other)
        assert reused(other) == 0


def test_a_task_whose_session_was_dropped_is_served_nothing() -> None:
    model = make_model("llama")
    with ChunkStore(model, chunk_size=CHUNK) as store:
        compute(model, store, PROMPT)
        runner, task = runner_of(model, store), task_of(PROMPT)
        runner.look_up(task)
        task.unwanted = True
        run(runner, task)
        assert reused(task) == 0


def test_an_error_ends_the_request_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other one, neither running nor waiting."""
    model = make_model("llama")
    bad, good = random_ids(100, 5)[0].tolist(), PROMPT
    look_up = vars(model_runner)["look_up"]

    def failing(parts: object, ids: torch.Tensor, *args: object) -> object:
        if ids[0, 0] == bad[0]:
            raise RuntimeError("This look-up fails.")
        return look_up(parts, ids, *args)

    monkeypatch.setattr(model_runner, "look_up", failing)
    with ChunkStore(model, chunk_size=CHUNK) as store:
        engine = ModelEngine(model, numbers(), store=store, max_batch_size=1, prefill_chunk_size=64)
        try:
            told = [Told() for _ in range(4)]
            for number, each in enumerate(told):
                options = SamplingOptions(max_tokens=20)
                engine.submit(Job(ids=bad if number % 2 else good, options=options), each)
            ends = [each.end for each in told]
        finally:
            engine.close()
    assert [end.reason for end in ends] == ["length", "error", "length", "error"]
    assert all("This look-up fails." in str(end.error) for end in ends[1::2])
    assert ends[0].ids == ends[2].ids
