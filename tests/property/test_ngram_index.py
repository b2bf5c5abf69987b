"""The index against a search through all entries: whatever was added and removed, it finds the same text."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvboost_hf.cache import ngram_index
from kvboost_hf.cache.codes import media_codes
from kvboost_hf.cache.ngram_index import NgramIndex
from kvboost_hf.ngrams import MAX_NGRAM

MEDIA = int(media_codes(b"a picture", 1)[0])
tokens = st.lists(st.sampled_from([0, 1, 70_000]), min_size=3, max_size=14)
SEEN: Counter[str] = Counter()


class IndexMachine(RuleBasedStateMachine):
    """Few different tokens, so that n-grams come again."""

    def __init__(self) -> None:
        super().__init__()
        self.index = NgramIndex()
        self.entries: dict[bytes, list[int]] = {}  # the oldest first
        self.added = 0

    @rule(tokens=tokens, back=st.integers(1, 2), media_at=st.none() | st.integers(0, 10))
    def add(self, tokens: list[int], back: int, media_at: int | None) -> None:
        key, before = b"%d" % self.added, b"%d" % (self.added - back)
        if media_at is not None:
            tokens = [*tokens[:media_at], MEDIA, *tokens[media_at:]]
        self.added += 1
        self.index.add(key, before, np.array(tokens))
        known = self.entries.get(before, [])[-MAX_NGRAM:]
        self.entries[key] = known + [token if token >= 0 else -1 for token in tokens]

    @rule(pick=st.integers(0, 1000))
    def remove(self, pick: int) -> None:
        if self.entries:
            key = list(self.entries)[pick % len(self.entries)]
            del self.entries[key]
            self.index.remove(key)

    @rule(
        ids=st.lists(st.sampled_from([0, 1, 70_000]), max_size=9),
        pick=st.integers(0, 1000),
        cut=st.integers(1, 20),
        length=st.integers(0, 40),
        limits=st.tuples(st.integers(2, MAX_NGRAM), st.integers(2, MAX_NGRAM)).map(sorted),
    )
    def look_up(self, ids: list[int], pick: int, cut: int, length: int, limits: list[int]) -> None:
        least, most = limits
        if self.entries:  # so that something is found
            ids = ids + [token for token in list(self.entries.values())[pick % len(self.entries)][:cut] if token >= 0]
        found = self.index.continuation(np.array(ids, dtype=np.int64), length, most, least)
        assert found == self.searched(ids, length, most, least)
        SEEN["found"] += bool(found)
        SEEN["not found"] += not found
        SEEN["long"] += len(found) > 14

    def searched(self, ids: list[int], length: int, most: int, least: int) -> list[int]:
        found: list[int] = []
        while len(found) < length:
            agreeing, run = self.best(ids + found, most)
            if agreeing < least:
                break
            run = run[: length - len(found)]
            found += run
            least = min(most, agreeing + len(run))
        return found

    def best(self, ids: list[int], most: int) -> tuple[int, list[int]]:
        places: list[tuple[int, list[int]]] = []
        for entry in self.entries.values():
            for at in range(1, len(entry)):
                agreeing = 0
                while agreeing < min(at, most, len(ids)) and entry[at - agreeing - 1] == ids[-agreeing - 1]:
                    agreeing += 1
                end = entry.index(-1, at) if -1 in entry[at:] else len(entry)
                if end > at:
                    places.append((agreeing, entry[at:end]))
        longest = max((agreeing for agreeing, _ in places), default=0)
        if longest < 2:
            return 0, []
        runs = [run for agreeing, run in places if agreeing == longest]
        votes = Counter(run[0] for run in runs)
        return longest, [run for run in runs if votes[run[0]] == max(votes.values())][-1]

    @invariant()
    def removed_text_takes_no_more_than_what_is_there(self) -> None:
        there = sum(MAX_NGRAM + 1 + len(entry) for entry in self.entries.values())
        assert self.index._end <= max(2 * there + 40, 40) + self.index._removed
        assert self.index._removed <= max(ngram_index._FEWEST_UNSORTED, self.index._end // 2)


def test_it_finds_what_a_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "_FEWEST_UNSORTED", 40)
    run_state_machine_as_test(
        IndexMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
    )
    assert min(SEEN["found"], SEEN["not found"]) > 50
    assert SEEN["long"] > 5
