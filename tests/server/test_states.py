"""Rows with states (linear attention, Mamba, convolutions) that are decoded in one batch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkStore
from tests.architectures.models import make_architecture
from tests.conftest import make_model, random_ids
from tests.internals.compat import steps_reason
from tests.internals.server import Job, JobEvent, ModelEngine, SamplingOptions
from tests.server.test_worker import Told, job, numbers, plain

Make = Callable[..., ModelEngine]
FAMILIES = [
    "falcon_h1",
    "nemotron_h",
    "mamba2",
    "lfm2",
    "qwen3_5_text",
    "zamba2",
    "kimi_linear",
    "granitemoehybrid",
    "olmo_hybrid",
    "bailing_hybrid",
    "lara_mini",
    "bamba",
]
COUNT = 24  # tokens of an answer


@pytest.fixture
def engines() -> Iterator[Make]:
    made: list[ModelEngine] = []

    def make(model: PreTrainedModel, **told: Any) -> ModelEngine:
        made.append(
            ModelEngine(
                model, numbers(), **{"store": ChunkStore(model, chunk_size=16), "prefill_chunk_size": 23, **told}
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def sampled(ids: torch.Tensor, seed: int) -> Job:
    return Job(ids=ids[0].tolist(), options=SamplingOptions(max_tokens=COUNT, temperature=0.9, seed=seed))


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_come_and_go(name: str, engines: Make) -> None:
    """Rows end by their length, by a text and by their client; each has the tokens that it has alone."""
    model = make_architecture(name)
    prompts = [random_ids(length, length) for length in (40, 1, 5, 70)]
    alone = engines(model, max_batch_size=1)

    def run(engine: ModelEngine, jobs: list[Job]) -> list[Told]:
        told = [Told() for _ in jobs]
        with engine._intake.changed:
            for each, listener in zip(jobs, told, strict=True):
                engine.submit(each, listener)
        assert all(listener.end.error is None for listener in told)
        return told

    jobs = [job(ids, COUNT - n) for n, ids in enumerate(prompts)] + [sampled(ids, 3) for ids in prompts[:2]]
    said = run(alone, jobs)
    jobs.append(job(prompts[0], COUNT, stop=(said[0].text[8:14],)))
    said += run(alone, jobs[-1:])
    engine = engines(model, max_batch_size=4)
    assert engine._runner.batchable
    ticket: list[Any] = []
    left = Told(lambda event: ticket[0].cancel() if len(left.events) == 4 else None)
    with engine._intake.changed:
        ticket.append(engine.submit(job(random_ids(9, 9), 200), left))
        found = [Told() for _ in jobs]
        for each, listener in zip(jobs, found, strict=True):
            engine.submit(each, listener)
    for expected, listener in zip(said, found, strict=True):
        assert (listener.end.ids, listener.text, listener.end.reason) == (
            expected.end.ids,
            expected.text,
            expected.end.reason,
        )
    starts = list(zip(prompts, found, strict=False))
    assert found[0].text == plain(model, prompts[0], COUNT)
    assert left.end.reason == "cancelled"
    stats = engine.stats()
    assert stats["steps"] < 0.5 * stats["generated_tokens"]
    assert stats["running"] == stats["batch_bytes"] == 0

    # Chats go on from as much of what the batch has left as of what the rows alone have.
    chats = [job(torch.cat([ids, torch.tensor([told.end.ids]), random_ids(6, 50)], 1), 8) for ids, told in starts]
    for expected, listener in zip(run(alone, chats), run(engine, chats), strict=True):
        assert listener.end.ids == expected.end.ids
        assert listener.end.cached_tokens == expected.end.cached_tokens
    last = listener.end
    assert last.cached_tokens >= (last.prompt_tokens - 7 if steps_reason(model) is None else 64)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "nemotron_h"])
def test_a_row_that_is_drafted_for_between_two_batches(name: str, engines: Make) -> None:
    """Alone it may run ahead of its states; it joins others, and is alone again."""
    model = make_architecture(name)
    engine = engines(model, draft=make_model(), max_batch_size=3)
    ids, others = random_ids(30, 1), [Told(), Told()]

    def at(event: JobEvent) -> None:
        if len(first.events) in (10, 40):
            engine.submit(job(random_ids(20, len(first.events)), 12), others[len(first.events) > 10])

    first = Told(at)
    engine.submit(job(ids, 90), first)
    assert first.text == plain(model, ids, 90)
    for listener, seed in zip(others, (10, 40), strict=True):
        assert listener.text == plain(model, random_ids(20, seed), 12)


@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp_text", "jamba"])
def test_rows_that_cannot_be_taken_apart_take_turns(name: str, engines: Make) -> None:
    model = make_architecture(name)
    engine = engines(model)
    prompts = [random_ids(length, length) for length in (40, 5)]
    told = [Told() for _ in prompts]
    with engine._intake.changed:
        for ids, listener in zip(prompts, told, strict=True):
            engine.submit(job(ids, 8), listener)
    for ids, listener in zip(prompts, told, strict=True):
        assert listener.text == plain(model, ids, 8)
    assert not engine._runner.batchable
