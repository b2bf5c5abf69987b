"""Finds stored chunks, and parts of them, anywhere in a prompt by their tokens, whatever came before them.

    row tokens   [ exact | computed | moved | moved | computed | moved | computed ]
                         start                                                stop

The search does not depend on how the prompt is cut. A rolling hash looks for windows of `MIN_MOVED_TOKENS` tokens at
every offset: the first ones of a chunk, and one every `MIN_MOVED_TOKENS` tokens inside it. Candidates are compared
token by token.

1. Whole chunks and leading parts of chunks cover as much as they can.
2. What they leave is filled. Text that was stored directly before or behind what was found is compared where it would
   have to stand; elsewhere a window inside a chunk leads to the longest run around it. So an edit in the middle of a
   chunk costs the edit, and the rest of the chunk is found behind it.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import CODE_BYTES, Tokens, common_length, text_key, text_of
from kvboost_hf.cache.planning.plan import Chunk, Segment

# Fewer tokens of a chunk are never moved: recomputing tokens after the seam would leave nothing of them.
MIN_MOVED_TOKENS = 16

# A shorter part of the inside of a chunk is as likely what every message has between its texts.
_MIN_INSIDE_TOKENS = 2 * MIN_MOVED_TOKENS

# Tokens that each part, or whole chunk, of a cover costs, since what follows it may need repair.
_PART_COSTS = 8
_WHOLE_COSTS = 1

# The hash of tokens t is the sum of t[k] * _BASE**k mod 2**64. An odd base has an inverse, which makes the hash of
# every run of tokens a difference of two sums.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)


class MovedIndex(Protocol):
    """The chunks of one root, as far as matching needs them. Chunks of another root must never be found in it."""

    max_tokens: int  # no chunk is longer

    def known_heads(self, hashes: NDArray[np.uint64]) -> list[int]:
        """The indices in `hashes` at which the first of a stored chunk's `window_hashes` stands."""
        ...

    def known_windows(self, hashes: NDArray[np.uint64]) -> list[int]:
        """The indices in `hashes` at which the hash of a window of a stored chunk stands, its head included."""
        ...

    def whole(self, text: bytes) -> "Chunk | None":
        """The longest chunk that is a prefix of a `text_of` tokens; of equal ones the one with most `start`."""
        ...

    def leading(self, text: bytes) -> "Chunk | None":
        """A chunk that shares most leading tokens with a `text_of` them; of equal ones the one with most `start`."""
        ...

    def inside(self, window: bytes) -> "Sequence[tuple[Chunk, int]]":
        """Some chunks that have a window, the `text_of` it, inside them, and where; a collision may bring others."""
        ...

    def behind(self, parent: bytes, text: bytes) -> "Chunk | None":
        """Of chunks with this `parent`, the one that shares most leading tokens with a text."""
        ...

    def under(self, key: bytes) -> "Chunk | None":
        """The chunk with this key."""
        ...


def window_hashes(text: bytes) -> NDArray[np.uint64]:
    """The hashes of the windows of a text that `find_moved` looks for: one every `MIN_MOVED_TOKENS` tokens."""
    codes = np.frombuffer(text, dtype=np.int32)
    n = len(codes) - len(codes) % MIN_MOVED_TOKENS
    windows = codes[:n].astype(np.uint64).reshape(-1, MIN_MOVED_TOKENS)
    hashes: NDArray[np.uint64] = (windows * _HEAD_POWERS).sum(axis=1)
    return hashes


def find_moved(tokens: Tokens, start: int, stop: int, index: MovedIndex) -> tuple[Segment, ...]:
    """Find chunks that can serve row tokens [start, stop), wherever their tokens stood.

    Of all covers by whole chunks and by leading parts of chunks, the one that serves most tokens is chosen, with as
    few and as whole chunks as possible; other parts of chunks fill what it leaves. Of several chunks with the same
    tokens, the one computed directly behind the chunk before is preferred, since it has seen the same history; else
    the one with the most tokens before it: a chunk that has seen other text of the kind serves better than one that
    stood first.

    Returns segments in order that do not overlap. Those that were computed directly behind each other have
    `MIN_MOVED_TOKENS` or more together.
    """
    text = text_of(tokens)
    hashes = _rolling_hashes(np.frombuffer(text, dtype=np.int32)[start:stop])
    places = [start + place for place in index.known_heads(hashes)]
    if len(places) * MIN_MOVED_TOKENS > stop - start:  # more than can all serve: a text that repeats itself
        places = _leftmost(tokens, text, places, index)
    covered = _chosen(tokens, text, _best_cover(tokens, text, places, stop, index), index)
    gaps = _Gaps(tokens, text, start, hashes, index)
    segments: list[Segment] = []
    for segment in covered:
        gaps.fill(segments, segment.start, segment)
        segments.append(segment)
    gaps.fill(segments, stop, None)
    return tuple(_joined(tokens, segments))


def _chosen(tokens: Tokens, text: bytes, cover: list[tuple[int, int]], index: MovedIndex) -> Iterator[Segment]:
    """The chunks that serve the intervals of a cover."""
    shift = 0
    behind: bytes | None = None  # the key of what was chosen last, if it serves to its end
    for at, end in cover:
        wanted, own = tokens[at:end], text[at * CODE_BYTES : end * CODE_BYTES]
        chunk = index.behind(behind, own) if behind is not None else None
        # Whoever stores K/V may give it any parent: the history is the same only if its length is, which
        # it is not behind a gap.
        if chunk is None or at - chunk.start != shift or _agreed(chunk, wanted) < len(wanted):
            chunk = index.whole(own)
            if chunk is None or chunk.length < len(wanted):
                chunk = index.leading(own)
        if chunk is None or _agreed(chunk, wanted) < len(wanted):  # evicted in between
            continue
        segment = Segment(chunk, 0, at, end, moved=True)
        yield segment
        behind = chunk.key if segment.to_end else None
        shift = segment.shift


class _Gaps:
    """Fills what a cover leaves of row tokens from `start` on, whose windows have these `hashes`."""

    def __init__(self, tokens: Tokens, text: bytes, start: int, hashes: NDArray[np.uint64], index: MovedIndex) -> None:
        self._tokens, self._text, self._start, self._hashes, self._index = tokens, text, start, hashes, index

    def fill(self, before: list[Segment], stop: int, after: Segment | None) -> None:
        """Append to the segments `before` what serves tokens up to `stop`, where `after` begins, if anything does."""
        free = before[-1].stop if before else self._start
        free = self._go_on(before, free, stop)
        ending = self._come_from(after, free) if after is not None else []
        stop = ending[0].start if ending else stop
        for place in self._places(free, stop):
            if place < free:
                continue
            run = self._longest(place, free, stop)
            if run is not None:
                leading = self._come_from(run, free)
                before += [*leading, run]
                free = self._go_on(before, run.stop, stop)
        before += ending

    def _places(self, start: int, stop: int) -> list[int]:
        """Where a known window begins that stands in row tokens [start, stop)."""
        first, last = start - self._start, stop - self._start - MIN_MOVED_TOKENS + 1
        return [start + place for place in self._index.known_windows(self._hashes[first:last])] if first < last else []

    def _longest(self, place: int, start: int, stop: int) -> Segment | None:
        """The longest part of a chunk that serves `place` within row tokens [start, stop)."""
        window = self._text[place * CODE_BYTES : (place + MIN_MOVED_TOKENS) * CODE_BYTES]
        end = min(place + self._index.max_tokens, stop)
        rest = self._tokens[place:end]
        found = self._index.leading(self._text[place * CODE_BYTES : end * CODE_BYTES])
        best = Segment(found, 0, place, place + _agreed(found, rest), moved=True) if found is not None else None
        for chunk, at in self._index.inside(window):
            right = common_length(chunk.tokens[at:], rest)
            left = _common_end(chunk.tokens[:at], self._tokens[start:place])
            if left + right >= (best.stop - best.start + 1 if best is not None else _MIN_INSIDE_TOKENS):
                best = Segment(chunk, at - left, place - left, place + right, moved=True)
        return best if best is not None and best.stop - best.start >= MIN_MOVED_TOKENS else None

    def _go_on(self, segments: list[Segment], start: int, stop: int) -> int:
        """Append the chunks that were computed directly behind the last segment; returns where they end."""
        while segments and segments[-1].stop == start < stop and segments[-1].to_end:
            last = segments[-1]
            end = min(start + self._index.max_tokens, stop)
            chunk = self._index.behind(last.chunk.key, self._text[start * CODE_BYTES : end * CODE_BYTES])
            n = _agreed(chunk, self._tokens[start:end])
            if chunk is None or not n or start - chunk.start != last.shift:
                break
            segments.append(Segment(chunk, 0, start, start + n, moved=True))
            start += n
        return start

    def _come_from(self, segment: Segment, start: int) -> list[Segment]:
        """The ends of the chunks that a segment was computed directly behind, as far as they serve from `start` on."""
        found: list[Segment] = []
        while segment.offset == 0 and segment.start > start:
            chunk = self._index.under(segment.chunk.parent)
            if chunk is None or chunk.start + chunk.length != segment.chunk.start:
                break
            n = _common_end(chunk.tokens, self._tokens[start : segment.start])
            if not n:
                break
            segment = Segment(chunk, chunk.length - n, segment.start - n, segment.start, moved=True)
            found.insert(0, segment)
        return found


def _joined(tokens: Tokens, segments: list[Segment]) -> Iterator[Segment]:
    """The segments, each marked if it `continues` what is before it."""
    border = shift = 0
    behind: bytes | None = None  # the key of what ends at `border`
    for segment in segments:
        chunk = segment.chunk
        same = segment.start == border and segment.shift == shift and chunk.parent == behind
        if not same and chunk.content_only:  # others were computed behind a chunk
            same = chunk.parent == text_key(tokens, segment.start)
        yield replace(segment, continues=segment.offset == 0 and same)
        behind = segment.chunk.key if segment.to_end else None
        border, shift = segment.stop, segment.shift


def _rolling_hashes(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
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


def _agreed(chunk: Chunk | None, tokens: Tokens) -> int:
    return common_length(chunk.tokens, tokens) if chunk is not None else 0


def _common_end(a: Tokens, b: Tokens) -> int:
    """How many last tokens `a` and `b` share."""
    return common_length(a[::-1], b[::-1])


def _leftmost(tokens: Tokens, text: bytes, places: list[int], index: MovedIndex) -> list[int]:
    """The first of `places`, and then always the next one that the one before does not cover."""
    found: list[int] = []
    free = 0
    for at in places:
        if at >= free:
            end = at + index.max_tokens
            found.append(at)
            free = at + _agreed(index.leading(text[at * CODE_BYTES : end * CODE_BYTES]), tokens[at:end])
    return found


def _best_cover(tokens: Tokens, text: bytes, places: list[int], stop: int, index: MovedIndex) -> list[tuple[int, int]]:
    """The intervals of whole chunks and longest leading parts that cover most tokens."""
    worth = [0] * (len(places) + 1)  # of what can be served from each place on
    ends: list[int] = [0] * len(places)
    for i in reversed(range(len(places))):
        at, end = places[i], min(places[i] + index.max_tokens, stop)
        worth[i], window = worth[i + 1], tokens[at:end]
        leading = index.leading(text[at * CODE_BYTES : end * CODE_BYTES])
        part = _agreed(leading, window)
        if leading is not None and leading.length == part:
            whole = part
        else:
            whole = _agreed(index.whole(text[at * CODE_BYTES : (at + part) * CODE_BYTES]), window)
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
