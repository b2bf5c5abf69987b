"""Looked-up drafts for several answers at once: they stay what they are, and come with fewer steps."""

import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from kvboost_hf import ChunkStore, DraftTreeConfig, ReusePolicy, lookup_assistant
from tests.conftest import make_model, random_ids
from tests.internals.assisted import Tree
from tests.internals.server import BatchKV, Job, ModelEngine, Progress, RowDrafts, SamplingOptions
from tests.server.test_worker import Told, numbers

ALL = DraftTreeConfig(policy="tree", max_nodes=12)  # whatever passes take

Make = Callable[..., ModelEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ModelEngine] = []

    def engine(model: PreTrainedModel, **told: Any) -> ModelEngine:
        told = {"store": ChunkStore(model, chunk_size=16), "prefill_chunk_size": 64, **told}
        made.append(ModelEngine(model, numbers(), **told))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def jobs(seed: int, count: int = 5, **options: Any) -> list[Job]:
    """Prompts that repeat themselves, and others; of unequal lengths, with ends at different times."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        ids = random_ids(chance.choice([1, 5, 17]), 10 * seed + number)[0].tolist() * chance.choice([1, 3, 5])
        asked = SamplingOptions(max_tokens=chance.choice([1, 7, 24, 40]), seed=number, **options)
        found.append(Job(ids=ids, options=asked, salt=chance.choice([b"", b"one"])))
    return found


def answers(engine: ModelEngine, asked: list[Job]) -> list[tuple[Any, ...]]:
    """Text, reason of the end, tokens and log probabilities of jobs that run at the same time."""
    told = [Told() for _ in asked]
    for each, job in zip(told, asked, strict=True):
        engine.submit(job, each)
    found = []
    for each in told:
        assert each.end.error is None
        shown = [event for event in each.events if isinstance(event, Progress)]
        logprobs = [(one.token, [token for token, _ in one.top]) for event in shown for one in event.logprobs]
        found.append((each.text, each.end.reason, each.end.completion_tokens, logprobs))
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt2", "deepseek_v3"])
def test_greedy(name: str, make: Make) -> None:
    model = make_model(name)
    plain = make(model)
    drafted = make(model, draft=lookup_assistant(model), draft_trees=ALL)
    for seed in range(4):
        asked = jobs(seed)
        assert answers(drafted, asked) == answers(plain, asked)
        drafted.store.check_consistency()
    assert drafted.stats()["speculation"]["accepted"] > 0
    assert drafted.stats()["steps"] < plain.stats()["steps"]
    assert len(drafted.store) == len(plain.store)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 0.5, "repetition_penalty": 1.3, "top_k": 20}, {"logprobs": 2}],
    ids=lambda options: "-".join(options),
)
def test_all_ways_to_choose(options: dict[str, Any], make: Make) -> None:
    """Each token is drawn by the same random number as without drafts."""
    model = make_model()
    plain, drafted = make(model), make(model, draft=lookup_assistant(model), draft_trees=ALL)
    for seed in range(3):
        asked = jobs(seed, **options)
        assert answers(drafted, asked) == answers(plain, asked)


def test_kv_is_that_of_plain_decoding(make: Make) -> None:
    """What a step has left in the store serves the next prompt: its answer is the plain one."""
    model = make_model()
    drafted = make(model, draft=lookup_assistant(model), draft_trees=ALL)
    told = [Told() for _ in range(4)]
    first = [
        Job(ids=random_ids(20, seed)[0].tolist() * 2, options=SamplingOptions(max_tokens=40)) for seed in range(4)
    ]
    for each, job in zip(told, first, strict=True):
        drafted.submit(job, each)
    texts = [[int(number) for number in each.text.split(",") if number] if each.end else [] for each in told]
    again = [
        Job(ids=[*job.ids, *text], options=SamplingOptions(max_tokens=16))
        for job, text in zip(first, texts, strict=True)
    ]
    before = drafted.stats()["cached_tokens"]
    assert answers(drafted, again) == answers(make(model), again)
    assert drafted.stats()["cached_tokens"] - before > 4 * 60


def test_chains_leave_room_for_a_token_of_the_model(make: Make) -> None:
    drafted, ids = make(make_model(), draft=make_model(), draft_trees=ALL), [5, 6, 7] * 20
    for most, some in ((2, False), (9, True)):
        answers(drafted, [Job(ids=ids, options=SamplingOptions(max_tokens=most)) for _ in range(2)])
        assert (drafted.stats()["speculation"]["drafted"] > 0) == some


def test_hidden_states_go_along(make: Make) -> None:
    model = make_model()
    policy = ReusePolicy(keep_hidden_states=-1)
    drafted = make(model, draft=lookup_assistant(model), draft_trees=ALL, policy=policy)
    asked = jobs(3)
    assert answers(drafted, asked) == answers(make(model), asked)
    drafted.store.check_consistency()


def test_drafts_that_save_nothing_are_not_checked(make: Make) -> None:
    """By measured times, of a model that takes as long for two tokens as for two steps; so in the default policy."""
    model = make_model()
    plain, drafted = make(model), make(model, draft=lookup_assistant(model))
    for seed in range(3):
        asked = jobs(seed)
        assert answers(drafted, asked) == answers(plain, asked)


def test_rows_keep_what_they_accept() -> None:
    """`BatchKV` by itself: rows of unequal acceptance end at one column again, and go on as if alone."""
    model = make_model()
    batch, texts = BatchKV(model), [random_ids(n, n)[0].tolist() for n in (3, 20, 9)]
    for text in texts:
        batch.join([(k, v) for k, v in kv_of(model, text[:-1])], text[:-1])
    assert batch.can_check
    for counts in ([1, 4, 2], [4, 1, 1], [2, 2, 2], [1, 1, 3]):
        more = [random_ids(3, 7 * len(text))[0].tolist() for text in texts]
        found = batch.check([[text[-1], *new] for text, new in zip(texts, more, strict=True)])
        for row, (text, new) in enumerate(zip(texts, more, strict=True)):
            wanted = model(make_ids([*text, *new])).logits[0, -4:]
            assert (found[row] - wanted).abs().max() < 1e-4
            text += [*new[: counts[row] - 1], int(wanted[counts[row] - 1].argmax())]
        batch.keep(counts, 4)
        assert batch.lengths == [len(text) - 1 for text in texts]
    batch.leave(0)


def make_ids(ids: list[int]) -> Any:
    return random_ids(1).new_tensor([ids])


def kv_of(model: PreTrainedModel, ids: list[int]) -> list[tuple[Any, Any]]:
    """K/V of a text, of each layer."""
    cache = model(make_ids(ids), use_cache=True).past_key_values
    return [(layer.keys.detach(), layer.values.detach()) for layer in cache.layers]


def test_rows_that_share_prefixes(make: Make) -> None:
    """Their K/V is read where it lies, also by passes with drafts."""
    model = make_model()
    model.set_attn_implementation("kvboost_fa2")
    plain, drafted = make(model), make(model, draft=lookup_assistant(model), draft_trees=ALL)
    head, steps = random_ids(100, seed=77)[0].tolist(), list[int]()
    asked = [
        Job(ids=[*head, *job.ids] if number % 2 else job.ids, options=job.options, salt=job.salt)
        for number, job in enumerate(jobs(3, count=8))
    ]
    wanted = answers(plain, asked)
    for _ in range(2):
        assert answers(drafted, asked) == wanted
        steps.append(drafted.stats()["steps"])
    assert steps[1] - steps[0] < 0.7 * plain.stats()["steps"]
    assert drafted.stats()["speculation"]["accepted"] > 30
    drafted.store.check_consistency()


def test_answers_with_most_to_take_in_are_not_drafted_for() -> None:
    """As many as passes leave time for are, those with least to take in first."""
    asked: list[int] = []

    class Text:
        def __init__(self, behind: int) -> None:
            self._behind = behind

        def cost(self, said: int) -> tuple[float, int]:
            return 0.1, self._behind

        def chain(self, ids: Sequence[int], show: Any) -> Tree:
            asked.append(self._behind)
            tree = Tree()
            tree.add(7)
            return tree

    account = SimpleNamespace(may_draft=lambda costs: len(costs) <= 2, columns=lambda chains, held: 1)
    rounds = SimpleNamespace(clock=lambda: 0.0)
    drafts: Any = SimpleNamespace(account=lambda rows: account, rounds=rounds, config=DraftTreeConfig())
    texts: Any = [Text(30), Text(10), None, Text(20)]
    made = RowDrafts(drafts, texts, lambda place, states: None).draft([[1]] * 4)
    assert asked == [10, 20]
    assert [len(tree) for tree in made] == [0, 1, 0, 1]
