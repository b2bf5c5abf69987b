"""Answers without a length run together: memory is kept for as much as they have, and grows with them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkStore
from kvboost_hf.config import DraftTreeConfig, KVQuantConfig, ReusePolicy
from tests.architectures.models import make_architecture
from tests.conftest import make_model, random_ids
from tests.internals.server import EngineLimits, Job, ModelEngine, SamplingOptions, SessionChange, jobs, task, worker
from tests.server.test_worker import Told, job, numbers, plain

ROOM = 512  # tokens of the context
FIRST = 64  # tokens of an answer that memory is kept for when it starts
Make = Callable[..., ModelEngine]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen times smaller, so that nothing takes long."""
    monkeypatch.setattr(jobs, "FIRST_TOKENS", FIRST)
    monkeypatch.setattr(task, "FIRST_TOKENS", FIRST)
    monkeypatch.setattr(task, "_SPARE_TOKENS", 4)
    monkeypatch.setattr(worker, "MORE_TOKENS", 16)


@pytest.fixture
def engines() -> Iterator[Make]:
    made: list[ModelEngine] = []

    def make(model: PreTrainedModel, **told: Any) -> ModelEngine:
        told = {"store": ChunkStore(model, chunk_size=16), "max_model_len": ROOM, **told}
        made.append(ModelEngine(model, numbers(), **told))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def submit(engine: ModelEngine, count: int, length: int, told: Callable[[], Told] = Told) -> list[Told]:
    """Jobs that are all there when the engine looks."""
    listeners = [told() for _ in range(count)]
    with engine._intake.changed:
        for seed, listener in enumerate(listeners):
            engine.submit(job(random_ids(20 + seed, seed), length, salt=b"%d" % seed), listener)
    return listeners


def test_eight_without_a_length_run_together(engines: Make) -> None:
    """In a memory that has room for the whole context of four."""
    engine = engines(make_model(), max_live_tokens=4 * ROOM)
    with engine._intake.changed:
        tickets = [engine.submit(job(random_ids(20, n), ROOM - 20), Told()) for n in range(8)]
    while (stats := engine.stats())["running"] < 8:
        assert stats["waiting"] < 9
    for ticket in tickets:
        ticket.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen3_next", "falcon_h1", "nemotron_h"])
def test_long_answers_take_turns_where_memory_ends(name: str, engines: Make) -> None:
    """Those that are set aside go on as if nothing had been: the tokens are those of each alone."""
    model = make_architecture(name) if name == "nemotron_h" else make_model(name)
    engine = engines(model, max_live_tokens=240, max_model_len=160)
    told = submit(engine, 3, 130)
    for seed, listener in enumerate(told):
        assert listener.end.reason == "length"
        assert listener.end.completion_tokens == 130
        assert listener.end.prompt_tokens == 20 + seed
        assert listener.end.cached_tokens == 0  # of the prompt, when it came
        assert listener.text == plain(model, random_ids(20 + seed, seed), 130)
    stats = engine.stats()
    assert stats["set_aside"] >= 1
    assert stats["generated_tokens"] == 3 * 130
    assert (stats["running"], stats["waiting"], stats["batch_bytes"]) == (0, 0, 0)


def test_samples_go_on_where_they_were(engines: Make) -> None:
    """With the state of the sampler, and log probabilities."""
    model = make_model()

    def run(**limits: Any) -> list[Any]:
        engine, found = engines(model, **limits), [Told(), Told()]
        with engine._intake.changed:
            for seed, listener in enumerate(found):
                options = SamplingOptions(
                    max_tokens=120, temperature=0.9, seed=seed, repetition_penalty=1.1, logprobs=0
                )
                engine.submit(Job(ids=random_ids(30, seed)[0].tolist(), options=options), listener)
        assert all(listener.end.reason == "length" for listener in found)
        assert engine.stats()["set_aside"] == ("max_live_tokens" in limits)
        return [listener.end.ids for listener in found]

    assert run(max_live_tokens=250, max_model_len=160) == run()


@pytest.mark.parametrize(
    "told",
    [
        {"live_quant": KVQuantConfig()},
        {"draft": True},
        {"policy": ReusePolicy(mode="blend")},
    ],
    ids=["codes", "drafts", "blend"],
)
@pytest.mark.parametrize("stops", [False, True])
def test_other_ways_of_decoding_go_on_alike(engines: Make, told: dict[str, Any], stops: bool) -> None:
    """Beside an engine with room for all of them."""
    model = make_model()
    if "draft" in told:
        told = {"draft": make_model(), "draft_trees": DraftTreeConfig(depth=3)}

    def run(**limits: Any) -> list[Any]:
        engine, found = engines(model, **told, **limits), [Told(), Told()]
        with engine._intake.changed:
            for seed, listener in enumerate(found):
                asked = job(random_ids(30, seed), 120, salt=b"%d" % seed, stop=("no such text",) if stops else ())
                engine.submit(asked, listener)
        ended = [(listener.end.reason, listener.end.ids, listener.text) for listener in found]
        assert (engine.stats()["set_aside"] > 0) == ("max_live_tokens" in limits)
        return ended

    assert run(max_live_tokens=240, max_model_len=160) == run()


@pytest.mark.slow
def test_a_store_that_is_closed_meanwhile(engines: Make) -> None:
    """Then all is computed again."""
    model = make_model()
    store = ChunkStore(model, chunk_size=16)
    engine = engines(model, store=store, max_live_tokens=450, max_model_len=430)
    told = submit(engine, 2, 300)
    while not engine.stats()["set_aside"]:
        assert len(told[0].events) < 300
        time.sleep(0.001)
    store.close()
    for seed, listener in enumerate(told):
        assert listener.text == plain(model, random_ids(20 + seed, seed), 300)


def test_one_that_waits_again_can_be_cancelled(engines: Make) -> None:
    engine = engines(make_model(), max_live_tokens=450, max_model_len=430)
    first, second = Told(), Told()
    with engine._intake.changed:
        engine.submit(job(random_ids(20, 0), 400), first)
        ticket = engine.submit(job(random_ids(20, 1), 400), second)
    while not engine.stats()["set_aside"]:
        assert len(first.events) < 400
        time.sleep(0.001)
    ticket.cancel()
    assert second.end.reason == "cancelled"
    assert 150 < second.end.completion_tokens < 250
    assert first.end.reason == "length"
    assert engine.stats()["finished"] == {"length": 1, "cancelled": 1}


class Claimed:
    """A job that has so much of the memory."""

    def __init__(self, client: bytes, reserved: int) -> None:
        self.client, self.reserved = client, reserved


def test_who_gives_way() -> None:
    limits = EngineLimits(max_live_tokens=1000, max_client_share=0.75)
    a, b, c, d = (Claimed(client, 250) for client in (b"a", b"a", b"b", b"b"))
    assert limits.in_the_way(a, 10, [a]) is None
    assert limits.in_the_way(a, 100, [a, b]) is None
    assert limits.in_the_way(a, 400, [a, b]) is b  # no part is left for others
    assert limits.in_the_way(b, 400, [a, b]) is b
    assert limits.in_the_way(a, 10, [a, b, c, d]) is b
    assert limits.in_the_way(c, 10, [a, b, c, d]) is d
    assert limits.in_the_way(c, 260, [a, b, c]) is b  # of the client that has most
    big = Claimed(b"a", 700)
    assert limits.in_the_way(c, 60, [big, c]) is c  # the first one is never in the way
    assert limits.in_the_way(big, 60, [big, c]) is c
    late = Claimed(b"c", 10)
    assert limits.in_the_way(late, 60, [big, c, late]) is late  # none of its client's came later
    assert EngineLimits().in_the_way(a, 10**9, [a, b]) is None


@pytest.mark.slow
def test_a_session_that_is_dropped_keeps_nothing_of_what_goes_on(engines: Make) -> None:
    model = make_model()
    engine = engines(model, max_live_tokens=450, max_model_len=430)
    first, second = Told(), Told()
    with engine._intake.changed:
        engine.submit(job(random_ids(20, 0), 400, session="one", salt=b"1"), first)
        engine.submit(job(random_ids(20, 1), 400, session="two", salt=b"2"), second)
    while not engine.stats()["set_aside"]:
        assert len(first.events) < 400
        time.sleep(0.001)
    assert engine.drop_session(b"", "two", b"2")
    assert engine.change_session(b"", "two", SessionChange(priority=1)) is None
    assert second.end.reason == "length"
    again = Told()
    ids = torch.cat([random_ids(20, 1), torch.tensor([second.end.ids])], 1)
    engine.submit(job(ids, 1, salt=b"2"), again)
    assert again.end.cached_tokens == 0
