"""The index against a search through all entries: whatever was added and removed, it finds the same text."""

from collections import Counter

import numpy as np
import pytest

from tests.internals.cache import media_ids, text_ids
from tests.internals.top import MAX_NGRAM, NgramIndex, ngrams

WORDS = [0, 1, 70_000]  # few, so that n-grams come again
MEDIA = int(media_ids(b"a picture", 1)[0])


class Twin:
    """An index, and its entries as lists."""

    def __init__(self) -> None:
        self.index = NgramIndex()
        self.entries: dict[bytes, list[int]] = {}  # the oldest first
        self.before: dict[bytes, int] = {}  # tokens of an entry that are of its parent
        self.added = 0

    def add(self, tokens: list[int], back: int) -> None:
        """Continue what was added `back` times before, if it is there."""
        key, parent = b"%d" % self.added, b"%d" % (self.added - back)
        self.added += 1
        self.index.add(key, parent, text_ids(np.array(tokens)))
        known = self.entries.get(parent, [])[-MAX_NGRAM:]
        self.before[key] = len(known)
        self.entries[key] = known + [token if token >= 0 else -1 for token in tokens]

    def remove(self, key: bytes) -> None:
        del self.entries[key], self.before[key]
        self.index.remove(key)

    def look_up(self, ids: list[int], length: int, most: int, least: int) -> list[int]:
        found = self.index.continued(np.array(ids, dtype=np.int64), length, most, least)
        tokens, shares = self.searched(ids, length, most, least)
        assert found.tokens == tokens
        assert found.shares == pytest.approx(shares)
        assert bool(found.agreeing) == bool(tokens)
        return tokens

    def searched(self, ids: list[int], length: int, most: int, least: int) -> tuple[list[int], list[float]]:
        found, shares = list[int](), list[float]()
        while len(found) < length:
            agreeing, runs = self.best(ids + found, most)
            if agreeing < least:
                break
            walked = 0
            while len(found) < length and (runs := [run for run in runs if len(run) > walked]):
                votes = Counter(run[walked] for run in runs)
                token = [run[walked] for run in runs if votes[run[walked]] == max(votes.values())][-1]
                shares.append(votes[token] / len(runs))
                runs = [run for run in runs if run[walked] == token]
                found.append(token)
                walked += 1
            least = min(most, agreeing + walked)
        return found, shares

    def best(self, ids: list[int], most: int) -> tuple[int, list[list[int]]]:
        places: list[tuple[int, list[int]]] = []
        for key, entry in self.entries.items():
            for at in range(max(self.before[key], 1), len(entry)):
                agreeing = 0
                while agreeing < min(at, most, len(ids)) and entry[at - agreeing - 1] == ids[-agreeing - 1]:
                    agreeing += 1
                end = entry.index(-1, at) if -1 in entry[at:] else len(entry)
                if end > at:
                    places.append((agreeing, entry[at:end]))
        longest = max((agreeing for agreeing, _ in places), default=0)
        if longest < 2:
            return 0, []
        return longest, [run for agreeing, run in places if agreeing == longest]

    def check_size(self) -> None:
        """What was removed takes no more than what is there."""
        there = sum(MAX_NGRAM + 1 + len(entry) for entry in self.entries.values())
        assert self.index._removed <= max(ngrams._FEWEST_UNSORTED, self.index._end // 2)
        assert self.index._end - self.index._removed <= there
        assert len(self.index._places) <= there + self.index._removed


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_what_a_search_finds(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(ngrams, "_FEWEST_UNSORTED", 40)
    rng = np.random.default_rng(seed)
    twin, seen = Twin(), Counter[str]()
    for _ in range(300):
        tokens = rng.choice([*WORDS, MEDIA], rng.integers(1, 15), p=[0.4, 0.35, 0.2, 0.05]).tolist()
        twin.add(tokens, back=int(rng.integers(1, 3)))
        if len(twin.entries) > 20 or rng.random() < 0.2:
            twin.remove(list(twin.entries)[rng.integers(len(twin.entries))])
        twin.check_size()
        ids = rng.choice(WORDS, rng.integers(0, 4)).tolist()
        if twin.entries and rng.random() < 0.8:
            entry = list(twin.entries.values())[rng.integers(len(twin.entries))]
            ids += [token for token in entry[: rng.integers(1, 20)] if token >= 0]
        least, most = sorted(rng.integers(2, MAX_NGRAM + 1, 2).tolist())
        found = twin.look_up(ids, int(rng.integers(0, 40)), most, least)
        seen["nothing" if not found else "across entries" if len(found) > 14 else "something"] += 1
    assert min(seen["nothing"], seen["something"], seen["across entries"]) > 20, seen
