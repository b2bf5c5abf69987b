"""A prompt is looked up once, however long it waits, and again if what is stored has changed meanwhile."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.cache import moved_forward, records_of
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

pytestmark = pytest.mark.daily

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
    prefill.tasks += [task]
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


def tell(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Have a clock tell the time where look-ups are kept, and nowhere else: servers of other tests sleep by it."""
    told = SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter)
    for name in ("server.engine.model_runner", "cache.store.lower"):
        monkeypatch.setattr(f"kvboost_hf.{name}.time", told)


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
        tell(monkeypatch, lambda: time.monotonic() + 2)
        assert runner.look_up(task).filled == STORED > before


def counted_tiers(monkeypatch: pytest.MonkeyPatch, store: ChunkStore) -> Counter[str]:
    """How often lower tiers are asked for chunks by their keys, and for those that begin alike."""
    asked, tiers = Counter[str](), records_of(store).lower.tiers
    for name in ("find", "find_alike"):
        method = getattr(tiers, name)

        def counted(*args: object, name: str = name, method: Callable[..., object] = method) -> object:
            asked[name] += 1
            return method(*args)

        monkeypatch.setattr(tiers, name, counted)
    return asked


def test_tiers_are_asked_once_for_a_prompt_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    with ChunkStore(model, chunk_size=CHUNK, tiers=[f"disk:{tmp_path}:1GB"]) as store:
        runner, task = runner_of(model, store), task_of(PROMPT)
        asked = counted_tiers(monkeypatch, store)
        logits = run(runner, task, 8)
        assert asked == {"find": 1, "find_alike": 2}
        assert right(model, PROMPT, logits)
        later = task_of(PROMPT[:80])
        run(runner, later, 8)
        assert asked["find"] == 1  # all of it is in memory
        tell(monkeypatch, partial(_later, time.monotonic, [0.0]))
        run(runner, task_of(random_ids(100, 9)[0].tolist()), 8)
        assert asked["find"] > 2  # others may have stored more since the piece before


def _later(clock: Callable[[], float], seconds: list[float]) -> float:
    """A clock that is two seconds on whenever somebody asks."""
    seconds[0] += 2
    return clock() + seconds[0]


@torch.no_grad()
def test_a_prompt_in_pieces_finds_what_another_one_has_stored_meanwhile() -> None:
    """Two prompts that take turns compute each piece once."""
    model = make_model("llama")
    with ChunkStore(model, chunk_size=CHUNK) as store:
        runner, tasks = runner_of(model, store), [task_of(PROMPT), task_of(PROMPT)]
        prefill = Prefill(runner)
        prefill.tasks += tasks
        computed = 0
        while any(task.left for task in tasks):
            for task in tasks:
                if task.left:
                    computed += prefill.compute(task, CHUNK, ())[0]
        served = [task.cache.report for task in tasks if task.cache is not None]
        assert sum(report.forwarded_tokens for report in served) < 1.3 * len(PROMPT)
        assert sum(report.reused_tokens for report in served) > 0.7 * len(PROMPT)


def behind_a_gap(model: PreTrainedModel, folder: Path) -> list[str]:
    """Store the prompt on disk, and delete its second chunk there."""
    tiers = [f"disk:{folder}:1GB"]
    with ChunkStore(model, chunk_size=CHUNK, tiers=tiers) as store:
        compute(model, store, PROMPT)
        store.flush()
        second = next(each for each in records_of(store).held() if getattr(each, "start", 0) == CHUNK)
        records_of(store).lower.tiers.delete([second.key])
        store.flush()
    return tiers


def test_a_later_piece_finds_what_is_stored_behind_a_gap(tmp_path: Path) -> None:
    model = make_model("llama")
    with ChunkStore(model, chunk_size=CHUNK, tiers=behind_a_gap(model, tmp_path)) as store:
        runner, task = runner_of(model, store), task_of(PROMPT)
        assert runner.look_up(task).filled == CHUNK
        logits = run(runner, task, CHUNK)
        assert reused(task) == STORED - CHUNK - 4  # the last token of each piece is computed
        assert right(model, PROMPT, logits)


def test_a_later_piece_is_not_served_what_was_removed(tmp_path: Path) -> None:
    model = make_model("llama")
    with ChunkStore(model, chunk_size=CHUNK, tiers=behind_a_gap(model, tmp_path)) as store:
        runner, task = runner_of(model, store), task_of(PROMPT)
        prefill = Prefill(runner)
        with torch.no_grad():
            prefill.compute(task, CHUNK, ())
        records_of(store).discard([each.key for each in records_of(store).everything()])
        store.flush()
        logits = run(runner, task, CHUNK)
        assert reused(task) == CHUNK
        assert right(model, PROMPT, logits)


def test_moved_chunks_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = make_model("llama"), [random_ids(64, seed)[0].tolist() for seed in range(3)]
    searches = Counter[int]()
    find = vars(moved_forward)["find_moved"]

    def counted(tokens: object, start: int, *args: object) -> object:
        searches[start] += 1
        return find(tokens, start, *args)

    monkeypatch.setattr(moved_forward, "find_moved", counted)
    with ChunkStore(model, chunk_size=CHUNK) as store:
        compute(model, store, [*texts[0], *texts[1]])
        runner = ModelRunner(model, store, ReusePolicy(mode="blend", repair="none", progressive=False), None, 10**4)
        task = task_of([*texts[2], *texts[1], *texts[2][:20]])
        searches.clear()
        run(runner, task)
        assert task.cache is not None
        assert task.cache.report.moved_tokens == 64
        assert searches.total() == 1
        again = task_of([*texts[2][:30], *texts[1], *texts[2][:20]])
        searches.clear()
        runner.look_up(again)
        store.clear()
        run(runner, again)
        assert again.cache is not None
        assert again.cache.report.moved_tokens == 0


def test_what_a_client_has_asked_for_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = make_model("llama"), random_ids(90, 4)[0].tolist()
    with ChunkStore(model, chunk_size=CHUNK) as store:
        compute(model, store, PROMPT)
        runner, task = runner_of(model, store), task_of(PROMPT)
        asked = counting(monkeypatch, store)
        assert [runner.known_tokens(ids, b"") for ids in (other, PROMPT, PROMPT[:40])] == [0, STORED, 39]
        assert len(asked) == 3
        logits = run(runner, task)
        assert (reused(task), len(asked)) == (STORED, 3)
        assert right(model, PROMPT, logits)
        assert runner.known_tokens(PROMPT, b"another") == 0
        store.clear()
        task = task_of(PROMPT)
        run(runner, task)
        assert (reused(task), len(asked)) == (0, 5)


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
