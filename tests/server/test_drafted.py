"""Drafts for a text that runs alone: the answers stay what they are, and come with fewer passes of the model."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkStore, DraftTreeConfig, lookup_assistant
from kvboost_hf.assets import load_embedded, load_embedded_draft
from tests.architectures.models import make_architecture
from tests.conftest import make_model, random_ids
from tests.internals.assisted import Branches, TreeDraft
from tests.internals.server import AnswerDrafts, BatchKV, Finished, Job, Meter, ModelEngine, Progress, SamplingOptions
from tests.parity.test_assistants import noisy
from tests.server.test_worker import Told, numbers

# Of a size that does not depend on how long anything takes.
TREES = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=24)
CHAINS = DraftTreeConfig(policy="tree", depth=3, width=1, branching=1)

Make = Callable[..., ModelEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ModelEngine] = []

    def engine(model: PreTrainedModel, tokenizer: Any = None, **told: Any) -> ModelEngine:
        told = {"store": ChunkStore(model, chunk_size=16), "prefill_chunk_size": 64, **told}
        made.append(ModelEngine(model, tokenizer or numbers(), **told))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def job(length: int, *, seed: int = 0, count: int = 24, **options: Any) -> Job:
    ids = random_ids(length, length)[0].tolist()
    return Job(ids=ids, options=SamplingOptions(max_tokens=count, seed=seed, **options))


def answer(engine: ModelEngine, asked: Job) -> tuple[str, str, int, list[Any]]:
    """Text, reason of the end, tokens and their log probabilities."""
    told = Told()
    engine.submit(asked, told)
    found = [event for event in told.events if isinstance(event, Progress)] if told.end else []
    logprobs = [(each.token, [token for token, _ in each.top]) for event in found for each in event.logprobs]
    assert told.end.error is None
    return told.text, told.end.reason, told.end.completion_tokens, logprobs


@pytest.mark.parametrize(
    ("name", "trees"), [("llama", TREES), ("gemma2", CHAINS), ("mistral", TREES), ("gpt2", CHAINS)]
)
def test_greedy(name: str, trees: DraftTreeConfig, make: Make) -> None:
    model = make_model(name)
    plain, drafted = make(model), make(model, draft=noisy(make_model(name), 0.2), draft_trees=trees)
    for length in (1, 40, 40):  # the last one is in the store
        assert answer(drafted, job(length)) == answer(plain, job(length))
    figures = drafted.stats()["speculation"]
    assert 0 < figures["accepted"] <= figures["drafted"]
    assert drafted.stats()["steps"] < plain.stats()["steps"]
    assert figures["committed_per_round"] > 1
    assert plain.stats()["speculation"] == {}
    assert b'figure="speculation.accepted"' in Meter(drafted).page()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.5, "presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
        {"temperature": 0.5, "logit_bias": {7: 4.0, 8: -9.0}, "logprobs": 3},
        {"repetition_penalty": 1.2},
        {"logprobs": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_all_ways_to_choose(options: dict[str, Any], make: Make) -> None:
    """Each token is drawn by the same random number as without drafts."""
    model = make_model()
    plain, drafted = make(model), make(model, draft=make_model(), draft_trees=TREES)
    for seed in range(2):
        asked = job(30, seed=seed, **options)
        assert answer(drafted, asked) == answer(plain, asked)
    assert drafted.stats()["speculation"]["accepted"] > 0


def test_text_that_repeats_without_a_draft_model(make: Make) -> None:
    model = make_model()
    plain, drafted = make(model), make(model, draft=lookup_assistant(model))
    assert plain.stats()["speculation"] == {}
    repeating = Job(ids=random_ids(20, seed=1)[0].tolist() * 5, options=SamplingOptions(max_tokens=40, seed=0))
    for asked in (repeating, job(40), job(1), replace(job(30), options=replace(job(30).options, temperature=1.0))):
        assert answer(drafted, asked) == answer(plain, asked)
    assert drafted.stats()["speculation"]["drafted"] > 0


def test_the_salt_of_a_job_is_that_of_its_drafts(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    model, asked = make_model(), list[Any]()
    store = ChunkStore(model, chunk_size=16)
    continued = store.continued
    monkeypatch.setattr(store, "continued", lambda *a, **k: asked.append(k["salt"]) or continued(*a, **k))
    engine = make(model, store=store, draft=lookup_assistant(model))
    for salt in (b"one", b"two"):
        asked.clear()
        answer(engine, replace(job(40), salt=salt))
        assert set(asked) == {salt}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 9])
def test_lengths(count: int, make: Make) -> None:
    model = make_model()
    plain, drafted = make(model), make(model, draft=make_model(), draft_trees=TREES)
    found = answer(drafted, job(20, count=count))
    assert found == answer(plain, job(20, count=count))
    assert found[1:3] == ("length", count)


def test_ends_and_stop_texts_within_a_tree(make: Make) -> None:
    model = make_model()
    plain, drafted = make(model), make(model, draft=make_model(), draft_trees=TREES)
    words = answer(plain, job(20))[0].split(",")[:-1]
    for n in (2, 5, 7):
        for more in ({"ends": frozenset([int(words[n])])}, {"stop": (f"{words[n]},",)}):
            asked = replace(job(20), **more)
            found = answer(drafted, asked)
            assert found == answer(plain, asked)
            assert found[1] == "stop"
    # What is stored of an answer that ended within a tree serves the next one.
    longer = Job(ids=[*job(20).ids, *map(int, words)], options=SamplingOptions(max_tokens=8))
    assert answer(drafted, longer) == answer(plain, longer)


@pytest.mark.parametrize("shared", [False, True], ids=["others", "the same start"])
def test_others_come_and_go(shared: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """From rounds into the batch and back, several times."""
    ways: list[str] = []
    for kind, name, way in ((AnswerDrafts, "run", "round"), (BatchKV, "step", "batch"), (BatchKV, "check", "batch")):
        run = getattr(kind, name)

        def noting(self: Any, *args: Any, run: Any = run, way: str = way) -> Any:
            ways.append(way)
            return run(self, *args)

        monkeypatch.setattr(kind, name, noting)
    model = make_model()
    plain, drafted = make(model), make(model, draft=noisy(make_model(), 0.08), draft_trees=CHAINS)
    asked = job(50, count=60)
    starts = list(asked.ids[:40]) if shared else []
    others = [
        Job(ids=[*starts, *job(9 + n).ids], options=SamplingOptions(max_tokens=4, temperature=n % 2, seed=n))
        for n in range(4)
    ]
    wanted = [answer(plain, each) for each in (asked, *others)]
    ways.clear()
    told, said = [Told() for _ in others], [0]

    def at(event: Any) -> None:
        said[0] += 1
        if said[0] % 12 == 0 and not isinstance(event, Finished):
            drafted.submit(others[said[0] // 12 - 1], told[said[0] // 12 - 1])

    first = Told(at)
    drafted.submit(asked, first)
    assert first.text == wanted[0][0]
    assert [each.text for each in told] == [text for text, *_ in wanted[1:]]
    turns = [way for n, way in enumerate(ways) if not n or ways[n - 1] != way]
    assert turns[:8] == ["round", "batch"] * 4
    assert turns[8:] in ([], ["round"])
    again = Job(ids=[*asked.ids, *map(int, first.text.split(",")[:-1])], options=SamplingOptions(max_tokens=4))
    assert answer(drafted, again) == answer(plain, again)
    assert not drafted._decoding._batch.lengths
    figures = drafted.stats()["speculation"]
    assert 0 < figures["accepted"] < figures["drafted"]


def test_branches_that_are_kept_wrongly_would_be_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Branches.keep

    def shuffled(self: Branches, path: Any) -> None:
        self._kv = [pair and (pair[0].roll(1, 2), pair[1].roll(1, 2)) for pair in self._kv]
        keep(self, path)

    model = make_model()
    wanted = answer(make(model), job(30))
    monkeypatch.setattr(Branches, "keep", shuffled)
    assert answer(make(model, draft=make_model(), draft_trees=TREES), job(30)) != wanted


class _Even:
    """Allows even tokens only."""

    finished = False

    def allowed(self) -> torch.Tensor:
        return torch.arange(200) % 2 == 0

    def advance(self, token: int) -> None:
        assert token % 2 == 0


def test_no_drafts_for_constraints(make: Make) -> None:
    model = make_model()
    plain, drafted = make(model), make(model, draft=make_model(), draft_trees=TREES)
    asked = job(20, constraint=_Even())
    assert answer(drafted, asked) == answer(plain, asked)
    assert drafted.stats()["speculation"]["rounds"] == 0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("method", ["grow", "keep"])
def test_a_draft_that_fails_is_given_up(
    name: str, method: str, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a text, which goes on; and the next ones do without."""
    model, stock, calls = make_model(name), getattr(TreeDraft, method), [0]

    def fail(*given: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("no memory")
        return stock(*given, **more)

    monkeypatch.setattr(TreeDraft, method, fail)
    plain, drafted = make(model), make(model, draft=noisy(make_model(name), 0.2), draft_trees=CHAINS)
    for length in (20, 31):
        assert answer(drafted, job(length)) == answer(plain, job(length))
    assert calls[0] == 3
    assert 0 < drafted.stats()["speculation"]["rounds"] <= 3
    [record] = caplog.records
    assert "without drafts" in record.getMessage()
    assert record.exc_info
    assert "no memory" in str(record.exc_info[1])


def test_a_draft_that_fails_behind_the_last_token(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("out of luck")

    model = make_model()
    plain, drafted = make(model), make(model, draft=make_model(), draft_trees=TREES)
    monkeypatch.setattr(TreeDraft, "keep", fail)
    assert answer(drafted, job(20, count=3)) == answer(plain, job(20, count=3))


def test_a_model_that_fails_is_not_taken_for_its_draft(make: Make) -> None:
    model = make_model()
    engine = make(model, draft=make_model(), draft_trees=TREES)
    wanted, rounds = answer(engine, job(20)), engine.stats()["speculation"]["rounds"]
    told, calls = Told(), [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:  # after the prompt
            raise RuntimeError("out of luck")

    hook = model.model.layers[1].register_forward_hook(fail)
    engine.submit(job(21), told)
    assert told.end.error == "RuntimeError: out of luck"
    hook.remove()
    assert answer(engine, job(20)) == wanted
    assert engine.stats()["speculation"]["rounds"] > rounds


def test_the_embedded_pair(make: Make) -> None:
    (model, tokenizer), draft = load_embedded(), load_embedded_draft()
    plain, drafted = make(model, tokenizer), make(model, tokenizer, draft=draft)
    prompt = tokenizer.encode("Anna lives in Oslo. She plays the piano. Where does Anna live?")
    asked = Job(ids=prompt, options=SamplingOptions(max_tokens=24))
    assert answer(drafted, asked) == answer(plain, asked)
    assert drafted.stats()["speculation"]["rounds"] > 0


def test_what_does_not_fit_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="vocabulary of the model, of 200 tokens"):
        make(make_model(), draft=load_embedded_draft())
    with pytest.raises(ValueError, match="compute trees of tokens"):
        make(make_model(), draft=make_architecture("jamba"))


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_chains_over_states(name: str, make: Make) -> None:
    """The last prompt goes on from the answer before it, behind which states may lag."""
    model = make_model(name)
    stores = [ChunkStore(model, chunk_size=16) for _ in range(2)]
    plain = make(model, store=stores[0])
    drafted = make(model, store=stores[1], draft=noisy(make_model(name), 0.02), draft_trees=CHAINS)
    longer = job(40, count=33)
    more = replace(
        longer, ids=[*longer.ids, *(int(each) for each in answer(plain, longer)[0].split(",") if each), 7, 8]
    )
    for asked in (job(20), longer, more, job(30, temperature=0.8)):
        assert answer(drafted, asked) == answer(plain, asked)
    figures = drafted.stats()["speculation"]
    assert 0 < figures["accepted"] < figures["drafted"]
    assert stores[1].check_integrity().wrong == 0


def test_a_model_that_cannot_check_drafts_says_so_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    model = make_architecture("jamba")
    with caplog.at_level(logging.WARNING, "kvboost_hf.server"):
        engine = make(model, draft=make_model())
    ours = [record for record in caplog.records if record.name.startswith("kvboost_hf")]  # transformers has its own
    assert [record.getMessage().partition(":")[0] for record in ours] == ["No drafts"]
    assert answer(engine, job(20)) == answer(make(model), job(20))
    assert engine.stats()["speculation"] == {}


def test_a_text_that_the_draft_has_no_positions_for_does_not_end_drafting_for_others(make: Make) -> None:
    model, draft = make_model("gpt2"), make_model("gpt2")
    draft.config.max_position_embeddings = 64
    kept: Any = draft.base_model
    kept.wpe = torch.nn.Embedding.from_pretrained(kept.wpe.weight[:64].detach())
    plain, drafted = make(model), make(model, draft=draft, draft_trees=CHAINS)
    for length in (60, 20):
        rounds = drafted.stats()["speculation"]["rounds"]
        assert answer(drafted, job(length)) == answer(plain, job(length))
        assert (drafted.stats()["speculation"]["rounds"] > rounds) == (length == 20)
