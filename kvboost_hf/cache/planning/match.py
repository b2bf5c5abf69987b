"""Finds stored chunks anywhere in a prompt by their tokens, whatever came before them.

    row tokens   [ exact | computed | moved | moved | computed | moved | computed ]
                         start                                                stop

The search does not depend on how the prompt is cut: a rolling hash looks for the first `MIN_MOVED_TOKENS` tokens of
every stored chunk at every offset, and candidates are compared token by token.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import Tokens, common_length

# Fewer tokens of a chunk are never moved: recomputing tokens after the seam would leave nothing of them.
MIN_MOVED_TOKENS = 16

# Tokens that each part, or whole chunk, of a cover costs, since what follows it may need repair.
_PART_COSTS = 8
_WHOLE_COSTS = 1

# The hash of tokens t is the sum of t[k] * _BASE**k mod 2**64. An odd base has an inverse, which makes the hash of
# every run of tokens a difference of two sums.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)


class MovedChunk(Protocol):
    """A stored chunk, as far as matching needs it."""

    @property
    def prefix_key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...  # key of the chunk that it was computed directly behind
    @property
    def start(self) -> int: ...  # row token of its first token, when it was computed
    @property
    def tokens(self) -> Tokens: ...


class MovedIndex(Protocol):
    """The chunks of one root, as far as matching needs them. Chunks of another root must never be found in it."""

    max_tokens: int  # no chunk is longer

    def known_heads(self, heads: Sequence[int]) -> list[int]:
        """The indices in `heads` at which a stored chunk's `head_hash` stands."""
        ...

    def whole(self, tokens: Tokens) -> "MovedChunk | None":
        """The longest chunk that is a prefix of `tokens`; of equal ones the one with least `start`."""
        ...

    def leading(self, tokens: Tokens) -> "MovedChunk | None":
        """A chunk that shares most leading tokens with `tokens`; of equal ones the one with least `start`."""
        ...

    def following(self, parent: bytes, tokens: Tokens) -> "MovedChunk | None":
        """A chunk with this `parent` that starts with all of `tokens`; one without more tokens, if there is one."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MovedSegment:
    """Row tokens [start, stop), which are the leading tokens of `chunk`."""

    chunk: MovedChunk
    start: int
    stop: int
    shift: int  # new position minus old one
    continues: bool  # computed directly behind the chunk that serves the tokens before `start`: no seam


def head_hash(tokens: Tokens) -> int:
    """The hash of a chunk's first `MIN_MOVED_TOKENS` tokens, as `find_moved` looks for it."""
    return int((tokens[:MIN_MOVED_TOKENS].astype(np.uint64) * _HEAD_POWERS).sum())


def find_moved(
    tokens: Tokens, start: int, stop: int, index: MovedIndex, *, behind: bytes | None = None
) -> tuple[MovedSegment, ...]:
    """Find chunks that can serve row tokens [start, stop), wherever their tokens stood.

    Of all covers by whole chunks and by leading parts of chunks, the one that serves most tokens is chosen, with as
    few and as whole chunks as possible. Of several chunks with the same tokens, the one computed directly behind the
    chunk before is preferred, since it has seen the same history; else the one with the fewest tokens before it, most
    of which are foreign to this prompt.

    Args:
        tokens: All tokens of the row.
        start: The first one to serve.
        stop: The end of those to serve.
        index: The store.
        behind: Key of the chunk that ends at `start`, if there is one with its original K/V and position.

    Returns:
        Segments of `MIN_MOVED_TOKENS` or more, in order, that do not overlap.
    """
    if stop - start < MIN_MOVED_TOKENS:
        return ()
    hashes = _rolling_hashes(tokens[start:stop])
    places = [start + place for place in index.known_heads(hashes.tolist())]
    if not places:
        return ()
    if len(places) * MIN_MOVED_TOKENS > stop - start:  # more than can all serve: a text that repeats itself
        places = _leftmost(tokens, places, stop, index)
    segments: list[MovedSegment] = []
    border, shift = start, 0
    for at, end in _filled(tokens, places, _best_cover(tokens, places, stop, index), stop, index):
        wanted = tokens[at:end]
        chunk = index.following(behind, wanted) if behind is not None and at == border else None
        # Whoever stores K/V may give it any parent: the history is the same only if its length is.
        continues = chunk is not None and at - chunk.start == shift
        if not continues:
            chunk = index.whole(wanted)
            if chunk is None or len(chunk.tokens) < len(wanted):
                chunk = index.leading(wanted)
        if chunk is None or common_length(chunk.tokens, wanted) < len(wanted):  # evicted in between
            continue
        segments.append(MovedSegment(chunk, at, end, at - chunk.start, continues))
        behind = chunk.prefix_key if len(chunk.tokens) == len(wanted) else None
        border, shift = end, at - chunk.start
    return tuple(segments)


def _rolling_hashes(tokens: Tokens) -> NDArray[np.uint64]:
    """The hash of every `MIN_MOVED_TOKENS` tokens in a row."""
    n = len(tokens)
    sums = np.zeros(n + 1, dtype=np.uint64)
    np.cumsum(tokens.astype(np.uint64) * _powers(_BASE, n), out=sums[1:])
    runs: NDArray[np.uint64] = sums[MIN_MOVED_TOKENS:] - sums[:-MIN_MOVED_TOKENS]
    return runs * _powers(_INVERSE, len(runs))


def _powers(base: int, n: int) -> NDArray[np.uint64]:
    factors = np.full(n, base, dtype=np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


_HEAD_POWERS = _powers(_BASE, MIN_MOVED_TOKENS)


def _window(tokens: Tokens, at: int, stop: int, index: MovedIndex) -> Tokens:
    return tokens[at : min(at + index.max_tokens, stop)]


def _agreed(chunk: MovedChunk | None, tokens: Tokens) -> int:
    return common_length(chunk.tokens, tokens) if chunk is not None else 0


def _leftmost(tokens: Tokens, places: list[int], stop: int, index: MovedIndex) -> list[int]:
    """The first of `places`, and then always the next one that the one before does not cover."""
    found: list[int] = []
    free = 0
    for at in places:
        if at >= free:
            window = _window(tokens, at, stop, index)
            found.append(at)
            free = at + _agreed(index.leading(window), window)
    return found


def _best_cover(tokens: Tokens, places: list[int], stop: int, index: MovedIndex) -> list[tuple[int, int]]:
    """The intervals of whole chunks and longest leading parts that cover most tokens."""
    worth = [0] * (len(places) + 1)  # of what can be served from each place on
    ends: list[int] = [0] * len(places)
    for i in reversed(range(len(places))):
        at, window = places[i], _window(tokens, places[i], stop, index)
        worth[i] = worth[i + 1]
        leading = index.leading(window)
        part = _agreed(leading, window)
        if leading is not None and len(leading.tokens) == part:
            whole = part
        else:
            whole = _agreed(index.whole(window[:part]), window)
        for n, costs in ((part, _PART_COSTS), (whole, _WHOLE_COSTS)):
            gain = n - costs + worth[bisect_left(places, at + n)]
            if n >= MIN_MOVED_TOKENS and gain >= worth[i]:
                worth[i], ends[i] = gain, at + n
    cover: list[tuple[int, int]] = []
    i = 0
    while i < len(places):
        if ends[i]:
            cover.append((places[i], ends[i]))
        i = bisect_left(places, ends[i]) if ends[i] else i + 1
    return cover


def _filled(
    tokens: Tokens, places: list[int], cover: list[tuple[int, int]], stop: int, index: MovedIndex
) -> list[tuple[int, int]]:
    """`cover`, and leading parts of chunks between its intervals."""
    filled: list[tuple[int, int]] = []
    free = places[0]
    for at, end in [*cover, (stop, stop)]:
        for place in places[bisect_left(places, free) : bisect_left(places, at - MIN_MOVED_TOKENS + 1)]:
            if place < free:
                continue
            window = _window(tokens, place, at, index)
            n = _agreed(index.leading(window), window)
            if n >= MIN_MOVED_TOKENS:
                filled.append((place, place + n))
                free = place + n
        if end > at:
            filled.append((at, end))
        free = end
    return filled
