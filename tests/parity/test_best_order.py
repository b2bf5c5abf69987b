"""Documents in the order in which most of their prompt is stored: as good as the best of all orders, and exact."""

from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.internals.cache import best_order
from tests.internals.compat import probe_reason

DOCUMENTS = [random_ids(60, seed=10 + at) for at in range(5)]
HEAD, END = random_ids(20, seed=1), random_ids(12, seed=2)
ALL = ReusePolicy(min_prefill_saving=0)


def prompt(documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([HEAD, *documents, END], dim=1)


def numbers(documents: list[torch.Tensor]) -> list[int]:
    return [next(at for at, own in enumerate(DOCUMENTS) if own is each) for each in documents]


def asked(model: Any, store: ChunkStore, order: list[int]) -> None:
    cache = ChunkReuseCache(model, store, ALL)
    model.generate(**as_inputs(prompt([DOCUMENTS[at] for at in order])), past_key_values=cache, max_new_tokens=1)
    cache.store_tails()


@pytest.mark.parametrize(
    ("stored", "given", "best"),
    [
        ([[3, 1, 4]], [0, 1, 3, 4], [3, 1, 4, 0]),
        ([[3, 1], [1, 4, 0]], [0, 1, 2, 3, 4], [1, 4, 0, 2, 3]),
        ([[2]], [0, 1, 2], [2, 0, 1]),
        ([], [0, 2, 1], [0, 2, 1]),
        ([[0, 1, 2]], [0, 1, 2], [0, 1, 2]),
        ([[4]], [0, 1, 2], [0, 1, 2]),
        ([[0, 1]], [0], [0]),
        ([[0, 1]], [], []),
    ],
)
def test_the_best_stored_prefix_is_followed(stored: list[list[int]], given: list[int], best: list[int]) -> None:
    """What is not stored comes behind it, in the order that was given. The new order is an exact hit."""
    model = make_model("llama")
    assert probe_reason(model) is None  # found out once, and not counted
    store = ChunkStore(model, chunk_size=16)
    for order in stored:
        asked(model, store, order)
    cache = ChunkReuseCache(model, store, ALL)
    found = cache.best_order([DOCUMENTS[at] for at in given], prompt)
    assert numbers(found.documents) == best
    ids = prompt(found.documents)
    with counted(model) as work:
        out = model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.report.exact_tokens == found.tokens
    assert work.tokens == ids.shape[1] - found.tokens + 3
    assert out.tolist() == model.generate(**as_inputs(ids), max_new_tokens=4, do_sample=False).tolist()
    assert (found.saved_tokens > 40) == (best != given)


def test_what_the_cache_holds_itself_counts() -> None:
    """Also what fills no chunk yet."""
    model = make_model("llama")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=512), ALL)
    model.generate(**as_inputs(prompt([DOCUMENTS[2], DOCUMENTS[0]])), past_key_values=cache, max_new_tokens=1)
    assert numbers(cache.best_order(DOCUMENTS[:3], prompt).documents) == [2, 0, 1]


def test_another_salt_is_not_followed() -> None:
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=16)
    asked(model, store, [2, 0, 1])
    found = ChunkReuseCache(model, store, ALL, salt="other").best_order(DOCUMENTS[:3], prompt)
    assert numbers(found.documents) == [0, 1, 2]
    assert (found.tokens, found.saved_tokens) == (0, 0)


def test_moved_text_is_no_prefix() -> None:
    """What was computed behind moved text is not found by its history."""
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=16)
    asked(model, store, [0, 1, 2])
    blend = ReusePolicy(mode="blend", repair="none", progressive=False, min_prefill_saving=0)
    cache = ChunkReuseCache(model, store, blend)
    ids = prompt([DOCUMENTS[at] for at in (1, 2, 0)])
    model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=1)
    assert cache.report.moved_tokens > 100
    found = cache.best_order([DOCUMENTS[at] for at in (1, 2, 0)], prompt)
    assert numbers(found.documents) == [0, 1, 2]


@pytest.mark.daily
@pytest.mark.parametrize("mode", ["exact", "blend"])
@pytest.mark.parametrize(
    ("ids", "error", "told"),
    [
        (torch.cat([HEAD, HEAD]), ValueError, r"of the shape \[n\] or \[1, n\], got \[2, 20\]\. Pass the rows"),
        (HEAD.float(), ValueError, r"which are integers, got torch\.float32"),
        ({"input_ids": HEAD}, TypeError, r"`ids` must be those of one prompt, got dict\. Pass"),
        ("Anna lives in Oslo.", TypeError, r"`ids` must be those of one prompt, got str\. Pass"),
    ],
)
def test_ids_of_one_prompt_are_asked_for(mode: Any, ids: Any, error: type[Exception], told: str) -> None:
    """Of several rows, the first one was answered for, and rows of documents were one text."""
    cache = ChunkReuseCache(make_model("llama"), policy=ReusePolicy(mode=mode))
    for call in (cache.stored_tokens, lambda ids: cache.movable_spans(ids, 0)):
        with pytest.raises(error, match=told):
            call(ids)
    with pytest.raises(error, match=told):
        cache.best_order(DOCUMENTS[:2], lambda some: ids)


def test_short_prompts_have_nothing_stored() -> None:
    cache = ChunkReuseCache(make_model("llama"))
    assert [cache.stored_tokens(ids) for ids in (torch.ones(1, 0).long(), HEAD[:, :1], HEAD[0])] == [0, 0, 0]


@settings(max_examples=150, deadline=None)
@given(
    stored=st.lists(st.permutations(range(5)), max_size=5), cuts=st.lists(st.integers(0, 5), min_size=5, max_size=5)
)
def test_no_order_is_better(stored: list[list[int]], cuts: list[int]) -> None:
    """Of five documents of different lengths, for any stored prompts; ties keep the order that was given."""
    sizes = [30, 47, 20, 80, 55]
    orders = [order[:cut] for order, cut in zip(stored, cuts, strict=False)]

    def known(some: list[int]) -> int:
        def common(order: list[int]) -> int:
            same = next((at for at, pair in enumerate(zip(order, some, strict=False)) if len({*pair}) > 1), None)
            return sum(sizes[at] for at in (some[:same] if same is not None else some[: len(order)]))

        return 10 + max(map(common, orders), default=0)

    found = best_order(list(range(5)), known)
    assert found.tokens == max(known(list(order)) for order in permutations(range(5)))
    assert sorted(found.documents) == list(range(5))
    assert found.saved_tokens == found.tokens - known(list(range(5))) >= 0
    if not found.saved_tokens:
        assert found.documents == list(range(5))


def test_few_prompts_are_looked_up_where_all_orders_are_stored() -> None:
    """Not all orders of twelve documents: four for each pair, and one place more."""
    looked = 0

    def known(some: list[int]) -> int:
        nonlocal looked
        looked += 1
        return 10 + 50 * len(some)

    count = 12
    found = best_order(list(range(count)), known)
    assert found.documents == list(range(count))
    assert looked <= 2 * count**2 + count + 3
