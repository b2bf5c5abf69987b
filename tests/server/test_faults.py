"""An error ends the request that it belongs to, or is logged, wherever the engine's loop meets it; never all requests.

Two answers are under way when something begins to raise, and a third prompt comes. The two end as plain generate()
has them; so does the third, unless the error is its own.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkStore, DraftTreeConfig, KVQuantConfig, lookup_assistant
from tests.conftest import make_model, random_ids
from tests.internals.assisted import LookupDraft
from tests.internals.cache import ChunkReuseCache, records_of
from tests.internals.disk import DiskTier
from tests.internals.server import (
    AnswerDrafts,
    BatchKV,
    Finished,
    Job,
    JobEvent,
    Keep,
    ModelEngine,
    Progress,
    SamplingOptions,
    SessionChange,
)
from tests.server.test_worker import WAIT_S, Told, numbers, plain

FIRST = [random_ids(20, 1), random_ids(33, 2)]  # under way
THIRD = random_ids(50, 3)
LONG, SHORT = 60, 6  # tokens of the answers
QUIET_S = 0.4
Break = Callable[[pytest.MonkeyPatch, ModelEngine], None]


class FaultError(Exception):
    """What is raised here, and nowhere else."""


def fail(*_: object, **__: object) -> Any:
    raise FaultError("This fails.")


def job(ids: torch.Tensor, count: int, **more: Any) -> Job:
    return Job(ids=ids[0].tolist(), options=SamplingOptions(max_tokens=count), **more)


class Opened:
    """An engine, closed at the end, whatever was broken in it."""

    def __init__(self) -> None:
        self.engines: list[ModelEngine] = []

    def __call__(self, model: PreTrainedModel, **more: Any) -> ModelEngine:
        more = {"store": ChunkStore(model, chunk_size=16), "prefill_chunk_size": 16, "max_batch_size": 3, **more}
        self.engines.append(ModelEngine(model, numbers(), **more))
        return self.engines[-1]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    made = Opened()
    yield made
    monkeypatch.undo()
    for engine in made.engines:
        engine.close()


def with_others(engine: ModelEngine, begin: Callable[[], None], third: Job) -> list[Told]:
    """Runs two answers, has something `begin` to fail when both have 3 tokens, and then submits a third job."""
    under_way, ready = [0, 0], threading.Event()

    def noting(number: int) -> Callable[[JobEvent], None]:
        def note(event: JobEvent) -> None:
            under_way[number] += isinstance(event, Progress)
            if min(under_way) >= 3 and not ready.is_set():
                begin()  # in the engine's thread, between two steps
                engine.submit(third, told[2])
                ready.set()
            elif isinstance(event, Finished):
                ready.set()

        return note

    told = [Told(noting(0)), Told(noting(1)), Told()]
    for ids, each in zip(FIRST, told, strict=False):
        engine.submit(job(ids, LONG), each)
    assert ready.wait(WAIT_S)
    return told


def require_right(model: PreTrainedModel, told: Told, ids: torch.Tensor, count: int) -> None:
    assert told.end.reason == "length", told.end.error
    assert told.text == plain(model, ids, count)


def require_others_right(model: PreTrainedModel, told: list[Told]) -> None:
    for ids, each in zip(FIRST, told, strict=False):
        require_right(model, each, ids, LONG)


def _pins(monkeypatch: pytest.MonkeyPatch, engine: ModelEngine) -> None:
    monkeypatch.setattr(engine._sessions.pins, "expire", fail)


def _hears(monkeypatch: pytest.MonkeyPatch, engine: ModelEngine) -> None:
    monkeypatch.setattr(engine._sessions, "hear", fail)


def _links(monkeypatch: pytest.MonkeyPatch, engine: ModelEngine) -> None:
    monkeypatch.setattr(engine, "_link", fail)


def _stores(monkeypatch: pytest.MonkeyPatch, engine: ModelEngine) -> None:
    monkeypatch.setattr(ChunkReuseCache, "store_tails", fail)


def _looks(monkeypatch: pytest.MonkeyPatch, engine: ModelEngine) -> None:
    monkeypatch.setattr(engine.store, "view", fail)


def _store_hears(monkeypatch: pytest.MonkeyPatch, engine: ModelEngine) -> None:
    monkeypatch.setattr(engine.store, "hear", fail)


def _begins(monkeypatch: pytest.MonkeyPatch, engine: ModelEngine) -> None:
    monkeypatch.setattr(engine._sessions, "begin", fail)


HOUSEKEEPING = {"pins": _pins, "notices": _hears, "routers": _links, "storing": _stores}
OWN = {"look-up": _looks, "hearing before it": _store_hears, "pinning": _begins}


@pytest.mark.parametrize("at", HOUSEKEEPING.values(), ids=HOUSEKEEPING.keys())
def test_what_belongs_to_no_request_ends_none(at: Break, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    engine = opened(model)
    told = with_others(engine, lambda: at(monkeypatch, engine), job(THIRD, SHORT))
    require_others_right(model, told)
    require_right(model, told[2], THIRD, SHORT)


@pytest.mark.parametrize("at", OWN.values(), ids=OWN.keys())
def test_what_belongs_to_one_request_ends_that_one(at: Break, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    engine = opened(model)
    told = with_others(engine, lambda: at(monkeypatch, engine), job(THIRD, SHORT))
    require_others_right(model, told)
    assert told[2].end.reason == "error"
    assert "FaultError" in str(told[2].end.error)
    monkeypatch.undo()
    again = Told()
    engine.submit(job(THIRD, SHORT), again)
    require_right(model, again, THIRD, SHORT)


def test_an_error_of_nobody_ends_those_that_are_there_and_the_loop_waits(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: whoever chooses among all that wait fails, so nobody can be chosen."""
    model = make_model()
    engine = opened(model)
    told, rounds = [Told() for _ in range(3)], [0]
    look = engine._end_those_that_must

    def counted() -> None:
        rounds[0] += 1
        look()

    monkeypatch.setattr(engine, "_end_those_that_must", counted)
    monkeypatch.setattr(engine._intake, "admit", fail)
    for each in told:
        engine.submit(job(THIRD, SHORT), each)
    assert {each.end.reason for each in told} == {"error"}
    before = rounds[0]
    time.sleep(QUIET_S)
    assert rounds[0] <= before + 1  # nothing is left to go on with
    monkeypatch.setattr(engine, "_embed", fail)
    future = engine.embed([[1, 2, 3]])
    with pytest.raises(FaultError):
        future.result(WAIT_S)
    monkeypatch.undo()
    require_right(model, (again := Told(), engine.submit(job(THIRD, SHORT), again))[0], THIRD, SHORT)


def test_who_calls_gets_the_error_of_the_call(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    engine = opened(model)
    monkeypatch.setattr(engine._sessions, "change", fail)
    errors: list[Exception] = []

    def call() -> None:
        try:
            engine.change_session(b"", "mine", SessionChange(priority=1))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    told = with_others(engine, thread.start, job(THIRD, SHORT))
    thread.join(WAIT_S)
    require_others_right(model, told)
    require_right(model, told[2], THIRD, SHORT)
    assert [type(error) for error in errors] == [FaultError]


def test_an_embedding_that_fails(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    engine = opened(model, prefill_chunk_size=128)
    body: Any = model.base_model
    found: list[Any] = []

    def begin() -> None:
        stock = body.forward

        def forward(*args: Any, **named: Any) -> Any:
            if (*args, named.get("input_ids"))[0].shape[1] == 77:
                fail()
            return stock(*args, **named)

        monkeypatch.setattr(body, "forward", forward)
        found.append(engine.embed(random_ids(77, 9).tolist()))

    told = with_others(engine, begin, job(THIRD, SHORT))
    require_others_right(model, told)
    require_right(model, told[2], THIRD, SHORT)
    with pytest.raises(FaultError):
        found[0].result(WAIT_S)


def test_answers_that_run_one_by_one_fail_one_by_one(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized caches share no batch: a forward is of one answer."""
    model = make_model()
    engine = opened(model, live_quant=KVQuantConfig(method="kivi"))
    runner = engine._runner
    step, third = runner.step, job(THIRD, LONG)

    def failing(task: Any) -> torch.Tensor:
        if task.job is third and len(task.ids) == 4:
            fail()
        return step(task)

    told = with_others(engine, lambda: monkeypatch.setattr(runner, "step", failing), third)
    assert told[2].end.reason == "error"
    assert len(told[2].end.ids) == 4
    assert [each.end.reason for each in told[:2]] == ["length"] * 2
    assert [len(each.end.ids) for each in told[:2]] == [LONG] * 2


def test_a_batch_that_cannot_let_a_row_go_spares_prompts(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds is no longer sure: its answers end. The prompt that is computed meanwhile is not among them."""
    model = make_model()
    engine = opened(model)
    told, long = [Told() for _ in range(3)], random_ids(400, 4)
    stock, calls = BatchKV.leave, [0]

    def once(batch: BatchKV, row: int) -> None:
        calls[0] += 1
        if calls[0] == 1:
            fail()
        stock(batch, row)

    monkeypatch.setattr(BatchKV, "leave", once)
    with engine._intake.changed:
        for ids, count, each in zip([*FIRST, long], (4, LONG, SHORT), told, strict=True):
            engine.submit(job(ids, count), each)
    require_right(model, told[0], FIRST[0], 4)  # it had ended
    assert told[1].end.reason == "error"
    require_right(model, told[2], long, SHORT)


@pytest.mark.parametrize(
    "place", [(LookupDraft, "grow"), (AnswerDrafts, "__init__")], ids=["drafting", "its beginning"]
)
def test_drafts_that_fail_cost_no_answer(
    place: tuple[type, str], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an answer beside others, where the step is of all of them."""
    model, tries = make_model(), [0]
    engine = opened(model, draft=lookup_assistant(model), draft_trees=DraftTreeConfig(policy="tree", max_nodes=8))

    def failing(*_: object, **__: object) -> Any:
        tries[0] += 1
        fail()

    monkeypatch.setattr(*place, failing)
    told = with_others(engine, lambda: None, job(THIRD, SHORT))
    require_others_right(model, told)
    require_right(model, told[2], THIRD, SHORT)
    assert 0 < tries[0] <= 2  # and nothing was drafted any more


@pytest.mark.daily
@pytest.mark.parametrize("times", [1, 3])
def test_a_notice_that_fails_is_tried_again_and_holds_up_no_other(
    times: int, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(make_model())
    told = [{"kind": "session", "client": "known", "session": name} for name in ("bad", "good")]
    table, tries = engine._sessions, list[str]()

    def heed(client: bytes, id: str, *_: object) -> None:
        tries.append(id)
        if id == "bad" and tries.count("bad") <= times:
            fail()

    monkeypatch.setattr(table, "_clients", {"known": b"client"})
    monkeypatch.setattr(table, "_heed", heed)
    monkeypatch.setattr(engine.store, "hear", lambda take: told if not tries else [])
    engine._intake.call(lambda: [table.hear(()) for _ in range(6)])
    assert tries == ["bad", "good", *["bad"] * min(times, 2)]  # three times in all, at most


def test_a_removal_that_fails_takes_all_out_of_host_memory(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what another process has removed would be served."""
    model = make_model()
    with ChunkStore(model, chunk_size=16, tiers=[f"disk:{tmp_path}"]) as store:
        engine = opened(model, store=store)
        told = Told()
        engine.submit(job(THIRD, SHORT), told)
        require_right(model, told, THIRD, SHORT)
        records = records_of(store)
        monkeypatch.setattr(records, "discard", fail)
        monkeypatch.setattr(records.lower.tiers, "hear", lambda: ([{"kind": "removed", "keys": ["00" * 20]}], True))
        assert len(store)
        engine._intake.call(lambda: store.hear())
        assert not len(store)
        engine.close()


class BrokenTier(DiskTier):
    """A tier that raises what no tier may, in one of its methods, once it is told to."""

    broken: str | None = None

    def __getattribute__(self, name: str) -> Any:
        return fail if name == object.__getattribute__(self, "broken") else super().__getattribute__(name)


METHODS = ["find", "find_alike", "entries", "read", "write", "touch", "delete", "announce", "heard", "stats", "hits"]


@pytest.mark.parametrize("method", METHODS)
def test_a_tier_that_raises(method: str, opened: Opened, tmp_path: Path) -> None:
    """Of the third, only what is asked of the tier for it may end it."""
    model = make_model()
    tier = BrokenTier(tmp_path, 10**8)
    with ChunkStore(model, chunk_size=16, tiers=[tier]) as store:
        engine = opened(model, store=store)
        seen = Told()
        engine.submit(job(THIRD, SHORT), seen)
        require_right(model, seen, THIRD, SHORT)
        store.flush()

        def begin() -> None:
            tier.broken = method

        told = with_others(engine, begin, job(THIRD, SHORT, keep=(Keep(share=0.1),)))
        require_others_right(model, told)
        if told[2].end.reason == "error":
            assert method in ("find", "find_alike", "read")
        else:
            require_right(model, told[2], THIRD, SHORT)
        tier.broken = None
        again = Told()
        engine.submit(job(THIRD, SHORT), again)
        require_right(model, again, THIRD, SHORT)
        engine.close()
