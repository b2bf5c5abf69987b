"""Finds stored chunks by their tokens, wherever these stood, for `match.find_moved`."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import numpy as np

from kvboost_hf.cache.planning.chunks import Tokens, common_length
from kvboost_hf.cache.planning.match import MIN_MOVED_TOKENS, MovedChunk, head_hash

_MAX_COMPARED = 32  # chunks of equal standing among which one is chosen
_TOKEN_BYTES = np.dtype(np.int64).itemsize

C = TypeVar("C", bound=MovedChunk)


class ContentIndex(Generic[C]):
    """The chunks of one root, of `MIN_MOVED_TOKENS` tokens or more. Implements `match.MovedIndex`.

    Their tokens are kept as sorted byte strings. The chunk that shares most leading tokens with a text is next to the
    place where the text would be inserted, however many chunks start alike.

    Args:
        lock: Held wherever the index is read or written; must be reentrant.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self.max_tokens = 0
        self._lock = lock
        self._heads: Counter[int] = Counter()
        self._texts: list[bytes] = []
        self._variants: dict[bytes, list[C]] = {}  # by their tokens; least `start` first
        self._following: dict[tuple[bytes, int], list[C]] = {}  # by parent and head

    def __len__(self) -> int:
        return len(self._texts)

    def chunks(self) -> list[C]:
        """All chunks."""
        with self._lock:
            return [chunk for variants in self._variants.values() for chunk in variants]

    def add(self, chunk: C) -> None:
        """Add a chunk, unless it has fewer tokens than can be moved."""
        if len(chunk.tokens) < MIN_MOVED_TOKENS:
            return
        text, head = chunk.tokens.tobytes(), head_hash(chunk.tokens)
        with self._lock:
            self.max_tokens = max(self.max_tokens, len(chunk.tokens))
            self._heads[head] += 1
            if text not in self._variants:
                self._variants[text] = []
                insort(self._texts, text)
            insort(self._variants[text], chunk, key=_start)
            self._following.setdefault((chunk.parent, head), []).append(chunk)

    def remove(self, chunk: C) -> None:
        """Undo `add`."""
        if len(chunk.tokens) < MIN_MOVED_TOKENS:
            return
        text, head = chunk.tokens.tobytes(), head_hash(chunk.tokens)
        with self._lock:
            self._heads[head] -= 1
            if not self._heads[head]:
                del self._heads[head]
            self._variants[text].remove(chunk)
            if not self._variants[text]:
                del self._variants[text]
                del self._texts[bisect_left(self._texts, text)]
            following = self._following[chunk.parent, head]
            following.remove(chunk)
            if not following:
                del self._following[chunk.parent, head]

    def variants(self, tokens: Tokens) -> list[C]:
        """All chunks with exactly these tokens, those with the fewest tokens before them first."""
        with self._lock:
            return list(self._variants.get(tokens.tobytes(), ()))

    def known_heads(self, heads: Sequence[int]) -> list[int]:
        """The indices in `heads` at which a stored chunk's `head_hash` stands."""
        known = self._heads  # a look-up is atomic: a long prompt need not hold the lock
        return [place for place, head in enumerate(heads) if head in known]

    def whole(self, tokens: Tokens) -> C | None:
        """The longest chunk that is a prefix of `tokens`; of equal ones the one with least `start`."""
        text = tokens.tobytes()
        with self._lock:
            while len(text) >= MIN_MOVED_TOKENS * _TOKEN_BYTES:
                at = bisect_right(self._texts, text)
                if at == 0:
                    return None
                below = self._texts[at - 1]  # it, or what starts with it, or what differs from `text` sooner
                if text.startswith(below):
                    return self._variants[below][0]
                text = text[: _shared(below, text) * _TOKEN_BYTES]
        return None

    def leading(self, tokens: Tokens) -> C | None:
        """A chunk that shares most leading tokens with `tokens`; of equal ones the one with least `start`."""
        text = tokens.tobytes()
        with self._lock:
            at = bisect_left(self._texts, text)
            shared = max((_shared(near, text) for near in self._texts[max(at - 1, 0) : at + 1]), default=0)
            if shared < MIN_MOVED_TOKENS:
                return None
            text = text[: shared * _TOKEN_BYTES]
            first = bisect_left(self._texts, text)
            alike = (
                self._variants[near][0] for near in self._texts[first : first + _MAX_COMPARED] if near.startswith(text)
            )
            return min(alike, key=_start)

    def following(self, parent: bytes, tokens: Tokens) -> C | None:
        """A chunk with this `parent` that starts with all of `tokens`; one without more tokens, if there is one."""
        with self._lock:
            same = self._variants.get(tokens.tobytes(), ())
            whole = next((chunk for chunk in same if chunk.parent == parent), None)
            longer = self._following.get((parent, head_hash(tokens)), [])[-_MAX_COMPARED:]
        if whole is not None:
            return whole
        return next((chunk for chunk in longer if common_length(chunk.tokens, tokens) == len(tokens)), None)


def _start(chunk: MovedChunk) -> int:
    return chunk.start


def _shared(a: bytes, b: bytes) -> int:
    """How many leading tokens two texts share."""
    if a.startswith(b) or b.startswith(a):
        return min(len(a), len(b)) // _TOKEN_BYTES
    return common_length(np.frombuffer(a, dtype=np.int64), np.frombuffer(b, dtype=np.int64))
