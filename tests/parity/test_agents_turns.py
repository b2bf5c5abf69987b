"""Agents edit their prompts between two turns: answers are plain once repaired, and what is stored is exact."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy
from kvboost_hf.assets import load_embedded
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.cache import Chunker, FixedChunker, MovedColumns, idle_of
from tests.parity.test_blend import assert_same, generate
from tests.parity.test_repair_later import Halted

RULES, STUB = random_ids(60, seed=1), random_ids(5, seed=2)
RESULTS = [random_ids(110 + 7 * at, seed=10 + at) for at in range(6)]
ASKED = [random_ids(12, seed=30 + at) for at in range(5)]
FACES = (
    "The fox says \N{FOX FACE}. ",
    "The fox says \N{BUTTERFLY}. ",
    "The fox says \N{FOX FACE}\N{VARIATION SELECTOR-16}. ",
)


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def dated() -> Iterator[torch.Tensor]:
    """Another date in the system prompt in each turn, as long as before or not."""
    for turn in range(4):
        date = random_ids(6 + turn % 2, seed=50 + turn)
        yield joined(RULES[:, :20], date, RULES[:, 20:], *RESULTS[: 2 + turn], ASKED[turn])


def truncated() -> Iterator[torch.Tensor]:
    """Results of which more and more of the middle is left out."""
    for turn in range(4):
        keep = 55 - 13 * turn
        cut = [joined(each[:, :keep], STUB, each[:, -keep:]) for each in RESULTS[:4]] if turn else RESULTS[:4]
        yield joined(RULES, *cut, ASKED[turn])


def reordered() -> Iterator[torch.Tensor]:
    for turn, order in enumerate([(0, 1, 2, 3), (3, 1, 0, 2), (0, 1, 2, 3), (1, 0, 3, 2)]):
        yield joined(RULES, *(RESULTS[at] for at in order), ASKED[turn])


def summarized() -> Iterator[torch.Tensor]:
    """A summary in place of the first half, then another in place of that and of more; then the first text again."""
    yield joined(RULES, *RESULTS[:4], ASKED[0])
    yield joined(RULES, random_ids(23, seed=60), *RESULTS[2:5], ASKED[1])
    yield joined(RULES, random_ids(31, seed=61), *RESULTS[4:6], ASKED[2])
    yield joined(RULES, *RESULTS[:4], ASKED[0])


def doubled() -> Iterator[torch.Tensor]:
    """A document twice in one prompt, at once or around another one, and then once."""
    first, other = RESULTS[:2]
    for turn, texts in enumerate(
        [(first, other), (first, first), (first, other, first), (other, first, first, first)]
    ):
        yield joined(RULES, *texts, ASKED[turn])


def repeated() -> Iterator[torch.Tensor]:
    """One line again and again, each time once more, behind another date."""
    for turn in range(4):
        yield joined(random_ids(18, seed=70 + turn), *[RESULTS[0][:, :9]] * (20 + turn), ASKED[turn])


def undone() -> Iterator[torch.Tensor]:
    """An edit of an edit, and back again."""
    text = joined(*RESULTS[:4])
    once = joined(text[:, :100], STUB, text[:, 150:])
    for turn, each in enumerate([text, once, joined(once[:, :90], once[:, 120:]), once, text]):
        yield joined(RULES, each, ASKED[turn])


def split() -> Iterator[torch.Tensor]:
    """A character of several bytes becomes another one that shares some of its tokens."""
    _, tokenizer = load_embedded()
    for turn in range(4):
        text = "".join(FACES[(turn + at) % 3] + "It stands in the hall. It belongs to Tom. " * 2 for at in range(8))
        yield tokenizer(text + "Where is it?", return_tensors="pt").input_ids


TURNS = {
    "dated": dated,
    "truncated": truncated,
    "reordered": reordered,
    "summarized": summarized,
    "doubled": doubled,
    "repeated": repeated,
    "undone": undone,
    "split": split,
}
# What a policy promises: all is exact before the second token, along with tokens and when idle, on demand, or at once.
POLICIES: dict[str, tuple[Chunker, dict[str, Any]]] = {
    "before the second token": (FixedChunker(64), {"repair": "none", "progressive": True}),
    "riding": (ContentChunker(64), {"repair": "none", "progressive": 16}),
    "on demand": (ContentChunker(64), {"repair": "selective", "progressive": False}),
    "at once": (FixedChunker(64), {"repair": "first_k", "recompute_ratio": 1.0}),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", TURNS)
def test_answers_are_plain_once_repaired_and_the_store_is_exact(kind: str, policy: str) -> None:
    chunker, settings = POLICIES[policy]
    model = make_model("llama") if kind != "split" else load_embedded()[0]
    store = ChunkStore(model, chunker=chunker)
    cache = ChunkReuseCache(model, store, ReusePolicy(mode="blend", min_prefill_saving=0, **settings))
    moved = 0
    for ids in TURNS[kind]():
        found = generate(model, as_inputs(ids), cache, max_new_tokens=4, min_new_tokens=4)
        moved += cache.report.moved_tokens
        text = found.sequences
        if policy == "at once":
            assert_same(found, generate(model, as_inputs(ids), max_new_tokens=4, min_new_tokens=4))
            continue
        if policy == "on demand":
            cache.repair()
        more = joined(text, random_ids(3, seed=ids.shape[1]) % model.config.vocab_size)
        for _ in range(10):  # what is done when idle may be given up, as where the machine is busy
            idle_of(cache).wait(30)
            if not cache.store_tails():
                break
            cache.repair_when_idle()
        assert_same(generate(model, as_inputs(more), cache), generate(model, as_inputs(more)))
    assert moved > 300
    for ids in TURNS[kind]():
        exact = ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0))
        assert_same(generate(model, as_inputs(ids), exact), generate(model, as_inputs(ids)))
    assert not store.check_integrity().wrong


@pytest.mark.parametrize("kind", ["dated", "reordered", "doubled"])
def test_and_this_is_noticed_where_it_is_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: with a ledger that does not know what has moved, the store serves it, and answers are others."""
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=64)
    cache = ChunkReuseCache(model, store, ReusePolicy(mode="blend", min_prefill_saving=0, repair="none"))
    monkeypatch.setattr(MovedColumns, "is_tainted", lambda *given: False)
    off = 0.0
    for ids in TURNS[kind]():
        generate(model, as_inputs(ids), cache, max_new_tokens=1)
    cache.store_all()
    for ids in TURNS[kind]():
        exact = ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0))
        found, expected = (generate(model, as_inputs(ids), each, max_new_tokens=1) for each in (exact, None))
        off = max(off, float((found.logits[0] - expected.logits[0]).abs().max()))
    assert off > 1e-2


@pytest.mark.parametrize("way", ["prompt", "edit"])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_edit_of_an_edit_while_the_first_one_is_being_repaired(
    monkeypatch: pytest.MonkeyPatch, way: str, layer: int
) -> None:
    """It comes in the middle of a layer; nothing that is half repaired is used as exact, or stored."""
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=64)
    policy = ReusePolicy(mode="blend", repair="none", progressive=4, min_prefill_saving=0)
    cache = ChunkReuseCache(model, store, policy)
    first, once, twice, *_ = undone()
    generate(model, as_inputs(first), cache, max_new_tokens=1)
    halted = Halted(monkeypatch, layer)
    said = generate(model, as_inputs(once), cache, max_new_tokens=3, min_new_tokens=3).sequences
    assert halted.reached.wait(30)
    threading.Timer(0.2, halted.go_on.set).start()
    if way == "edit":
        held = said.shape[1] - 1
        ids = cache.edit(drop=[(150, 180)])
        assert ids.tolist() == joined(said[:, :150], said[:, 180:held]).tolist()
        text = joined(ids, ASKED[4])
    else:
        text = twice
    said = generate(model, as_inputs(text), cache, max_new_tokens=3, min_new_tokens=3).sequences
    assert cache.report.moved_tokens > 150
    assert idle_of(cache).wait(30)
    assert cache.report.repaired_tokens > 200
    more = joined(said, random_ids(30, seed=80))
    assert_same(generate(model, as_inputs(more), cache), generate(model, as_inputs(more)))
    for ids in (first, once, twice, text):
        exact = ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0))
        assert_same(generate(model, as_inputs(ids), exact), generate(model, as_inputs(ids)))
    assert not store.check_integrity().wrong
