"""The repair that rides along with the steps of a batch: rows become exact while they are decoded."""

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ReusePolicy, lookup_assistant
from tests.architectures.models import make_architecture
from tests.conftest import counted, make_model, random_ids
from tests.internals.cache import binding, costs, idle
from tests.internals.compat import LAST, hook_hidden_states
from tests.internals.server import BatchKV, Job, ModelEngine, Progress, SamplingOptions, _BatchLayer, choose_attention
from tests.parity.test_blend import prompt
from tests.server.test_drafted_rows import ALL
from tests.server.test_sessions import ask, engine_of
from tests.server.test_worker import Told, numbers

NEW = 14


@pytest.fixture(scope="module")
def reader() -> tuple[PreTrainedModel, Any]:
    return make_model("llama"), numbers()


@pytest.fixture(autouse=True)
def no_idle_repair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "repaired_when_idle" not in request.fixturenames:
        monkeypatch.setattr(idle.Idle, "begin", lambda *given: None)


ORDERS = ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 0, 2], [1, 3, 2, 0], [1, 0, 3, 2])


def prompts(count: int) -> list[list[int]]:
    """Documents in other orders each; the first prompt is stored by the tests."""
    return [prompt(order)[0].tolist() for order in ORDERS[:count]]


def riding(columns: Any) -> ReusePolicy:
    return ReusePolicy(mode="blend", repair="none", progressive=columns)


def windowed(window: int = 200) -> PreTrainedModel:
    """A model whose layers show a token the columns of a window up to its own, of prompts that are longer."""
    model: PreTrainedModel = make_model("mistral")
    model.config.sliding_window = window
    return model


def logprobs(told: Told) -> list[float]:
    assert told.end.error is None
    return [one.logprob for event in told.events if isinstance(event, Progress) for one in event.logprobs]


def submitted(engine: ModelEngine, asked: list[list[int]], new: int = NEW, **more: Any) -> list[Told]:
    """All at once: each waits until the last one is there."""
    told = [Told() for _ in asked]
    options = SamplingOptions(max_tokens=new, min_tokens=new, logprobs=0)
    for ids, one in zip(asked, told, strict=True):
        engine.submit(Job(ids=ids, options=options, **more), one)
    return told


def expected(reader: tuple[PreTrainedModel, Any], ids: list[int], said: Sequence[int]) -> list[float]:
    """Log probabilities of an answer in one plain forward over all."""
    with torch.no_grad():
        logits = reader[0](torch.tensor([[*ids, *said]])).logits[0, len(ids) - 1 : -1]
    return [float(row.log_softmax(-1)[token]) for row, token in zip(logits, said, strict=True)]


def off(reader: tuple[PreTrainedModel, Any], ids: list[int], told: Told) -> list[float]:
    found = logprobs(told)
    return [abs(a - b) for a, b in zip(found, expected(reader, ids, told.end.ids), strict=True)]


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("columns", [100, 400, "ride", True])
def test_rows_of_a_batch_become_exact_while_they_are_decoded(
    reader: tuple[PreTrainedModel, Any], columns: Any, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no more forwards than without, also with candidates to verify. What is stored, and a row beside, is exact."""
    monkeypatch.setattr(costs, "weights_come_and_go", lambda model: True)
    monkeypatch.setattr(costs, "_seconds_of_forward", lambda model, tokens: 1.0)
    first, *asked = prompts(5)
    more: dict[str, Any] = {"draft": lookup_assistant(reader[0]), "draft_trees": ALL} if drafted else {}
    with engine_of(*reader, policy=riding(columns), max_batch_size=8, batch_window_ms=300, **more) as engine:
        assert not engine._runner.in_place
        ask(engine, first, 1)
        steps = engine.stats()["steps"]
        exact = Told()
        options = SamplingOptions(max_tokens=NEW, min_tokens=NEW, logprobs=0)
        engine.submit(Job(ids=asked[-1], options=options, reuse="exact"), exact)
        told = submitted(engine, asked[:-1])
        assert max(off(reader, asked[-1], exact)) < 1e-4
        for ids, one in zip(asked, told, strict=False):
            assert one.end.moved_tokens > 150
            away = off(reader, ids, one)
            assert away[0] > 1e-3  # or nothing was moved
            assert max(away[1 if columns in (400, True) else 8 :]) < 1e-4
            assert one.end.repaired_tokens > 150
        assert engine.stats()["steps"] - steps <= NEW + 4  # they begin one after the other
        seen = ChunkReuseCache(reader[0], engine.store)
        assert [seen.stored_tokens(torch.tensor([ids])) >= len(ids) - 16 for ids in asked] == [True] * 4
        assert not engine.store.check_integrity().wrong
        assert not drafted or engine.stats()["speculation"]["drafted"] > 0


def test_what_is_not_written_back_is_noticed(
    reader: tuple[PreTrainedModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above could fail."""

    def forget(layer: Any, columns: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        for buffer, states in zip(layer.buffers, (keys, values), strict=True):
            buffer[: layer.rows, :, layer.stop : layer.stop + 1].copy_(states[:, :, -1:])
        return tuple(buffer[: layer.rows, :, : layer.stop + 1] for buffer in layer.buffers)

    monkeypatch.setattr(_BatchLayer, "scatter", forget)
    first, *asked = prompts(4)
    with engine_of(*reader, policy=riding(400), batch_window_ms=300) as engine:
        ask(engine, first, 1)
        told = submitted(engine, asked)
        assert max(max(off(reader, ids, one)[8:]) for ids, one in zip(asked, told, strict=True)) > 1e-3
        assert engine.store.check_integrity().wrong


@pytest.mark.parametrize("ends", ["length", "cancelled", "error"])
def test_an_answer_that_ends_before_leaves_the_rest_tainted(
    reader: tuple[PreTrainedModel, Any], ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the steps have done counts, unless one of them has failed."""
    first, *asked = prompts(4)
    with engine_of(*reader, policy=riding(20), batch_window_ms=300) as engine:
        ask(engine, first, 1)
        if ends == "error":
            scatter = _BatchLayer.scatter
            calls: list[int] = []

            def fail(*given: Any) -> Any:
                calls.append(1)
                if len(calls) == 9:
                    raise RuntimeError("out of luck")
                return scatter(*given)

            monkeypatch.setattr(_BatchLayer, "scatter", fail)
            told = submitted(engine, asked)
            assert all("out of luck" in str(one.end.error) for one in told)
        elif ends == "cancelled":
            told = [Told() for _ in asked]
            options = SamplingOptions(max_tokens=200, min_tokens=200)
            tickets = [engine.submit(Job(ids=ids, options=options), one) for ids, one in zip(asked, told, strict=True)]
            while engine.stats()["steps"] < 4:
                time.sleep(0.001)
            for ticket in tickets:
                ticket.cancel()
            assert all(one.end.reason == "cancelled" for one in told)
        else:
            told = submitted(engine, asked, 4)
            assert all(0 < one.end.repaired_tokens < 80 for one in told)
        seen = ChunkReuseCache(reader[0], engine.store)
        assert all(seen.stored_tokens(torch.tensor([ids])) < len(ids) - 100 for ids in asked)
        assert not engine.store.check_integrity().wrong
        for ids in asked:
            found, _ = ask(engine, ids, 4, reuse="exact")
            assert found.moved_tokens == 0


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("kind", ["in place", "windows"])
def test_rows_beside_k_v_in_place_and_rows_with_windows_ride(kind: str, drafted: bool) -> None:
    """Rows that become exact are copied; a row that shares K/V in place is exact beside them."""
    model = windowed() if kind == "windows" else make_model("llama")
    if kind == "in place":
        choose_attention(model)
    found: tuple[PreTrainedModel, Any] = model, numbers()
    first, *asked = prompts(5)
    more: dict[str, Any] = {"draft": lookup_assistant(model), "draft_trees": ALL} if drafted else {}
    with engine_of(*found, policy=riding(100), max_batch_size=8, batch_window_ms=300, **more) as engine:
        assert engine._runner.in_place == (kind == "in place")
        ask(engine, first, 1)
        steps = engine.stats()["steps"]
        exact = submitted(engine, [asked[-1], asked[-1]], reuse="exact")
        told = submitted(engine, asked[:-1])
        assert all(max(off(found, asked[-1], one)) < 1e-4 for one in exact)
        for ids, one in zip(asked, told, strict=False):
            away = off(found, ids, one)
            assert away[0] > 1e-3  # or nothing was moved
            assert max(away[8:]) < 1e-4
            assert one.end.repaired_tokens > 150
        assert engine.stats()["steps"] - steps <= NEW + 6
        assert not engine.store.check_integrity().wrong


@pytest.mark.daily
@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_hidden_states_that_other_rows_keep_are_those_of_their_new_tokens(in_place: bool) -> None:
    """Row 0 has the K/V of other tokens at first, and is exact at last; rows of other lengths keep theirs."""
    model = make_model("llama")
    hook_hidden_states(model)
    model.set_attn_implementation("kvboost_fa2" if in_place else "sdpa")
    batch, texts = BatchKV(model, in_place=in_place), [random_ids(n, n)[0].tolist() for n in (90, 120, 70)]
    for row, text in enumerate(texts):
        cache = DynamicCache(config=model.config)
        model(random_ids(90, 1) if not row else torch.tensor([text]), past_key_values=cache)
        kv = [(layer.keys, layer.values) for layer in cache.layers]
        batch.join(kv, text, row, hidden=(1, LAST) if row else (), rides=not row)
    for step in range(4):
        assert batch.can_ride
        at, new = 25 * step, [7 + step + row for row in range(3)]
        logits = batch.step(new, [(at, texts[0][at : at + 25]), (120, ()), (70, ())])
        texts = [[*text, token] for text, token in zip(texts, new, strict=True)]
    for row, text in enumerate(texts):
        plain = model(torch.tensor([text]), output_hidden_states=True)
        torch.testing.assert_close(logits[row], plain.logits[0, -1], atol=1e-4, rtol=1e-4)
        if row:
            kept = batch.read_hidden(row, 4)
            torch.testing.assert_close(kept[1], plain.hidden_states[1][:, -4:], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(kept[LAST], plain.hidden_states[-1][:, -4:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stored", [True, False])
def test_windows_that_would_let_go_of_columns_while_a_row_rides(stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of rows keep these until their steps were offered to the store; where nothing can be, they let go."""
    model = windowed(41)
    first, *asked = prompts(4)
    with engine_of(model, numbers(), policy=riding(10), batch_window_ms=300) as engine:
        ask(engine, first, 1)
        if not stored:
            monkeypatch.setattr(binding.StoreWriter, "_may_store", lambda writer, ledger, **given: False)
        told = submitted(engine, asked, 70)
        for ids, one in zip(asked, told, strict=True):
            assert max(off((model, None), ids, one)[35:]) < 1e-4  # exact in the batch
        seen = ChunkReuseCache(model, engine.store)
        assert all((seen.stored_tokens(torch.tensor([ids])) > len(ids) - 16) == stored for ids in asked)
        assert not engine.store.check_integrity().wrong
        again = submitted(engine, asked, 4, reuse="exact")
        assert all(max(off((model, None), ids, one)) < 1e-4 for ids, one in zip(asked, again, strict=True))


def test_a_window_that_is_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above could fail."""
    model = windowed()
    monkeypatch.setattr(_BatchLayer, "window", property(lambda layer: 0, lambda layer, window: None), raising=False)
    first, *asked = prompts(4)
    with engine_of(model, numbers(), policy=riding(100), batch_window_ms=300) as engine:
        ask(engine, first, 1)
        told = submitted(engine, asked)
        assert max(max(off((model, None), ids, one)[8:]) for ids, one in zip(asked, told, strict=True)) > 1e-3


@pytest.fixture
def repaired_when_idle() -> None:
    """In place of `no_idle_repair`."""


@pytest.mark.parametrize("seed", range(3))
def test_jobs_that_come_and_go(reader: tuple[PreTrainedModel, Any], seed: int, repaired_when_idle: None) -> None:
    """With moved K/V and without, cancelled or not, while idle repairs begin and end: exact answers are plain ones."""
    chance = random.Random(seed)
    asked = prompts(5)
    with engine_of(*reader, policy=riding(chance.choice([7, 40, 300])), max_batch_size=4) as engine:
        ask(engine, asked[0], 1)
        jobs = []
        for _ in range(16):
            ids = [*chance.choice(asked)[: chance.choice([297, 250])], chance.randrange(2, 200)]
            new, told = chance.randrange(1, 12), Told()
            options = SamplingOptions(max_tokens=new, min_tokens=new, logprobs=0)
            exact = chance.random() < 0.4
            ticket = engine.submit(Job(ids=ids, options=options, reuse="exact" if exact else None), told)
            jobs.append((ids, exact, told))
            if chance.random() < 0.2:
                ticket.cancel()
            if chance.random() < 0.3:
                assert told.end.error is None
        for ids, exact, told in jobs:
            assert told.end.error is None
            if exact and told.end.ids:
                assert max(off(reader, ids, told)) < 1e-4
        assert not engine.store.check_integrity().wrong


def test_rows_that_have_nothing_moved_take_nothing_along(reader: tuple[PreTrainedModel, Any]) -> None:
    asked = prompts(4)[1:]
    with engine_of(*reader, policy=riding(100), batch_window_ms=300) as engine, counted(reader[0]) as work:
        told = submitted(engine, asked, reuse="exact")
        assert all(one.end.repaired_tokens == 0 for one in told)
        assert work.tokens <= sum(map(len, asked)) + 3 * NEW


@pytest.mark.parametrize("shares", [False, True])
def test_an_answer_says_why_nothing_rides(shares: bool) -> None:
    """Of each row: those of a batch whose layers share K/V, those that wait on a CPU, and those that ride."""
    model = make_architecture("gemma3n_text") if shares else make_model("llama")
    first, *asked = prompts(3)
    with engine_of(model, numbers(), policy=riding(100), batch_window_ms=300) as engine:
        ask(engine, first, 1)
        told = [one.end for one in submitted(engine, asked)]
        exact = [one.end for one in submitted(engine, asked, reuse="exact")]
    with engine_of(model, numbers(), policy=riding("ride"), batch_window_ms=300) as engine:
        ask(engine, first, 1)
        waits = ask(engine, asked[0])[0]
    assert [end.moved_tokens > 150 for end in (*told, waits)] == [True] * 3
    found = [end.reasons.get("riding_reason") for end in told]
    assert found == ["in a batch of the server, layers that share K/V take no repair along" if shares else None] * 2
    assert waits.reasons["riding_reason"].startswith("on a CPU")
    assert not any(end.reasons for end in exact)
