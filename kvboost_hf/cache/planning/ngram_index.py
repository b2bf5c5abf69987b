"""An n-gram index of stored text, for `ChunkStore.continuation`."""

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import Tokens, text_ids
from kvboost_hf.ngrams import MAX_NGRAM, longest_match

_NO_TEXT = -1  # media, removed tokens, and the separator of entries
_FEWEST_UNSORTED = 8_192  # tokens that are worth sorting; a look-up goes through those that are not sorted yet
_MOST_COMPARED = 16_384  # sorted places with the same pair, the latest ones: some pairs are everywhere


class NgramIndex:
    """The text of chunks, each with the last `MAX_NGRAM` tokens before it, in one array:

        entry   [ tokens before | tokens | -1 ] [ tokens before | tokens | -1 ] …

    Its places are sorted by the two tokens before them, except for the latest, which are few. It takes 16 to 20 bytes
    a token, and as much for each removed token until these outnumber the others.
    """

    def __init__(self) -> None:
        self._text = np.empty(0, dtype=np.int32)
        self._end = 0  # of the entries
        self._sorted_end = 0  # of those whose places are sorted
        self._pairs = np.empty(0, dtype=np.int64)  # the two tokens before each place, sorted
        self._places = np.empty(0, dtype=np.int32)  # of the same pair the oldest first
        self._spans: dict[bytes, tuple[int, int]] = {}  # entries by the keys of their chunks, the oldest first
        self._removed = 0  # tokens

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self._text.nbytes + self._pairs.nbytes + self._places.nbytes

    def keys(self) -> list[bytes]:
        """Keys of all chunks."""
        return list(self._spans)

    def add(self, key: bytes, parent: bytes, tokens: Tokens) -> None:
        """Add the text of a chunk, which continues that of the chunk `parent` if that is present."""
        _, before = self._spans.get(parent, (0, 0))
        known = self._text[before - 1 - MAX_NGRAM : before - 1] if before else np.full(MAX_NGRAM, _NO_TEXT)
        entry = np.concatenate([known, text_ids(tokens), [_NO_TEXT]])
        start, self._end = self._end, self._end + len(entry)
        if self._end > len(self._text):
            self._text = np.concatenate([self._text, np.full(self._end, _NO_TEXT, dtype=np.int32)])
        self._text[start : self._end] = entry
        self._spans[key] = start, self._end
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

    def continuation(self, ids: Tokens, length: int, max_ngram: int, min_ngram: int) -> list[int]:
        """At most `length` tokens that followed the longest stored n-gram that ends `ids`, of at least `min_ngram`."""
        found: list[int] = []
        while len(found) < length:
            place, agreeing = self._find(np.array([*ids[-max_ngram:], *found][-max_ngram:], dtype=np.int64))
            if agreeing < min_ngram:
                break
            run = self._text[place : place + length - len(found)]
            ends = np.flatnonzero(run < 0)
            run = run[: ends[0]] if ends.size else run
            found += run.tolist()
            # What continues an entry has its last tokens before it.
            min_ngram = min(max_ngram, agreeing + len(run))
        return found

    def _find(self, ids: Tokens) -> tuple[int, int]:
        """A place behind the longest stored n-gram that ends `ids`, and its length; 0 for less than two tokens."""
        if len(ids) < 2:
            return 0, 0
        pair = _pairs(ids, np.array([len(ids)]))
        first, last = np.searchsorted(self._pairs, [pair[0], pair[0] + 1])
        first = max(first, last - _MOST_COMPARED)
        latest = self._sorted_end + np.flatnonzero(self._text[self._sorted_end : self._end - 1] == ids[-1]) + 1
        places = np.concatenate([self._places[first:last], latest])
        places, agreeing = longest_match(self._text, places[self._text[places] >= 0], ids, len(ids))
        if agreeing < 2:
            return 0, 0
        _, what, counts = np.unique(self._text[places], return_inverse=True, return_counts=True)
        return int(places[counts[what] == counts.max()].max()), agreeing

    def _sort(self) -> None:
        """Merge the latest places into the sorted ones, and drop removed ones."""
        text = self._text
        latest = np.arange(self._sorted_end + 2, self._end, dtype=np.int32)
        latest = latest[(text[latest] >= 0) & (text[latest - 1] >= 0) & (text[latest - 2] >= 0)]
        pairs = _pairs(text, latest)
        order = np.argsort(pairs, kind="stable")
        latest, pairs = latest[order], pairs[order]
        there = text[self._places] >= 0
        self._pairs, self._places = self._pairs[there], self._places[there]
        at = np.searchsorted(self._pairs, pairs, side="right")
        self._pairs, self._places = np.insert(self._pairs, at, pairs), np.insert(self._places, at, latest)
        self._sorted_end = self._end

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
