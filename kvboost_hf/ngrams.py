"""Matches token sequences: the longest n-gram that ends one inside another, how text goes on, and common prefixes.

`NgramIndex` finds n-grams in all text that a store holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FIRST = 16  # tokens that are compared first
MAX_NGRAM = 8  # tokens: longer matches predict the next token no better
_MOST_WALKED = 1_024  # places whose text is followed at once, the latest ones
_NO_TEXT = -1  # media, removed tokens, and the separator of entries
_FEWEST_UNSORTED = 8_192  # tokens that are worth sorting; a look-up goes through those that are not sorted yet
_MOST_COMPARED = 16_384  # sorted places with the same pair, the latest ones: some pairs are everywhere


@dataclass(frozen=True, slots=True)
class Continued:
    """How a text may go on, by what followed the n-gram that ends it elsewhere."""

    tokens: list[int]  # token ids
    # For each, the share of the places, among those where all tokens before it followed, where it does.
    shares: list[float]
    agreeing: int  # the length of the n-gram; 0 if there is none

    @classmethod
    def nothing(cls) -> "Continued":
        """No tokens."""
        return cls([], [], 0)


def longest_match(
    text: NDArray[Any], places: NDArray[Any], ids: NDArray[Any], max_ngram: int
) -> tuple[NDArray[Any], int]:
    """Find the places in a text that follow the longest n-gram that ends `ids`.

    Args:
        text: [tokens].
        places: [places], candidate indices in `text`.
        ids: [tokens], the other text.
        max_ngram: The longest n-gram to compare.

    Returns:
        The places, in the order given, and the length of the n-gram; no places and 0 if no token matches.
    """
    agreeing = 0
    for n in range(1, min(max_ngram, len(ids)) + 1):
        within = places[places >= n]
        longer = within[text[within - n] == ids[-n]]
        if not longer.size:
            break
        places, agreeing = longer, n
    return (places, agreeing) if agreeing else (places[:0], 0)


def most_frequent(
    text: NDArray[Any], places: NDArray[Any], length: int, *, repeating: bool = False
) -> tuple[list[int], list[float]]:
    """Follow the most frequent of several texts, token by token, as down a suffix tree.

    A suffix tree of the text has a node for each n-gram, which knows where it ends; here these are `places`. Each
    token narrows them to those that go on with it (SuffixDecoding, Oliaro et al., 2024,
    https://arxiv.org/abs/2411.04975).

    Args:
        text: [tokens]. Negative ones end it.
        places: [places], indices in `text` of the tokens that may come next, the oldest first. One at least.
        length: The most tokens to follow.
        repeating: Behind its end the text goes on with what followed the place, again; else it ends there.

    Returns:
        The tokens, those of the latest text where two are equally frequent; and for each its share of the places that
        are left.
    """
    places, steps = places[-_MOST_WALKED:, None], np.arange(length)
    behind = len(text) - places
    runs = text[places + steps % behind] if repeating else text[np.minimum(places + steps, len(text) - 1)]
    if not repeating:
        runs = np.where(steps < behind, runs, -1)
    tokens, shares = list[int](), list[float]()
    while len(tokens) < length:
        runs = runs[runs[:, len(tokens)] >= 0]
        if not len(runs):
            break
        ahead = runs[:, len(tokens) :]
        alike = ((ahead == ahead[-1]) & (ahead >= 0)).all(axis=0)
        same = len(alike) if alike.all() else int(alike.argmin())
        tokens += ahead[-1, :same].tolist()
        shares += [1.0] * same
        if len(tokens) < length:
            column = runs[:, len(tokens)]
            column = column[column >= 0]
            if not len(column):
                break
            _, which, counts = np.unique(column, return_inverse=True, return_counts=True)
            chosen = int(column[np.flatnonzero(counts[which] == counts.max())[-1]])
            runs = runs[runs[:, len(tokens)] == chosen]
            tokens.append(chosen)
            shares.append(len(runs) / len(column))
    return tokens, shares


def check_ngrams(max_ngram: int, min_ngram: int = 2) -> None:
    """Raise a ValueError unless `2 <= min_ngram <= max_ngram <= MAX_NGRAM`."""
    known = all(isinstance(each, int) for each in (min_ngram, max_ngram))
    if not known or not 2 <= min_ngram <= max_ngram <= MAX_NGRAM:
        raise ValueError(
            f"`max_ngram` must be at most {MAX_NGRAM} tokens, and `min_ngram` from 2 to `max_ngram`, got "
            f"{max_ngram!r} and {min_ngram!r}."
        )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of leading tokens that two sequences share."""
    low, high = 0, min(len(one), len(other))
    if high > _FIRST and one[:_FIRST] != other[:_FIRST]:  # the most frequent case
        high = _FIRST - 1
    while low < high:  # slices compare faster than tokens one by one
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class NgramIndex:
    """The text of chunks, each with the last `MAX_NGRAM` tokens before it, in one array:

        entry   [ tokens before | tokens | -1 ] [ tokens before | tokens | -1 ] …

    Its places are sorted by the two tokens before them, except for the latest, which are few: the two upper levels of
    a suffix tree of reversed text. Longer n-grams narrow them down. It takes 16 to 20 bytes a token, and as much for
    each removed token until these outnumber the others; the nodes of a suffix tree would take several times as many.
    """

    def __init__(self) -> None:
        self._text = np.empty(0, dtype=np.int32)
        self._end = 0  # of the entries
        self._sorted_end = 0  # of those whose places are sorted
        self._pairs = np.empty(0, dtype=np.int64)  # the two tokens before each place, sorted
        self._places = np.empty(0, dtype=np.int32)  # of the same pair the oldest first
        self._spans: dict[bytes, tuple[int, int]] = {}  # entries by the keys of their chunks, the oldest first
        self._removed = 0  # tokens
        self._latest: list[int] = []  # where the entries begin whose places are not sorted

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self._text.nbytes + self._pairs.nbytes + self._places.nbytes

    def keys(self) -> list[bytes]:
        """Keys of all chunks."""
        return list(self._spans)

    def add(self, key: bytes, parent: bytes, tokens: NDArray[np.int64]) -> None:
        """Add the text of a chunk, -1 where it is none; it continues that of the chunk `parent` if that is present."""
        _, before = self._spans.get(parent, (0, 0))
        known = self._text[before - 1 - MAX_NGRAM : before - 1] if before else np.full(MAX_NGRAM, _NO_TEXT)
        entry = np.concatenate([known, tokens, [_NO_TEXT]])
        start, self._end = self._end, self._end + len(entry)
        if self._end > len(self._text):
            self._text = np.concatenate([self._text, np.full(self._end, _NO_TEXT, dtype=np.int32)])
        self._text[start : self._end] = entry
        self._spans[key] = start, self._end
        self._latest.append(start)
        if self._end - self._sorted_end > max(_FEWEST_UNSORTED, self._sorted_end // 32):
            self._sort()

    def remove(self, key: bytes) -> None:
        """Undo `add`."""
        start, stop = self._spans.pop(key)
        self._text[start:stop] = _NO_TEXT
        self._removed += stop - start
        if self._removed > max(_FEWEST_UNSORTED, self._end // 2):
            self._sort()
            self._close_gaps()

    def continued(self, ids: NDArray[np.int64], length: int, max_ngram: int, min_ngram: int) -> Continued:
        """At most `length` tokens that followed the longest stored n-gram that ends `ids` most often.

        Args:
            ids: Token ids.
            length: So many tokens are wanted.
            max_ngram: The longest n-gram to compare.
            min_ngram: The shortest that counts.
        """
        found, shares, first = list[int](), list[float](), 0
        while len(found) < length:
            places, agreeing = self._find(np.array([*ids[-max_ngram:], *found][-max_ngram:], dtype=np.int64))
            if agreeing < min_ngram:
                break
            tokens, parts = most_frequent(self._text, places, length - len(found))
            found, shares, first = found + tokens, shares + parts, first or agreeing
            # What continues an entry has its last tokens before it.
            min_ngram = min(max_ngram, agreeing + len(tokens))
        return Continued(found, shares, first)

    def _find(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Places behind the longest stored n-gram that ends `ids`, and its length; 0 for less than two tokens."""
        none = np.empty(0, dtype=np.int64)
        if len(ids) < 2:
            return none, 0
        pair = _pairs(ids, np.array([len(ids)]))
        first, last = np.searchsorted(self._pairs, [pair[0], pair[0] + 1])
        first = max(first, last - _MOST_COMPARED)
        latest = self._sorted_end + np.flatnonzero(self._text[self._sorted_end : self._end - 1] == ids[-1]) + 1
        places = np.concatenate([self._places[first:last], self._own(latest)])
        places, agreeing = longest_match(self._text, places[self._text[places] >= 0], ids, len(ids))
        return (places, agreeing) if agreeing >= 2 else (none, 0)

    def _own(self, places: NDArray[np.integer]) -> NDArray[np.integer]:
        """The unsorted places that lie in an entry's own tokens, not in the tokens before them: no text twice."""
        if not len(places):
            return places
        starts = np.array(self._latest)
        found: NDArray[np.integer] = places[
            places - starts[np.searchsorted(starts, places, side="right") - 1] >= MAX_NGRAM
        ]
        return found

    def _sort(self) -> None:
        """Merge the latest places into the sorted ones, and drop removed ones."""
        text = self._text
        latest = self._own(np.arange(self._sorted_end + 2, self._end, dtype=np.int32))
        latest = latest[(text[latest] >= 0) & (text[latest - 1] >= 0) & (text[latest - 2] >= 0)]
        pairs = _pairs(text, latest)
        order = np.argsort(pairs, kind="stable")
        latest, pairs = latest[order], pairs[order]
        there = text[self._places] >= 0
        self._pairs, self._places = self._pairs[there], self._places[there]
        at = np.searchsorted(self._pairs, pairs, side="right")
        self._pairs, self._places = np.insert(self._pairs, at, pairs), np.insert(self._places, at, latest)
        self._sorted_end, self._latest = self._end, []

    def _close_gaps(self) -> None:
        """Compact the entries; all places are sorted."""
        spans = np.array(list(self._spans.values()), dtype=np.int64).reshape(-1, 2)
        borders = np.zeros(self._end + 1, dtype=np.int8)
        borders[spans[:, 0]] += 1
        borders[spans[:, 1]] -= 1
        kept = np.cumsum(borders, dtype=np.int8).astype(bool)
        moved = np.concatenate([[0], np.cumsum(kept, dtype=np.int32)])  # how many are kept before each place
        self._text = self._text[: self._end][kept[:-1]]
        self._places = moved[self._places].astype(np.int32)
        self._spans = dict(zip(self._spans, map(tuple, moved[spans].tolist()), strict=True))
        self._end = self._sorted_end = len(self._text)
        self._removed = 0


def _pairs(text: NDArray[np.integer], places: NDArray[np.integer]) -> NDArray[np.int64]:
    """The two tokens before each place as one number."""
    pairs: NDArray[np.int64] = (text[places - 2].astype(np.int64) << 32) | text[places - 1]
    return pairs
