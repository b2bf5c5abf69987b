"""Heads that read hidden states draft for requests that run alone: warm as cold, and alone again after others."""

import argparse
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from kvboost_hf import ChunkStore, DraftTreeConfig, KVQuantConfig, ReusePolicy, load_assistant, speculation_stats
from tests import eagle, gemma4
from tests.conftest import make_model, random_ids
from tests.heads import Pair, Rounds, make_blocks, watched
from tests.heads import make_pair as make_heads
from tests.internals.assisted import EagleHeads, LookupAssistant
from tests.internals.cli import add_options, load_draft
from tests.internals.server import (
    BatchKV,
    Finished,
    Job,
    Meter,
    ModelEngine,
    SamplingOptions,
    _kind_of_drafts,
    jobs,
    prompt_salt,
    task,
    worker,
)
from tests.mtp import make_target, save_with_layers, use_layers
from tests.parity.test_assistants import noisy
from tests.server.conftest import Serve
from tests.server.test_worker import Told, numbers

TREES = DraftTreeConfig(policy="tree")  # of a size that does not depend on how long anything takes
PROMPT = random_ids(120, seed=3)[0].tolist()
COUNT = 32

Make = Callable[..., ModelEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ModelEngine] = []

    def engine(model: PreTrainedModel, **told: Any) -> ModelEngine:
        told = {"store": ChunkStore(model, chunk_size=16), "prefill_chunk_size": 64, "draft_trees": TREES, **told}
        made.append(ModelEngine(model, numbers(), **told))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def job(ids: list[int] = PROMPT, count: int = COUNT, **options: Any) -> Job:
    return Job(ids=ids, options=SamplingOptions(max_tokens=count, seed=0, **options))


def run(engine: ModelEngine, asked: Job) -> tuple[Finished, dict[str, float]]:
    """The end of a job, and what it has added to the counts of drafts."""
    before, told = engine.stats()["speculation"], Told()
    engine.submit(asked, told)
    assert told.end.error is None
    after = engine.stats()["speculation"]
    return told.end, {name: after[name] - before[name] for name in before if name != "committed_per_round"}


def assert_right_in_a_batch(engine: ModelEngine, plain: ModelEngine) -> None:
    """A second answer joins one under way: both are those of an engine without drafts."""
    told, asked = [Told(), Told()], [job(count=64), job(PROMPT[:40], count=12)]
    engine.submit(asked[0], told[0])
    while len(told[0].events) < 2:
        time.sleep(0.001)
    engine.submit(asked[1], told[1])
    for listener, each in zip(told, asked, strict=True):
        assert listener.end.ids == run(plain, each)[0].ids


@pytest.fixture(params=["glm4_moe", "glm4_moe 2", "deepseek_v3", "mimo_v2_flash", "blocks", "blocks gemma2"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return make_heads(request.param, tmp_path)


def test_warm_is_as_cold(pair: Pair, make: Make) -> None:
    """The tokens of plain decoding, and the same drafts, as many accepted, from the same hidden states."""
    model, heads = pair
    plain, engine, seen = make(model), make(model, draft=heads), list[tuple[Rounds, dict[str, float]]]()
    for least in (0, len(PROMPT) - 2):
        wanted, _ = run(plain, job())
        with watched(heads) as rounds:
            end, counts = run(engine, job())
        assert end.ids == wanted.ids
        assert end.cached_tokens == wanted.cached_tokens >= least
        assert end.computed_tokens == wanted.computed_tokens
        seen.append((rounds, counts))
    (cold, counted), (warm, again) = seen
    warm.assert_like(cold)
    assert again == counted
    assert counted["rounds"] + counted["accepted"] + counted["plain"] == COUNT - 1
    assert 0 < counted["drafted"]
    assert counted["shared_tokens"] == 0
    stock = {"assistant_model": heads, "max_new_tokens": COUNT, "do_sample": False}
    with watched(heads) as rounds:
        model.generate(random_ids(120, seed=3), **stock)
    drafts = zip(rounds.drafts, warm.drafts, strict=False)  # at the end there is no room for all of them here
    assert all(ours == theirs[: len(ours)] for theirs, ours in drafts)


def test_tokens_of_these_heads_are_accepted(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    model = make_target("glm4_moe")
    use_layers(model, monkeypatch)
    heads = load_assistant(model)
    assert _kind_of_drafts(heads, None) == type(heads).__name__
    engine = make(model, draft=heads)
    counts = [run(engine, job(random_ids(40, seed=seed)[0].tolist()))[1] for seed in range(4)]
    assert 0 < sum(each["accepted"] for each in counts) < sum(each["drafted"] for each in counts)
    assert b'figure="speculation.shared_tokens"' in Meter(engine).page()


@pytest.mark.parametrize("options", [{"temperature": 0.8}, {"temperature": 1.0, "top_k": 5}, {"logprobs": 2}])
def test_ways_to_choose(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    model = make_target("glm4_moe", 2)
    use_layers(model, monkeypatch)
    plain, engine = make(model), make(model, draft=load_assistant(model))
    for _ in range(2):
        assert run(engine, job(**options))[0].ids == run(plain, job(**options))[0].ids


def test_alone_again_after_a_batch(pair: Pair, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """Tokens that were decoded together with others have their hidden states: heads go on, and the store has them."""
    model, heads = pair
    plain, engine = make(model), make(model, draft=heads)
    other = random_ids(50, seed=8)[0].tolist()
    wanted = [run(plain, asked)[0].ids for asked in (job(count=64), job(other, count=20))]
    rows, check = list[int](), BatchKV.check

    def noted(self: BatchKV, tokens: Any, again: Any = ()) -> Any:
        rows.append(len(tokens))
        return check(self, tokens, again)

    monkeypatch.setattr(BatchKV, "check", noted)
    for _ in range(2):
        rows.clear()
        told, late = Told(), Told()
        with watched(heads) as rounds:
            engine.submit(job(count=64), told)
            while len(told.events) < 2:  # it has begun alone
                time.sleep(0.001)
            engine.submit(job(other, count=20), late)
            assert [told.end.ids, late.end.ids] == wanted
        assert 2 in rows
    assert rounds.given
    text = [*PROMPT, *wanted[0]]
    end, counts = run(engine, job(text, count=8))
    same, _ = run(plain, job(text, count=8))
    assert (end.ids, end.computed_tokens) == (same.ids, same.computed_tokens)
    assert counts["drafted"] > 0
    assert engine.store.check_integrity().wrong == 0


def test_a_policy_that_keeps_logits_keeps_them_in_batches(make: Make) -> None:
    """As above, without drafts."""
    model, computed = make_model(), list[int]()
    for kept in (False, True):
        engine, told = make(model, policy=ReusePolicy(keep_logprobs=kept)), [Told(), Told()]
        for seed, each in enumerate(told):
            engine.submit(job(random_ids(30, seed=seed)[0].tolist(), count=40), each)
        text = [*random_ids(30, seed=0)[0].tolist(), *told[0].end.ids]
        assert told[1].end.error is None
        computed.append(run(engine, job(text, count=2))[0].computed_tokens)
    assert computed[0] == computed[1] < 16


def test_set_aside_and_resumed(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    for part in (jobs, task):
        monkeypatch.setattr(part, "FIRST_TOKENS", 64)
    monkeypatch.setattr(task, "_SPARE_TOKENS", 4)
    monkeypatch.setattr(worker, "MORE_TOKENS", 16)
    model = make_target("glm4_moe")
    use_layers(model, monkeypatch)
    plain, engine = make(model), make(model, draft=load_assistant(model), max_live_tokens=240)
    long = [job(random_ids(20, seed=seed)[0].tolist(), count=130) for seed in range(2)]
    told = [Told(), Told()]
    for each, listener in zip(long, told, strict=True):
        engine.submit(each, listener)
    assert [each.end.ids for each in told] == [run(plain, each)[0].ids for each in long]
    assert engine.stats()["set_aside"] > 0
    assert engine.stats()["speculation"]["rounds"] > 0


@pytest.mark.parametrize("how", [{"policy": ReusePolicy(mode="blend")}, {"live_quant": KVQuantConfig()}])
def test_where_no_hidden_states_are_kept(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_target("glm4_moe")
    use_layers(model, monkeypatch)
    with caplog.at_level(logging.WARNING, "kvboost_hf.server"):
        engine = make(model, draft=load_assistant(model), **how)
    assert sum("reads hidden states" in record.getMessage() for record in caplog.records) == 1
    assert run(engine, job())[0].ids == run(make(model, **how), job())[0].ids
    assert engine.stats()["speculation"] == {}


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_trees_of_heads(kind: str, make: Make, tmp_path: Path) -> None:
    """EAGLE-3: warm as cold, and alone again after a batch."""
    model = eagle.make_target(kind)
    heads = load_assistant(str(eagle.save_heads(tmp_path, eagle.weights_of(model))), target=model)
    sizes = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=20)
    plain, seen = make(model), list[tuple[Rounds, dict[str, float]]]()
    wanted, _ = run(plain, job())
    store = ChunkStore(model, chunk_size=16)
    for cached in (0, len(PROMPT) - 1):  # an engine each: what is drafted depends on what was accepted before
        engine = make(model, draft=heads, draft_trees=sizes, store=store)
        with watched(heads) as rounds:
            end, counts = run(engine, job())
        assert (end.ids, end.cached_tokens) == (wanted.ids, cached)
        seen.append((rounds, counts))
    seen[1][0].assert_like(seen[0][0])
    assert seen[1][1] == seen[0][1]
    assert 0 < seen[0][1]["accepted"] < seen[0][1]["drafted"]
    assert_right_in_a_batch(engine, plain)
    assert engine.stats()["speculation"]["accepted"] > seen[0][1]["accepted"]
    assert store.check_integrity().wrong == 0


@pytest.mark.parametrize("how", [{}, {"live_quant": KVQuantConfig()}, {"policy": ReusePolicy(mode="blend")}])
def test_an_assistant_that_reads_shared_kv(how: dict[str, Any], make: Make) -> None:
    """Gemma 4's: warm as cold, with no hidden states kept, so that it drafts where none can be, and after a batch."""
    model = gemma4.make_target()
    heads = load_assistant(gemma4.make_assistant(model), target=model)
    sizes = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=20)
    plain, seen = make(model, **how), list[dict[str, float]]()
    wanted, _ = run(plain, job())
    store = ChunkStore(model, chunk_size=16)
    for least in (0, len(PROMPT) - 16):
        engine = make(model, draft=heads, draft_trees=sizes, store=store, **how)
        end, counts = run(engine, job())
        assert end.ids == wanted.ids
        assert end.cached_tokens >= least
        seen.append(counts)
    assert seen[0] == seen[1]
    assert 0 < seen[0]["accepted"] < seen[0]["drafted"]
    assert not any(store.hidden_kinds)
    assert_right_in_a_batch(engine, plain)
    assert engine.stats()["speculation"]["accepted"] > seen[1]["accepted"]


def test_without_a_store_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """Somebody has closed it: nothing is known of what caches hold, and answers go on."""
    model = make_target("glm4_moe")
    use_layers(model, monkeypatch)
    plain, engine = make(model), make(model, draft=load_assistant(model))
    wanted = run(plain, job())[0].ids
    assert run(engine, job())[0].ids == wanted
    engine.store.close()
    end, counts = run(engine, job())
    assert end.ids == wanted
    assert counts["drafted"] == 0
    assert counts["plain"] == COUNT - 1


def test_flags_load_them(tmp_path: Path) -> None:
    """`mtp` and `auto` those of the checkpoint, `eagle:` and `dflash:` those of a folder."""

    def loaded(model: Any, flags: str) -> Any:
        parser = argparse.ArgumentParser()
        add_options(parser)
        return load_draft(parser.parse_args(flags.split(), argparse.Namespace(device="cpu")), model)

    target = eagle.make_target()
    folder = eagle.save_heads(tmp_path / "eagle", eagle.weights_of(target))
    assert isinstance(loaded(target, f"--speculative eagle:{folder}"), EagleHeads)
    llama = make_model("deep_llama")
    make_blocks(llama, [0, 1]).save_pretrained(tmp_path / "blocks")
    assert loaded(llama, f"--speculative dflash:{tmp_path / 'blocks'}").config.block_size == 4
    gemma = gemma4.make_target()
    gemma4.make_assistant(gemma).save_pretrained(tmp_path / "assistant")
    prepared = loaded(gemma, f"--speculative draft:{tmp_path / 'assistant'}")
    assert speculation_stats(prepared).rounds == 0
    own = save_with_layers("glm4_moe", tmp_path / "own")
    for flags in ("--speculative mtp", "--speculative auto"):
        assert isinstance(loaded(own, flags), MtpModel)
    for model, flags in ((llama, "--speculative auto"), (own, "--speculative auto --live-quant 4")):
        assert isinstance(loaded(model, flags), LookupAssistant)
    with pytest.raises(ValueError, match="needs a model with such layers: its configuration names no"):
        loaded(llama, "--speculative mtp")


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    model, other = make_target("glm4_moe"), make_target("glm4_moe")
    use_layers(model, monkeypatch)
    heads = load_assistant(model)
    with pytest.raises(ValueError, match="`keep_hidden_states` must not be False with heads"):
        make(model, draft=heads, policy=ReusePolicy(keep_hidden_states=False))
    with pytest.raises(ValueError, match="prepared for another model than this Glm4MoeForCausalLM"):
        make(other, draft=heads)


def test_over_http_with_a_client(monkeypatch: pytest.MonkeyPatch, make: Make, serve: Serve) -> None:
    model = make_target("glm4_moe")
    use_layers(model, monkeypatch)
    plain, engine = make(model), make(model, draft=load_assistant(model))
    answers, cached, counts = [], [], []
    for each, times in ((plain, 1), (engine, 3)):
        client = openai.OpenAI(base_url=f"{serve(each).url}/v1", api_key="key", max_retries=0)
        for _ in range(times):
            before = each.stats()["speculation"]
            found = client.completions.create(model="reader", prompt=PROMPT, max_tokens=COUNT, temperature=0, seed=0)
            answers.append(found.choices[0].text)
            details = found.usage.prompt_tokens_details if found.usage is not None else None
            cached.append(details.cached_tokens if details is not None else None)
            after = each.stats()["speculation"]
            counts.append({name: after[name] - before[name] for name in before if name != "committed_per_round"})
    assert len(set(answers)) == 1
    assert cached == [0, 0, len(PROMPT) - 1, len(PROMPT) - 1]
    assert counts[1] == counts[2] == counts[3]
    assert counts[1]["drafted"] > 0


@pytest.mark.parametrize("again", ["the same", "the same, serving", "other heads", "no heads"])
def test_a_session_that_is_dropped_after_a_restart_leaves_nothing_of_heads(
    again: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Make
) -> None:
    """Whatever the new engine drafts with, and whether it has served anybody; what other sessions have stays."""
    model = make_target("glm4_moe")
    use_layers(model, monkeypatch)
    heads, salts = load_assistant(model), {name: prompt_salt("", None, name) for name in "ab"}

    def started(**told: Any) -> ModelEngine:
        store = ChunkStore(model, chunk_size=16, tiers=[f"disk:{tmp_path}:100MB"])
        return make(model, store=store, policy=ReusePolicy(keep_hidden_states=-1), **told)

    def stored(engine: ModelEngine) -> int:
        engine.store.flush()
        return sum(1 for file in tmp_path.rglob("*.safetensors"))

    engine = started(draft=heads)
    for salt in salts.values():
        run(engine, replace(job(), salt=salt))
    both = stored(engine)
    engine.close()
    engine.store.close()
    if again == "other heads":
        with torch.no_grad():
            next(heads.parameters()).mul_(2)
    engine = started(**{} if again == "no heads" else {"draft": heads})
    if again == "the same, serving":
        run(engine, replace(job(), salt=salts["b"]))
    held = stored(engine)  # serving again may store what there was no time for: measured times say when heads draft
    assert engine.drop_session(b"", "a", salts["a"]) is not None
    assert stored(engine) == held - both / 2
    assert engine.drop_session(b"", "b", salts["b"]) is not None
    assert stored(engine) == 0
    engine.store.close()


def test_a_warm_prompt_costs_heads_its_new_columns(pair: Pair, make: Make) -> None:
    """Their K/V is kept with the prompt, and goes with the session."""
    model, heads = pair
    plain, engine, stats = make(model), make(model, draft=heads), speculation_stats(heads)
    wanted, computed = run(plain, job())[0].ids, []
    for _ in range(2):
        before = stats.text_computed
        assert run(engine, job())[0].ids == wanted
        computed.append(stats.text_computed - before)
    assert computed[0] == len(PROMPT)
    assert computed[1] <= 2
    (session,) = engine.sessions(b"", None)
    assert engine.drop_session(b"", session.id, b"") is not None
    assert engine.store.stats()["chunks"] == 0
    before = stats.text_computed
    assert run(engine, job())[0].ids == wanted
    assert stats.text_computed - before == len(PROMPT)


@pytest.mark.parametrize("kind", ["glm4_moe 2", "eagle gemma2", "gemma4 text", "gemma4 shares", "blocks", "a model"])
def test_rows_of_a_batch(kind: str, make: Make, tmp_path: Path) -> None:
    """Requests of unequal lengths and ends: the tokens of plain decoding, cold and warm, in fewer steps."""
    model, draft = (make_model(), noisy(make_model(), 0.05)) if kind == "a model" else make_heads(kind, tmp_path)
    asked = [job(random_ids(n, seed=i)[0].tolist(), count=20 + 3 * i) for i, n in enumerate((30, 7, 60, 1, 25, 11))]
    plain = make(model)
    sizes = DraftTreeConfig(policy="tree", depth=4, max_nodes=4)
    engine, wanted, stats = make(model, draft=draft, draft_trees=sizes), together(plain, asked), list[Any]()
    for _ in range(2):
        assert together(engine, asked) == wanted
        stats.append(engine.stats())
    assert stats[0]["speculation"]["shared_tokens"] < 12
    if kind != "blocks":  # which are never right
        assert stats[0]["speculation"]["accepted"] > 20
        assert stats[1]["steps"] < 1.8 * plain.stats()["steps"]
    engine.store.check_consistency()
    assert engine.store.check_integrity().wrong == 0


def together(engine: ModelEngine, asked: list[Job]) -> list[list[int]]:
    """The answers to jobs that run at the same time."""
    told = [Told() for _ in asked]
    for each, listener in zip(asked, told, strict=True):
        engine.submit(each, listener)
    assert [listener.end.error for listener in told] == [None] * len(told)
    return [listener.end.ids for listener in told]


def test_heads_that_fail_in_a_batch(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go on without drafts, and the log says it once."""
    model, heads = make_heads("glm4_moe", tmp_path)
    asked = [job(random_ids(n, seed=i)[0].tolist()) for i, n in enumerate((30, 7, 60))]
    wanted, engine, forward, left = together(make(model), asked), make(model, draft=heads), heads.forward, [5]

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(heads, "forward", failing)
    assert together(engine, asked) == wanted
    assert -4 < left[0] < 0  # for the rows of one step
    assert engine.stats()["speculation"]["shared_tokens"] > 0
