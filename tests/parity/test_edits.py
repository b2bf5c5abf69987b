"""Prompts that an agent has edited: what is computed is what is new, the end of the prompt, and the repair."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy, attach, detach, last_cache
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.internals.cache import Chunker, FixedChunker

LAST_TOKENS = 16  # always computed
SEAM_TOKENS = 4
TEXT = random_ids(420, seed=1)
# Of each kind of edit: pairs of an interval of the text and how many other tokens take its place, the last ones first.
EDITS: dict[str, list[tuple[int, int, int]]] = {
    "timestamp in the head": [(20, 26, 6)],
    "counter in the head, a digit longer": [(20, 21, 2)],
    "result of a tool replaced": [(150, 230, 7)],
    "thinking taken out": [(250, 300, 0), (100, 141, 0)],
    "message inserted": [(200, 200, 30)],
    "line of a file edited": [(215, 222, 9)],
}
SHIFTS = {
    "timestamp in the head": [0],
    "counter in the head, a digit longer": [1],
    "result of a tool replaced": [-73],
    "thinking taken out": [-91, -41],
    "message inserted": [30],
    "line of a file edited": [2],
}
CHUNKERS = [FixedChunker(128), FixedChunker(32), ContentChunker(64)]


def edited(text: torch.Tensor, edits: list[tuple[int, int, int]]) -> torch.Tensor:
    for start, stop, new in edits:
        text = torch.cat([text[:, :start], random_ids(new, seed=start), text[:, stop:]], dim=1)
    return text


def blend(repair: str, ratio: float = 0.15) -> ReusePolicy:
    settings: Any = {"repair": repair, "recompute_ratio": ratio, "seam_tokens": SEAM_TOKENS}
    return ReusePolicy(mode="blend", min_prefill_saving=0, **settings)


def generate(model: Any, ids: torch.Tensor, cache: Any = None, new: int = 1) -> Any:
    options = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**as_inputs(ids), past_key_values=cache, **options)


@pytest.mark.parametrize("chunker", CHUNKERS, ids=["128", "32", "by content"])
@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_costs_itself_and_its_repair(kind: str, chunker: Chunker) -> None:
    model = make_model("llama")
    new, after = sum(n for _, _, n in EDITS[kind]), edited(TEXT, EDITS[kind])
    for repair, again in (("none", 0), ("selective", SEAM_TOKENS * len(EDITS[kind]))):
        cache = ChunkReuseCache(model, ChunkStore(model, chunker=chunker), blend(repair))
        generate(model, TEXT, cache)
        with counted(model) as work:
            generate(model, after, cache)
        report = cache.report
        assert sorted(report.moved_by) == SHIFTS[kind], report
        assert report.recomputed_tokens == again
        # By chance, tokens next to an edit may be the same as before.
        assert new + LAST_TOKENS + again - 3 <= report.forwarded_tokens <= new + LAST_TOKENS + again
        assert work.tokens == report.forwarded_tokens


@pytest.mark.parametrize("kind", EDITS)
def test_attached_calls_reuse_as_much(kind: str) -> None:
    """Each has a cache of its own, so that all of it comes from the store."""
    model = make_model("llama")
    new, after = sum(n for _, _, n in EDITS[kind]), edited(TEXT, EDITS[kind])
    attach(model, policy=blend("none"))
    try:
        generate(model, TEXT)
        generate(model, after)
        report = last_cache(model).report
    finally:
        detach(model)
    assert report.forwarded_tokens <= new + LAST_TOKENS, report


@settings(max_examples=12, deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
    chunker=st.sampled_from(CHUNKERS),
    repair=st.sampled_from(["first_k", "cacheblend", "query"]),
)
def test_with_everything_repaired_any_edit_gives_the_plain_answer(
    cuts: list[tuple[int, int, int]], chunker: Chunker, repair: str
) -> None:
    model = make_model("llama")
    after = edited(TEXT, [(at, at + n, new) for at, n, new in sorted(cuts, reverse=True)])
    cache = ChunkReuseCache(model, ChunkStore(model, chunker=chunker), blend(repair, 1.0))
    generate(model, TEXT, cache)
    found, expected = generate(model, after, cache, 4), generate(model, after, None, 4)
    assert cache.report.recomputed_tokens == cache.report.moved_tokens
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


def test_edits_turn_by_turn() -> None:
    """What an edited prompt has computed is there for the next edit, and what it has moved, too."""
    model = make_model("llama")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=64), blend("none"))
    text = TEXT
    generate(model, text, cache)
    for turn in range(4):
        said = random_ids(60, seed=300 + turn)
        text = torch.cat([edited(text, [(20, 26, 6 + turn)]), said], dim=1)
        generate(model, text, cache)
        report = cache.report
        assert report.forwarded_tokens <= 6 + turn + 60 + LAST_TOKENS, report


def turns(
    *edits: tuple[int, int, int], swapped: tuple[int, int, int] | None = None
) -> tuple[ChunkReuseCache, list[int]]:
    """Four turns, each with another head and 100 tokens more; before the last one, the text behind it is edited.

    Args:
        edits: The edits, each as in `EDITS`.
        swapped: The beginning of a text, that of the one behind it, and the end of that: they change places.

    Returns:
        The cache after the last one, and how many seams each but the first turn had.
    """
    model, policy = make_model("llama"), replace(blend("selective"), progressive=False)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=64), policy)
    text, seams = TEXT, list[int]()
    for turn in range(4):
        said = random_ids(100, seed=300 + turn)
        text = torch.cat([edited(text, list(edits) if turn == 3 else []), said], dim=1)
        if swapped is not None and turn == 3:
            start, middle, stop = swapped
            text = torch.cat([text[:, :start], text[:, middle:stop], text[:, start:middle], text[:, stop:]], dim=1)
        clock = random_ids(6 + turn % 2, seed=400 + turn)
        generate(model, torch.cat([random_ids(20, seed=2), clock, text], dim=1), cache)
        if turn:
            seams.append(cache.report.recomputed_tokens // SEAM_TOKENS)
    return cache, seams


def test_what_an_earlier_turn_has_computed_is_behind_no_seam() -> None:
    """Text behind a changed head has seen all text but that head: the head alone makes a seam, in each turn."""
    cache, seams = turns()
    assert seams == [1, 1, 1], cache.report
    assert len(cache.report.moved_by) > 1  # though parts of it have moved by different distances


@pytest.mark.parametrize("offset", [-40, -17, -16, -15, -1, 0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("kind", ["inserted", "taken out", "replaced"])
def test_an_edit_makes_one_seam_wherever_it_is(kind: str, offset: int) -> None:
    """Also at any distance from where one turn has ended, and the next one's K/V begins."""
    at = TEXT.shape[1] + 200 + offset
    cache, seams = turns({"inserted": (at, at, 9), "taken out": (at, at + 9, 0), "replaced": (at, at + 9, 8)}[kind])
    assert seams == [1, 1, 2], cache.report


@pytest.mark.parametrize("offset", [-90, -80, -64, -17, -1, 0, 1, 10, 16])
def test_two_texts_in_the_other_order_make_three_seams(offset: int) -> None:
    """Before the second one, before the first one, and behind both, wherever turns have ended."""
    at = TEXT.shape[1] + 100 + offset
    cache, seams = turns(swapped=(at, at + 70, at + 150))
    assert seams == [1, 1, 4], cache.report
    assert cache.report.moved_tokens >= sum(cache.report.moved_by.values()) > 780 - 120
