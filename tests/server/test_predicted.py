"""Predicted outputs: the answer is what it is without, and comes with fewer forwards where the prediction is right."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from kvboost_hf import ChunkStore, DraftTreeConfig
from tests.conftest import make_model, random_ids
from tests.internals.assisted import Branches
from tests.internals.server import Finished, Job, ModelEngine, SamplingOptions
from tests.server.conftest import Listening
from tests.server.test_worker import Told, numbers

pytestmark = pytest.mark.daily

COUNT = 40


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[ModelEngine]:
    model = make_model(getattr(request, "param", "llama"))
    made = _engine(model)
    yield made
    made.close()


def _engine(model: PreTrainedModel, **how: Any) -> ModelEngine:
    return ModelEngine(model, numbers(), store=ChunkStore(model, chunk_size=16), **how)


def _run(engine: ModelEngine, prediction: list[int] | None, **options: Any) -> tuple[list[int], Finished, int]:
    """The tokens of an answer, its end, and the forwards behind the first token."""
    told, before, ends = Told(), engine.stats()["steps"], options.pop("ends", ())
    job = Job(
        ids=random_ids(30)[0].tolist(),
        options=SamplingOptions(**{"max_tokens": COUNT, "logprobs": 0} | options),
        ends=frozenset(ends),
        prediction=prediction or (),
    )
    engine.submit(job, told)
    assert told.end.error is None
    found = [one.token for event in told.events if not isinstance(event, Finished) for one in event.logprobs]
    return found, told.end, engine.stats()["steps"] - before


@pytest.mark.parametrize("engine", ["llama", "gemma2", "gpt2", "qwen3_next"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.3}])
def test_a_right_prediction_saves_forwards(engine: ModelEngine, options: dict[str, Any]) -> None:
    wanted, end, steps = _run(engine, None, **options)
    assert steps == COUNT - 1
    assert end.accepted_prediction is end.rejected_prediction is None
    told, end, steps = _run(engine, wanted, **options)
    assert told == wanted
    assert steps < COUNT / 3
    assert end.accepted_prediction is not None
    assert end.accepted_prediction + steps >= COUNT - 2


def test_drafts_grow_as_long_as_all_of_them_is_right(engine: ModelEngine) -> None:
    wanted, _, steps = _run(engine, None, max_tokens=150)
    assert steps == 149
    told, _, steps = _run(engine, wanted, max_tokens=150)
    assert told == wanted
    assert steps == 5  # of 16, 32, 48 and 48 tokens, and of what is left


def test_an_edit_is_passed_over(engine: ModelEngine) -> None:
    """The prediction is wrong at its beginning and in its middle, and lacks a part."""
    wanted, *_ = _run(engine, None, temperature=0.9, seed=1)
    wrong = [(token + 1) % 190 for token in wanted]
    prediction = [*wrong[:2], *wanted[2:14], *wrong[14:17], *wanted[17:25], *wanted[30:]]
    told, end, steps = _run(engine, prediction, temperature=0.9, seed=1)
    assert told == wanted
    assert 15 <= (end.accepted_prediction or 0) < COUNT
    assert end.rejected_prediction
    assert steps < COUNT - 12


@pytest.mark.parametrize("prediction", [[1], [1, 2, 3], [199] * 50, list(range(190))])
def test_a_wrong_prediction_changes_nothing(engine: ModelEngine, prediction: list[int]) -> None:
    assert _run(engine, prediction)[0] == _run(engine, None)[0]


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_lengths(engine: ModelEngine, count: int) -> None:
    wanted = _run(engine, None)[0]
    told, end, _ = _run(engine, wanted, max_tokens=count)
    assert told == wanted[:count]
    assert end.reason == "length"


def test_ends_and_least_tokens(engine: ModelEngine) -> None:
    wanted = _run(engine, None)[0]
    for least in (0, 9):
        asked: dict[str, Any] = {"ends": [wanted[5]], "min_tokens": least}
        assert _run(engine, wanted, **asked)[0] == _run(engine, None, **asked)[0]


def test_beside_a_draft_model() -> None:
    model = make_model()
    drafted = _engine(model, draft=make_model(), draft_trees=DraftTreeConfig(policy="tree", depth=3, width=1))
    plain = _engine(model)
    wanted = _run(plain, None)[0]
    try:
        assert _run(drafted, wanted[20:])[0] == wanted
        assert drafted.stats()["speculation"]["rounds"] > 0
    finally:
        drafted.close()
        plain.close()


def test_what_is_kept_of_a_prediction_would_be_noticed(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"temperature": 1.2, "seed": 2}
    wanted, keep = _run(engine, None, **how)[0], Branches.keep

    def shuffled(self: Branches, path: Any) -> None:
        self._kv = [pair and (pair[0].roll(1, 2), pair[1].roll(1, 2)) for pair in self._kv]
        keep(self, path)

    monkeypatch.setattr(Branches, "keep", shuffled)
    assert _run(engine, wanted[:20], **how)[0] != wanted


def test_the_route(reading: Listening) -> None:
    client = reading.openai.with_options(api_key="key")
    said: Any = [
        {"role": "system", "content": "Anna plays the piano. Tom reads a book. The lamp in the hall is red."},
        {"role": "user", "content": "Where is the lamp?"},
    ]
    asked: dict[str, Any] = {"model": "reader", "messages": said, "temperature": 0, "max_tokens": 30}
    asked["extra_body"] = {"ignore_eos": True}
    create: Any = client.chat.completions.create
    plain = create(**asked)
    text = plain.choices[0].message.content
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    for content in (text, [{"type": "text", "text": text}]):
        told = create(**asked, prediction={"type": "content", "content": content})
        assert told.choices[0].message.content == text
        assert told.usage is not None
        details = told.usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens
        assert details.rejected_prediction_tokens is not None
    body = asked | {"prediction": {"type": "audio", "content": "a"}}
    response = reading.http.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer key"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prediction.type")
