"""`ChunkStore.continuation`: what followed the longest n-gram, in all that the store holds and the salt may see."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkStore, StoreClosedError
from tests.internals.cache import (
    Block,
    History,
    LayerKV,
    Put,
    StoredText,
    Tokens,
    media_ids,
    prefix_key,
    records_of,
    shifted_ids,
)
from tests.internals.top import most_frequent, ngrams

pytestmark = pytest.mark.daily

CHUNK = 16


@pytest.fixture
def store(llama: PreTrainedModel) -> ChunkStore:
    return ChunkStore(llama, chunk_size=CHUNK)


def put(store: ChunkStore, tokens: Tokens, salt: bytes = b"") -> None:
    """Store a prompt, cut as the store would, with K/V of four bytes a token."""
    root = parent = store.root(salt)
    assert root is not None
    assert parent is not None
    for at in range(0, len(tokens), CHUNK):
        part = tokens[at : at + CHUNK]
        kv = LayerKV((Block.raw(torch.zeros(2, 1, len(part), 1, dtype=torch.bfloat16)),), (((0, 0), (0, 1)),))
        stored = store.put(root, parent, at, part, kv.nbytes, partial(lambda kv: kv, kv), unfinished=len(part) < CHUNK)
        assert stored is Put.STORED
        parent = prefix_key(parent, part)


def text(*starts: int, n: int = CHUNK) -> Tokens:
    """Runs of `n` numbers each, from `starts` on."""
    return np.concatenate([np.arange(start, start + n) for start in starts])


def test_the_text_goes_on_across_chunks(store: ChunkStore) -> None:
    put(store, text(100, n=5 * CHUNK))
    for end in (102, 100 + CHUNK - 1, 100 + CHUNK, 100 + CHUNK + 1, 150):
        wanted = list(range(end, end + 30))
        assert store.continuation(range(end - 2, end), 30) == wanted
        assert store.continuation(np.arange(end - 10, end), 30, min_ngram=2) == wanted
    assert store.continuation([170, 171], 30) == list(range(172, 180))  # where the stored text ends
    assert store.continuation([178, 179], 30) == []


def test_the_longest_ngram_counts(store: ChunkStore) -> None:
    put(store, np.array([1, 2, 3, 4, 50, 51, 52, 53]))
    put(store, np.array([9, 9, 3, 4, 60, 61, 62, 63]))
    put(store, np.array([8, 8, 3, 4, 60, 61, 62, 63]))
    assert store.continuation([1, 2, 3, 4], 2) == [50, 51]
    assert store.continuation([7, 2, 3, 4], 2) == [50, 51]
    assert store.continuation([9, 3, 4], 2) == [60, 61]
    assert store.continuation([1, 2, 3, 4], 2, max_ngram=2) == [60, 61]  # the most frequent one
    assert store.continuation([7, 7, 3, 4], 2, min_ngram=3) == []
    assert store.continuation([4], 2) == []


def test_of_the_equally_frequent_the_last_one_stored_counts(store: ChunkStore) -> None:
    put(store, np.array([1, 2, 40, 41, 42, 43, 44, 45]))
    assert store.continuation([1, 2], 1) == [40]
    put(store, np.array([1, 2, 30, 31, 32, 33, 34, 35]))
    assert store.continuation([1, 2], 1) == [30]
    put(store, np.array([7, 1, 2, 40, 46, 47, 48, 49]))
    assert store.continuation([1, 2], 2) == [40, 46]


def test_of_what_is_everywhere_the_last_ones_are_compared(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "_FEWEST_UNSORTED", 0)
    put(store, np.array([1, 2, 30] * 20))
    put(store, np.array([1, 2, 31] * 3))
    assert store.continuation([1, 2], 1) == [30]
    monkeypatch.setattr(ngrams, "_MOST_COMPARED", 3)
    assert store.continuation([1, 2], 1) == [31]


def test_what_is_gone_is_not_proposed(store: ChunkStore) -> None:
    put(store, text(100, 200))
    put(store, text(300))
    first = prefix_key(store.root(b""), text(300))
    store.quarantine([first])
    assert store.continuation([300, 301], 4) == []
    assert store.continuation([200, 201], 4) == [202, 203, 204, 205]
    store.clear()
    assert store.continuation([200, 201], 4) == []
    put(store, text(200))
    assert store.continuation([200, 201], 4) == [202, 203, 204, 205]


def test_what_was_evicted_is_not_proposed(store: ChunkStore) -> None:
    store.max_bytes = 4 * CHUNK * (4 + 8)
    for i in range(12):
        put(store, text(1000 * i))
    proposed = [bool(store.continuation([1000 * i, 1000 * i + 1], 4)) for i in range(12)]
    assert sum(proposed) == len(store) == 4


def test_a_salt_sees_its_own_text_only(store: ChunkStore) -> None:
    put(store, text(100), b"Anna")
    assert store.continuation([100, 101], 4) == []
    assert store.continuation([100, 101], 4, salt="Anna") == [102, 103, 104, 105]
    assert store.continuation([100, 101], 4, salt=b"Ben") == []


def test_a_forgotten_salt_is_nobodys(store: ChunkStore) -> None:
    root = store.root(b"Anna")
    assert root is not None
    records_of(store).history = History()  # has seen more roots since than it remembers
    records_of(store).text = StoredText(records_of(store).history.salt_of)
    store.put(root, root, 0, text(100), 0, lambda: LayerKV((), ()))
    assert len(store) == 1
    assert store.continuation([100, 101], 4) == []


def test_media_are_no_text(store: ChunkStore) -> None:
    shown = media_ids(b"a picture", 6)
    behind = shifted_ids(text(300, n=4), np.full(4, 17))
    put(store, np.concatenate([text(100, n=6), shown, behind]))
    assert store.continuation([100, 101], 20) == [102, 103, 104, 105]
    assert store.continuation([104, 105], 20) == []
    assert store.continuation(shown[:3], 20) == []
    assert store.continuation([300, 301], 20) == [302, 303]  # by its ids, wherever it stands


def test_documents_are_looked_up_too(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, chunk_size=CHUNK)
    store.warm(documents=[text(20, n=40).tolist()])
    assert store.stats()["content_only"] == len(store) > 0
    assert store.continuation([30, 31], 20) == list(range(32, 52))


def test_it_says_what_it_takes(store: ChunkStore) -> None:
    assert store.stats()["ngram_bytes"] == 0
    rng = np.random.default_rng(0)
    for _ in range(100):
        put(store, rng.integers(0, 50, 10 * CHUNK))
    assert store.stats()["ngram_bytes"] == 0  # nobody has asked for text yet
    store.continuation([1, 2], 1)
    kept = (CHUNK + 9) / CHUNK  # with the tokens before each chunk
    assert 16 <= store.stats()["ngram_bytes"] / store.stats()["tokens"] <= 20 * kept


def test_threads_may_store_and_look_up(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "_FEWEST_UNSORTED", 40)
    store.max_bytes = 20 * CHUNK * (4 + 8)
    with ThreadPoolExecutor(4) as pool:
        storing = [pool.submit(put, store, text(1000 * i)) for i in range(100)]
        looking = [pool.submit(store.continuation, [1000 * i, 1000 * i + 1], 2) for i in range(100)]
    assert not any(each.exception() for each in storing)
    assert all(each.result() in ([], [1000 * i + 2, 1000 * i + 3]) for i, each in enumerate(looking))
    assert sum(bool(store.continuation([1000 * i, 1000 * i + 1], 2)) for i in range(100)) == len(store) == 20


def test_bad_arguments(store: ChunkStore) -> None:
    for limits in ({"max_ngram": 9}, {"min_ngram": 1}, {"max_ngram": 3, "min_ngram": 4}):
        with pytest.raises(ValueError, match="max_ngram"):
            store.continuation([1, 2], 4, **limits)  # type: ignore[arg-type]
    store.close()
    with pytest.raises(StoreClosedError):
        store.continuation([1, 2], 4)


def test_it_does_not_matter_when_it_is_first_asked(llama: PreTrainedModel) -> None:
    """The index is made of what is there, and kept from then on."""
    early, late = (ChunkStore(llama, chunk_size=CHUNK) for _ in range(2))
    assert early.continuation([1, 2], 1) == []
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 12, 4 * CHUNK) for _ in range(12)]
    for number, prompt in enumerate(prompts):
        for store in (early, late):
            put(store, prompt)
        if number < 6:
            continue
        for other in prompts[: number + 1]:
            for end in (5, CHUNK + 2, 3 * CHUNK):
                found = early.continuation(other[:end], 8)
                assert found
                assert late.continuation(other[:end], 8) == found


def test_of_several_places_the_most_frequent_continuation_is_followed() -> None:
    """As down a suffix tree: each token narrows the places to those that go on with it."""
    said = np.array([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 6, 7, 0, 1, 2, 3, 4, 9])
    places = np.flatnonzero(said == 2) + 1
    assert most_frequent(said, places, 3) == ([3, 4, 9], [3 / 4, 2 / 3, 1 / 2])
    assert most_frequent(said, places[:2], 4) == ([3, 5, 0, 1], [1.0, 1 / 2, 1.0, 1.0])
    assert most_frequent(said, places[-1:], 9) == ([3, 4, 9], [1.0] * 3)  # the end
    assert most_frequent(said, places[-1:], 8, repeating=True) == ([3, 4, 9, 3, 4, 9, 3, 4], [1.0] * 8)
    said[said == 0] = -1
    assert most_frequent(said, places[:2], 4) == ([3, 5], [1.0, 1 / 2])
    assert most_frequent(said, places, 0) == ([], [])


def test_no_text_counts_twice(store: ChunkStore) -> None:
    """The last tokens of a chunk stand before those of the next one, too."""
    put(store, np.array([*range(100, 114), 1, 2, 3, *range(200, 215)]))  # 1 2 | 3 ...
    put(store, np.array([*range(300, 313), 1, 2, 4, *range(400, 416)]))  # 1 2 4 | ...
    assert store.continued([1, 2], 1).shares == [0.5]
    found = store.continued([9, 1, 2], 3, min_ngram=2)
    assert found.tokens == [4, 400, 401]
    assert found.agreeing == 2


def test_memory_for_each_token() -> None:
    """At most 20 bytes a token, in chunks of 64 tokens; and no more after as many were removed again."""
    rng, index = np.random.default_rng(0), ngrams.NgramIndex()
    for number in range(2_000):
        index.add(b"%d" % number, b"%d" % (number - 1), rng.integers(0, 50_000, 64))
    assert index.nbytes < 22 * 64 * 2_000
    for number in range(1_500):
        index.remove(b"%d" % number)
    assert index.nbytes < 45 * 64 * 500
