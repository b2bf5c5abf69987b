"""Finds stored text wherever it stood: chunks for `match.find_moved`, and n-grams for `ChunkStore.continuation`."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import Tokens, common_length, text_ids
from kvboost_hf.cache.planning.match import MIN_MOVED_TOKENS, window_hashes
from kvboost_hf.cache.planning.plan import HEAD_TOKENS, Chunk
from kvboost_hf.ngrams import MAX_NGRAM, Continued, longest_match, most_frequent

_MAX_COMPARED = 32  # chunks of equal standing among which one is chosen
_MAX_INSIDE = 8  # texts that are known to have the same window inside, the latest ones
_TOKEN_BYTES = np.dtype(np.int64).itemsize

C = TypeVar("C", bound=Chunk)

_NO_TEXT = -1  # media, removed tokens, and the separator of entries
_FEWEST_UNSORTED = 8_192  # tokens that are worth sorting; a look-up goes through those that are not sorted yet
_MOST_COMPARED = 16_384  # sorted places with the same pair, the latest ones: some pairs are everywhere


class ContentIndex(Generic[C]):
    """The chunks of one root. Implements `match.MovedIndex`.

    Their tokens are kept as sorted byte strings. The chunk that shares most leading tokens with a text is next to the
    place where the text would be inserted, however many chunks start alike. A chunk of fewer than `MIN_MOVED_TOKENS`
    tokens is found only directly before or behind another one. Of several variants of a text, the one with most text
    before it serves: K/V that was computed behind little text is unlike all other.

    Args:
        lock: Held wherever the index is read or written; must be reentrant.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self.max_tokens = 0
        self._lock = lock
        self._heads: Counter[int] = Counter()
        self._inside: dict[int, list[tuple[bytes, int]]] = {}  # by hash of a window: texts, and where they have it
        self._texts: list[bytes] = []
        self._variants: dict[bytes, list[C]] = {}  # by their tokens; least `start` first
        self._behind: dict[tuple[bytes, bytes], list[C]] = {}  # by parent and first tokens
        self._by_key: dict[bytes, C] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def chunks(self) -> list[C]:
        """All chunks."""
        with self._lock:
            return [chunk for variants in self._variants.values() for chunk in variants]

    def add(self, chunk: C) -> None:
        """Add a chunk."""
        text, hashes = chunk.tokens.tobytes(), window_hashes(chunk.tokens)
        with self._lock:
            self.max_tokens = max(self.max_tokens, len(chunk.tokens))
            if text not in self._variants:
                self._variants[text] = []
                if hashes:
                    insort(self._texts, text)
                    self._add_windows(text, hashes)
            self._heads.update(hashes[:1])
            insort(self._variants[text], chunk, key=_start)
            self._behind.setdefault(_place(chunk.parent, chunk.tokens), []).append(chunk)
            self._by_key[chunk.key] = chunk

    def remove(self, chunk: C) -> None:
        """Undo `add`."""
        text, hashes = chunk.tokens.tobytes(), window_hashes(chunk.tokens)
        with self._lock:
            for head in hashes[:1]:
                self._heads[head] -= 1
                if not self._heads[head]:
                    del self._heads[head]
            self._variants[text].remove(chunk)
            if not self._variants[text]:
                del self._variants[text]
                if hashes:
                    del self._texts[bisect_left(self._texts, text)]
                    self._drop_windows(text, hashes)
            place = _place(chunk.parent, chunk.tokens)
            self._behind[place].remove(chunk)
            if not self._behind[place]:
                del self._behind[place]
            if self._by_key.get(chunk.key) is chunk:
                del self._by_key[chunk.key]

    def _add_windows(self, text: bytes, hashes: list[int]) -> None:
        for number, hashed in enumerate(hashes[1:], start=1):
            found = self._inside.setdefault(hashed, [])
            if not found or found[-1][0] != text:  # of a text that repeats itself, the first one
                found.append((text, number * MIN_MOVED_TOKENS))
                del found[:-_MAX_INSIDE]

    def _drop_windows(self, text: bytes, hashes: list[int]) -> None:
        for hashed in set(hashes[1:]):
            kept = [each for each in self._inside.get(hashed, ()) if each[0] != text]
            if kept:
                self._inside[hashed] = kept
            else:
                self._inside.pop(hashed, None)

    def variants(self, tokens: Tokens) -> list[C]:
        """All chunks with exactly these tokens, those with the fewest tokens before them first."""
        with self._lock:
            return list(self._variants.get(tokens.tobytes(), ()))

    def known_heads(self, hashes: Sequence[int]) -> list[int]:
        """The indices in `hashes` at which the first of a stored chunk's `window_hashes` stands."""
        known = self._heads  # a look-up is atomic: a long prompt need not hold the lock
        return [place for place, head in enumerate(hashes) if head in known]

    def known_windows(self, hashes: Sequence[int]) -> list[int]:
        """The indices in `hashes` at which the hash of a window of a stored chunk stands, its head included."""
        heads, inside = self._heads, self._inside
        return [place for place, hashed in enumerate(hashes) if hashed in inside or hashed in heads]

    def whole(self, tokens: Tokens) -> C | None:
        """The longest chunk that is a prefix of `tokens`; of equal ones the one with most `start`."""
        text = tokens.tobytes()
        with self._lock:
            while len(text) >= MIN_MOVED_TOKENS * _TOKEN_BYTES:
                at = bisect_right(self._texts, text)
                if at == 0:
                    return None
                below = self._texts[at - 1]  # it, or what starts with it, or what differs from `text` sooner
                if text.startswith(below):
                    return self._variants[below][-1]
                text = text[: _shared(below, text) * _TOKEN_BYTES]
        return None

    def leading(self, tokens: Tokens) -> C | None:
        """A chunk that shares most leading tokens with `tokens`; of equal ones the one with most `start`."""
        text = tokens.tobytes()
        with self._lock:
            at = bisect_left(self._texts, text)
            shared = max((_shared(near, text) for near in self._texts[max(at - 1, 0) : at + 1]), default=0)
            if shared < MIN_MOVED_TOKENS:
                return None
            text = text[: shared * _TOKEN_BYTES]
            first = bisect_left(self._texts, text)
            texts = self._texts[first : first + _MAX_COMPARED]
            alike = (self._variants[near][-1] for near in texts if near.startswith(text))
            return max(alike, key=_start)

    def inside(self, window: Tokens) -> list[tuple[C, int]]:
        """Some chunks that have `window` inside them, and where; a collision may bring others."""
        with self._lock:
            found = self._inside.get(window_hashes(window)[0], ())
            return [(self._variants[text][-1], at) for text, at in found]

    def behind(self, parent: bytes, tokens: Tokens) -> C | None:
        """Of chunks with this `parent`, one that shares most leading tokens with `tokens`, `HEAD_TOKENS` or more.

        Of several, the one without more tokens, if there is one.
        """
        with self._lock:
            same = self._variants.get(tokens.tobytes(), ())
            whole = next((chunk for chunk in same if chunk.parent == parent), None)
            others = self._behind.get(_place(parent, tokens), [])[-_MAX_COMPARED:]
        if whole is not None or not others:
            return whole
        return max(others, key=lambda chunk: (common_length(chunk.tokens, tokens), -len(chunk.tokens)))

    def under(self, key: bytes) -> C | None:
        """The chunk with this key."""
        return self._by_key.get(key)


def _start(chunk: Chunk) -> int:
    return chunk.start


def _place(parent: bytes, tokens: Tokens) -> tuple[bytes, bytes]:
    return parent, tokens[:HEAD_TOKENS].tobytes()


def _shared(a: bytes, b: bytes) -> int:
    """How many leading tokens two texts share."""
    if a.startswith(b) or b.startswith(a):
        return min(len(a), len(b)) // _TOKEN_BYTES
    return common_length(np.frombuffer(a, dtype=np.int64), np.frombuffer(b, dtype=np.int64))


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

    def continued(self, ids: Tokens, length: int, max_ngram: int, min_ngram: int) -> Continued:
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

    def _find(self, ids: Tokens) -> tuple[NDArray[np.int64], int]:
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
        """Those of the unsorted places that are of an entry's tokens, and not of those before them: no text twice."""
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
