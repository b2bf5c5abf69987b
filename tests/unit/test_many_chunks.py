"""What a store takes for each chunk: bytes of its index, and calls to plan a prompt, however many chunks there are."""

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import make_model
from tests.internals.cache import (
    Border,
    ChunkStore,
    LayerKV,
    SortedTexts,
    Tokens,
    WindowTable,
    content_index,
    find_moved,
    plan_row,
)
from tests.internals.cache import prefix_key as key_of
from tests.property.test_store import BYTES_PER_TOKEN, kv_of

pytestmark = pytest.mark.daily

MODEL = make_model("llama")
CHUNK, PROMPT = 128, 2048
TOKEN_BYTES = 4 * CHUNK + 48  # of a chunk, as one object
SHARED: dict[int, LayerKV] = {}  # so that K/V does not grow


def words(number: int) -> Tokens:
    drawn = np.random.default_rng(number).integers(0, 30_000, PROMPT, dtype=np.int64)
    drawn[0] = number
    return drawn


def filled(store: ChunkStore, chunks: int) -> bytes:
    """The root under which prompts are stored."""
    root = store.root(b"")
    assert root is not None
    kv = SHARED.setdefault(CHUNK, kv_of(np.zeros(CHUNK, dtype=np.int64), 0))
    for number in range(chunks * CHUNK // PROMPT):
        parent, tokens = root, words(number)
        for at in range(0, PROMPT, CHUNK):
            part = tokens[at : at + CHUNK]
            store.put(root, parent, at, part, BYTES_PER_TOKEN * CHUNK, lambda: kv)
            parent = key_of(parent, part)
    return root


def bytes_for_each(store: ChunkStore, chunks: int, beside: Callable[[ChunkStore], object] = lambda _: None) -> float:
    filled(store, 16)
    gc.collect()
    tracemalloc.start()
    try:
        filled(store, chunks)
        held = beside(store)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.stats()["chunks"] == chunks
    del held
    return taken / chunks


def calls_of(work: Callable[[], object]) -> int:
    """Functions that are entered, in whatever package."""
    found = 0

    def note(frame: object, event: str, _: object) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_index_takes_less_than_a_kilobyte_a_chunk_with_its_tokens() -> None:
    assert bytes_for_each(ChunkStore(MODEL), 1_280) < 1_060


def test_found_by_content_it_takes_less_than_a_kilobyte_beside_its_tokens() -> None:
    store = ChunkStore(MODEL)
    store.moved_index(store.root(b"") or b"")
    assert bytes_for_each(store, 1_280) < 1_024 + TOKEN_BYTES


def test_more_is_noticed() -> None:
    def sets(store: ChunkStore) -> object:
        return [{key} for key in store.inspect().chunks]

    assert bytes_for_each(ChunkStore(MODEL), 640, sets) > 1_100


@pytest.mark.parametrize("moved", [False, True])
def test_planning_takes_as_many_calls_however_many_chunks_there_are(moved: bool) -> None:
    counts = []
    for chunks in (128, 2_048):
        store = ChunkStore(MODEL)
        root = filled(store, chunks)
        index = store.moved_index(root) if moved else None
        stored, unseen = words(3), words(10**6)
        for tokens in (np.concatenate([unseen[:7], stored]), unseen) if moved else (stored, unseen):

            def plan(tokens: Tokens = tokens, store: ChunkStore = store, root: bytes = root, index=index) -> object:
                if index is not None:
                    return find_moved(tokens, 0, len(tokens), index)
                return plan_row(tokens, 0, Border(0, root), len(tokens) - 1, store.chunker, store.view(root, tokens))

            assert bool(plan()) or tokens is unseen
            counts.append(calls_of(plan))
    assert counts[2:] <= [count + 8 for count in counts[:2]], counts


def test_more_calls_are_counted() -> None:
    one, three = (calls_of(lambda n=n: [key_of(b"", words(0)) for _ in range(n)]) for n in (1, 3))
    assert three > one + 4


# The parts of the index by content, against plain models of them


@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=3)), max_size=100))
@example([*((True, bytes([n])) for n in range(0, 60, 2)), *((False, bytes([n])) for n in range(60))])  # many blocks
@settings(max_examples=60, deadline=None)
def test_sorted_texts(steps: list[tuple[bool, bytes]]) -> None:

    size, content_index._BLOCK = content_index._BLOCK, 4
    try:
        texts, held = SortedTexts(), set[bytes]()
        for add, text in steps:
            if add and text not in held:
                texts.add(text)
                held.add(text)
            elif not add and text in held:
                texts.remove(text)
                held.remove(text)
            ordered = sorted(held)
            below = [each for each in ordered if each < text]
            above = [each for each in ordered if each >= text]
            assert texts.around(text) == (below[-1] if below else b"", above[0] if above else b"")
            assert all(texts.following(text, count) == above[:count] for count in (2, 9))
            assert len(texts) == len(held)
    finally:
        content_index._BLOCK = size


@given(st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 60), max_size=9)), max_size=100))
@settings(max_examples=60, deadline=None)
def test_window_table(steps: list[tuple[int, list[int]]]) -> None:
    """Hashes that stand close together in the table, many of them alike; slots come and go."""
    size, content_index._FEWEST_ROWS = content_index._FEWEST_ROWS, 4
    try:
        _check_window_table(steps)
    finally:
        content_index._FEWEST_ROWS = size


def _check_window_table(steps: list[tuple[int, list[int]]]) -> None:
    table, held = WindowTable(), dict[int, tuple[int, list[int]]]()
    for slot, numbers in steps:
        hashes = np.array(numbers, dtype=np.uint64)
        if slot in held:
            first, own = held.pop(slot)
            table.remove(first, np.array(own, dtype=np.uint64))
        else:
            held[slot] = table.add(slot, hashes), numbers
        present = Counter(number for _, own in held.values() for number in set(own))
        assert table.know(np.arange(61, dtype=np.uint64)).tolist() == [number in present for number in range(61)]
        for number in numbers[:2]:
            expected = [
                (slot, first + own.index(number)) for slot, (first, own) in reversed(held.items()) if number in own
            ]
            assert table.places(np.array([number], dtype=np.uint64), 100) == expected
    assert len(table) == len(present) if steps else True
