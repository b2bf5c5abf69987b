"""What ends an answer, and how tokens are chosen where a request leaves it open: as plain `generate()` has it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from kvboost_hf import ChunkStore, DraftTreeConfig
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.server import (
    Job,
    ModelEngine,
    SamplingDefaults,
    SamplingOptions,
    ServerSettings,
    TextStream,
    make_app,
)
from tests.server.conftest import Listening, listening
from tests.server.fake_engine import FakeEngine
from tests.server.test_worker import Told, numbers

pytestmark = pytest.mark.daily

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}], "temperature": 0}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


@pytest.fixture(params=[False, True], ids=["plain", "drafted"])
def runs(model: PreTrainedModel, request: pytest.FixtureRequest) -> Iterator[ModelEngine]:
    drafts: dict[str, Any] = (
        {"draft": make_model(), "draft_trees": DraftTreeConfig(policy="tree", depth=3, width=2, branching=2)}
        if request.param
        else {}
    )
    made = ModelEngine(model, numbers(), store=ChunkStore(model, chunk_size=16), **drafts)
    yield made
    if drafts:
        assert made.stats()["speculation"]["accepted"] > 0
    made.close()


def said(model: PreTrainedModel, ids: torch.Tensor, **how: Any) -> list[int]:
    found: list[int] = model.generate(**as_inputs(ids), do_sample=False, max_new_tokens=24, **how)[0].tolist()
    return found[ids.shape[1] :]


def run(engine: ModelEngine, ids: torch.Tensor, *, options: dict[str, Any] | None = None, **job: Any) -> Told:
    told = Told()
    engine.submit(
        Job(ids=ids[0].tolist(), options=SamplingOptions(**{"max_tokens": 24} | (options or {})), **job), told
    )
    return told


def words(told: Told) -> list[int]:
    return [int(word) for word in told.text.split(",") if word]


@pytest.mark.parametrize("least", [0, 1, 7, 8, 9, 24])
def test_min_tokens(model: PreTrainedModel, runs: ModelEngine, least: int) -> None:
    ids = random_ids(30)
    end = said(model, ids, eos_token_id=None)[7]
    wanted = said(model, ids, eos_token_id=end, min_new_tokens=least or None)
    told = run(runs, ids, ends=frozenset([end]), options={"min_tokens": least})
    assert told.end.completion_tokens == len(wanted)
    assert words(told) == [token for token in wanted if token != end]
    assert told.end.reason == ("stop" if end in wanted else "length")


def test_rows_of_a_batch_end_by_themselves(model: PreTrainedModel) -> None:
    """Each as it does alone: with ends, without, and with a least number of tokens, at once."""
    ids = [random_ids(20 + n, n) for n in range(4)]
    ends = [said(model, each, eos_token_id=None)[3] for each in ids]
    hows: list[dict[str, Any]] = [
        {"eos_token_id": ends[0]},
        {"eos_token_id": None},
        {"eos_token_id": ends[2], "min_new_tokens": 10},
        {"eos_token_id": [ends[3], 5], "min_new_tokens": 2},
    ]
    jobs: list[dict[str, Any]] = [
        {"ends": frozenset([ends[0]])},
        {},
        {"ends": frozenset([ends[2]]), "options": {"min_tokens": 10}},
        {"ends": frozenset([ends[3], 5]), "options": {"min_tokens": 2}},
    ]
    engine = ModelEngine(model, numbers(), store=ChunkStore(model, chunk_size=16), batch_window_ms=200)
    try:
        told = [run(engine, each, **job) for each, job in zip(ids, jobs, strict=True)]
        for one, each, how, job in zip(told, ids, hows, jobs, strict=True):
            wanted = said(model, each, **how)
            assert words(one) == [token for token in wanted if token not in job.get("ends", ())]
            assert one.end.completion_tokens == len(wanted)
        assert engine.stats()["steps"] < 24 + 24  # together
    finally:
        engine.close()


@pytest.mark.parametrize("include", [False, True])
def test_what_ends_the_answer_stays_in_it(model: PreTrainedModel, runs: ModelEngine, include: bool) -> None:
    ids = random_ids(30)
    wanted = said(model, ids, eos_token_id=None)
    last = wanted.index(wanted[9]) + 1
    for job in ({"ends": frozenset([wanted[9]])}, {"stop": (f"{wanted[9]},",)}):
        told = run(runs, ids, include_stop=include, **job)
        assert words(told) == wanted[: last if include else last - 1]
        assert told.end.reason == "stop"


def test_stop_texts_do_not_end_too_short_an_answer(model: PreTrainedModel, runs: ModelEngine) -> None:
    ids = random_ids(30)
    wanted = said(model, ids, eos_token_id=None)
    stop = f"{wanted[4]},"
    later = [n for n, token in enumerate(wanted) if str(token).endswith(str(wanted[4])) and n >= 5]
    told = run(runs, ids, stop=(stop,), options={"min_tokens": 5})
    assert words(told)[:5] == wanted[:5]
    assert len(words(told)) == (later[0] if later else 24)
    assert words(run(runs, ids, stop=(stop,), options={"min_tokens": 4})) == wanted[:4]


@pytest.mark.daily
@pytest.mark.parametrize("number", [1, 2])
def test_a_stop_text_that_was_let_pass_does_not_stop_later(number: int) -> None:
    """What is held back, since a longer one may begin there, has a whole one in it, also at its end."""
    stream = TextStream(numbers(), stop=(f"{number},", "1,2,3,"))
    text = stream.push(1, may_stop=False) + stream.push(2, may_stop=False)
    assert text + stream.push(9) == "1,2,9,"
    assert not stream.stopped
    assert stream.push(10 + number) == "1"
    assert stream.stopped


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, {"ends": {2}, "include_stop": False, "skip_special_tokens": True}),
        ({"ignore_eos": True}, {"ends": set()}),
        ({"stop_token_ids": [7, 8]}, {"ends": {2, 7, 8}}),
        ({"stop_token_ids": [7], "ignore_eos": True}, {"ends": {7}}),
        ({"stop_token_ids": []}, {"ends": {2}}),
        ({"include_stop_str_in_output": True}, {"include_stop": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"skip_special_tokens": True}, {"skip_special_tokens": True}),
    ],
)
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_fields(at: Listening, engine: FakeEngine, route: str, change: dict[str, Any], wanted: dict[str, Any]) -> None:
    asked = _ask(at, engine, route, change)
    for name, value in wanted.items():
        assert getattr(asked, name) == value


def _ask(at: Listening, engine: FakeEngine, route: str, change: dict[str, Any]) -> Job:
    asked: dict[str, Any] = CHAT if route.startswith("chat") else {"prompt": "Who?"}
    response = at.http.post(f"/v1/{route}", json=asked | change)
    assert response.status_code == 200, response.text
    assert "x-kvboost-ignored" not in response.headers
    return engine.job


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", ("9", "max_tokens, 8")),
        ({"min_tokens": -1}, "min_tokens", ()),
        ({"stop_token_ids": [1472]}, "stop_token_ids", ("1472",)),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", ()),
        ({"stop_token_ids": list(range(1001))}, "stop_token_ids", ("1000",)),
        ({"logit_bias": [[1, 2, 3]]}, "logit_bias", ()),
        ({"logit_bias": [[1472, 2]]}, "logit_bias", ("1472",)),
    ],
)
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_refusals(at: Listening, route: str, change: dict[str, Any], param: str, told: tuple[str, ...]) -> None:
    asked: dict[str, Any] = CHAT if route.startswith("chat") else {"prompt": "Who?"}
    response = at.http.post(f"/v1/{route}", json=asked | change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert all(part in error["message"] for part in told)


def test_biases_as_pairs(at: Listening, engine: FakeEngine) -> None:
    asked = _ask(at, engine, "completions", {"logit_bias": [[5, 1.5], [6, False]]})
    assert asked.options.logit_bias == {5: 1.5, 6: -100.0}


MODEL = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("config", "asked", "wanted"),
    [
        ({}, {}, {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}),
        (MODEL, {}, MODEL),
        (MODEL, {"temperature": 0, "top_k": 0}, MODEL | {"temperature": 0, "top_k": 0}),
        (MODEL, {"top_k": -1}, MODEL | {"top_k": -1}),
        ({"top_k": 5}, {"top_p": 0}, {"temperature": 1, "top_p": 0, "top_k": 5}),
    ],
)
def test_defaults_of_the_model(tokenizer: Any, config: Any, asked: Any, wanted: Any) -> None:
    fake = FakeEngine("Anna.")
    sampling = SamplingDefaults.of(GenerationConfig(do_sample=True, **config))
    with listening(make_app(fake, tokenizer, ServerSettings(model_name="reader"), sampling=sampling)) as at:
        wanted |= {"top_k": 0} if wanted.get("top_k") == -1 else {}
        chat = {"messages": [{"role": "user", "content": "Who?"}]} | asked
        for path, body in (
            ("/v1/completions", {"prompt": "Who?"} | asked),
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/api/generate", {"model": "reader", "prompt": "Who?", "options": asked}),
        ):
            response = at.http.post(path, json=body)
            assert response.status_code == 200, response.text
            assert {name: getattr(fake.job.options, name) for name in wanted} == wanted
        shown = at.http.get("/v1/models/reader").json()["default_sampling"]
        assert shown == SamplingDefaults().body | config
        if "temperature" not in asked:
            told = at.http.post("/v1/responses", json={"input": "Who?"}).json()
            assert told["temperature"] == config.get("temperature", 1)
