"""Chunks are found wherever their tokens stand; what is found is what it says it is, and nothing overlaps."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals.cache import (
    MIN_MOVED_TOKENS,
    Chunker,
    ContentChunker,
    ContentIndex,
    FixedChunker,
    MovedIndex,
    Segment,
    Tokens,
    find_moved,
    text_key,
    text_of,
    window_hashes,
)

pytestmark = pytest.mark.daily


@dataclass(frozen=True, eq=False)
class FakeChunk:
    tokens: Tokens
    start: int = 0
    parent: bytes = b"root"
    key: bytes = b"key"
    content_only: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> bytes:
        return text_of(self.tokens)


Index = ContentIndex[FakeChunk]


def index_of(*chunks: FakeChunk) -> Index:
    index: Index = ContentIndex(threading.RLock())
    for chunk in chunks:
        index.add(chunk)
    return index


def stored(tokens: Tokens, chunker: Chunker, name: str = "prompt", start: int = 0) -> list[FakeChunk]:
    """The chunks of a prompt, tail included, each directly behind the one before."""
    chunks: list[FakeChunk] = []
    parent, at = b"root", 0
    while at < len(tokens):
        cut = chunker.next_cut(tokens, at) or len(tokens)
        key = f"{name}:{at}".encode()
        chunks.append(FakeChunk(tokens[at:cut], start + at, parent, key))
        parent, at = key, cut
    return chunks


def text(n: int, seed: int = 0, words: int = 50) -> Tokens:
    return np.random.default_rng(seed).integers(0, words, n)


def check(segments: tuple[Segment, ...], tokens: Tokens, start: int, stop: int) -> int:
    """What any answer must fulfil; returns how many tokens are served."""
    at, runs = start, [0]
    for segment in segments:
        assert at <= segment.start < segment.stop <= stop
        at = segment.stop
        n = segment.stop - segment.start
        served = segment.chunk.tokens[segment.offset : segment.offset + n]
        assert np.array_equal(served, tokens[segment.start : segment.stop])
        assert segment.shift == segment.start - segment.offset - segment.chunk.start
        runs = [*runs[:-1], runs[-1] + n] if segment.continues else [*runs, n]
    assert all(n >= MIN_MOVED_TOKENS for n in runs[1:])
    for before, segment in pairwise(segments):
        if segment.continues and segment.chunk.parent != text_key(tokens, segment.start):
            assert before.stop == segment.start
            assert before.shift == segment.shift
            assert before.chunk.key == segment.chunk.parent
            assert before.offset + before.stop - before.start == len(before.chunk.tokens)
    return sum(segment.stop - segment.start for segment in segments)


def moved(tokens: Tokens, index: MovedIndex, start: int = 0, stop: int | None = None) -> tuple[Segment, ...]:
    stop = len(tokens) if stop is None else stop
    segments = find_moved(tokens, start, stop, index)
    check(segments, tokens, start, stop)
    return segments


few_words = st.lists(st.integers(0, 1), max_size=120).map(lambda ids: np.array(ids, dtype=np.int64))


@given(
    prompts=st.lists(few_words, max_size=4),
    row=few_words,
    taken=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100), st.integers(0, 60)), max_size=4),
    start=st.integers(0, 40),
    short=st.integers(0, 40),
)
def test_segments_are_what_they_say(
    prompts: list[Tokens], row: Tokens, taken: list[tuple[int, int, int]], start: int, short: int
) -> None:
    index = index_of(*(c for i, p in enumerate(prompts) for c in stored(p, FixedChunker(32), f"{i}")))
    pieces = [prompts[i % len(prompts)][at : at + n] for i, at, n in taken] if prompts else []
    tokens = np.concatenate([row, *pieces])
    segments = moved(tokens, index, min(start, len(tokens)), max(len(tokens) - short, 0))
    whole = [c.tokens for p in prompts for c in stored(p, FixedChunker(32)) if len(c.tokens) >= MIN_MOVED_TOKENS]
    for at in range(start, len(tokens) - short - MIN_MOVED_TOKENS + 1):  # nothing that could serve is left out
        head = tokens[at : at + MIN_MOVED_TOKENS]
        if any(np.array_equal(chunk[:MIN_MOVED_TOKENS], head) for chunk in whole):
            assert any(s.start < at + MIN_MOVED_TOKENS and s.stop > at for s in segments)


@given(seed=st.integers(0, 1000), before=st.integers(0, 90))
def test_a_document_is_found_wherever_it_stands(seed: int, before: int) -> None:
    document = text(600, seed)
    chunks = stored(document, FixedChunker(64))
    tokens = np.concatenate([100 + text(before, seed), document, 100 + text(20, seed)])
    segments = moved(tokens, index_of(*chunks))
    assert [(s.start, s.stop) for s in segments] == [
        (before + c.start, before + c.start + len(c.tokens)) for c in chunks
    ]
    assert [s.continues for s in segments] == [False] + [True] * (len(chunks) - 1)
    assert {s.shift for s in segments} == {before}


@pytest.mark.parametrize("chunker", [FixedChunker(128), ContentChunker(128)], ids=["fixed", "by content"])
@settings(max_examples=30)
@given(seed=st.integers(0, 1000), at=st.integers(100, 900))
def test_one_token_more_costs_itself(chunker: Chunker, seed: int, at: int) -> None:
    document = text(1000, seed)
    changed = np.concatenate([document[:at], [77], document[at:]])
    segments = moved(changed, index_of(*stored(document, chunker)))
    served = sum(s.stop - s.start for s in segments)
    assert served > 1000 - 8  # as many before the token may be too few of their chunk to be looked up
    assert [s.start for s in segments if not s.continues] == [0, at + 1]
    assert {s.shift for s in segments} == {0, 1}


edits = st.lists(
    st.tuples(st.sampled_from(["put", "cut", "change"]), st.integers(0, 900), st.integers(1, 60)), max_size=5
)


def edited(tokens: Tokens, changes: list[tuple[str, int, int]]) -> tuple[Tokens, int]:
    """A text with some tokens put in, cut out or changed in places; and how many of it are not from the text."""
    new, at = 0, len(tokens)
    for how, place, n in sorted(changes, key=lambda change: -change[1]):
        if place + n > at:  # each behind the ones before
            continue
        put = 0 if how == "cut" else n
        rest = tokens[place + (0 if how == "put" else n) :]
        tokens = np.concatenate([tokens[:place], 100_000 + np.arange(new, new + put), rest])
        new, at = new + put, place
    return tokens, new


@pytest.mark.parametrize("chunker", [FixedChunker(128), ContentChunker(128)], ids=["fixed", "by content"])
@pytest.mark.parametrize("words", [50, 20_000])
@settings(max_examples=40)
@given(seed=st.integers(0, 1000), changes=edits, before=st.integers(0, 90))
def test_edits_cost_what_is_new_and_little_besides(
    chunker: Chunker, words: int, seed: int, changes: list[tuple[str, int, int]], before: int
) -> None:
    document = text(1000, seed, words)
    tokens, new = edited(document, changes)
    segments = moved(np.concatenate([document[:before], tokens]), index_of(*stored(document, chunker)), before)
    served = sum(s.stop - s.start for s in segments)
    # Of each piece between edits, fewer tokens of its first chunk and of its last one than are looked for.
    assert len(tokens) - new - served <= 2 * (2 * MIN_MOVED_TOKENS - 2) * len(changes)
    if words > 1000:  # no text twice
        assert sum(not s.continues for s in segments) <= 2 * len(changes) + 1


@given(seed=st.integers(0, 1000))
def test_another_prefix_costs_nothing_but_itself(seed: int) -> None:
    document = text(500, seed)
    chunker = ContentChunker(64)
    first, second = (np.concatenate([100 * i + text(n, seed), document]) for i, n in ((1, 40), (2, 77)))
    # The chunk across the border between prefix and document is lost, and a last one that is too short to be moved.
    served = check(moved(second, index_of(*stored(first, chunker))), second, 0, len(second))
    assert served > len(document) - 64 - MIN_MOVED_TOKENS


def test_the_right_one_of_a_thousand_that_start_alike() -> None:
    head = text(24)
    chunks = [FakeChunk(np.concatenate([head, text(20 + i % 80, i + 1)]), 1000 * i) for i in range(1000)]
    index = index_of(*chunks)
    for i in (0, 1, 499, 500, 998, 999):
        tokens = np.concatenate([100 + text(30), chunks[i].tokens, 100 + text(30)])
        (segment,) = moved(tokens, index)
        assert segment.chunk is chunks[i]
        assert (segment.start, segment.stop) == (30, 30 + len(chunks[i].tokens))


@given(seed=st.integers(0, 100), agreed=st.integers(0, 60))
def test_the_leading_part_of_the_chunk_that_agrees_longest(seed: int, agreed: int) -> None:
    document = text(64, seed)
    others = [FakeChunk(np.concatenate([document[:n], 100 + text(64 - n, n)])) for n in range(0, agreed, 7)]
    tokens = np.concatenate([document[:agreed], 200 + text(40)])
    served = check(moved(tokens, index_of(FakeChunk(document), *others)), tokens, 0, len(tokens))
    assert served == (agreed if agreed >= MIN_MOVED_TOKENS else 0)


def test_a_short_chunk_in_the_way_does_not_cost_a_long_one() -> None:
    document = text(200)
    end = FakeChunk(np.concatenate([300 + text(20), document[:20]]))  # a chunk that ends where the document begins
    tokens = np.concatenate([300 + text(20), document])
    segments = moved(tokens, index_of(end, FakeChunk(document)))
    assert [(s.start, s.stop) for s in segments] == [(0, 20), (20, 220)]


def test_few_whole_chunks_come_before_a_part_of_a_longer_one_and_many_do_not() -> None:
    document = text(200)
    longer = FakeChunk(np.concatenate([document, 300 + text(20)]))
    for size, are_chosen in ((100, True), (20, False)):
        whole = [FakeChunk(document[at : at + size]) for at in range(0, 200, size)]
        assert [s.chunk for s in moved(document, index_of(longer, *whole))] == (whole if are_chosen else [longer])


class TestVariants:
    document = text(64, 5)

    def test_the_most_text_before_it(self) -> None:
        chunks = [FakeChunk(self.document, start) for start in (300, 20, 100)]
        (segment,) = moved(np.concatenate([100 + text(30), self.document]), index_of(*chunks))
        assert segment.chunk is chunks[0]
        assert segment.shift == -270

    @pytest.mark.parametrize("cut", [64, 40])
    def test_the_one_that_continues_the_run_comes_first(self, cut: int) -> None:
        first = FakeChunk(text(32, 1), 500, key=b"first")
        alone = FakeChunk(self.document, 900)  # it has more text before it
        behind = FakeChunk(self.document, 532, parent=b"first")
        tokens = np.concatenate([text(32, 1), self.document[:cut], 100 + text(20)])
        segments = moved(tokens, index_of(first, alone, behind))
        assert [s.chunk for s in segments] == [first, behind]
        assert [s.continues for s in segments] == [False, True]

    @pytest.mark.parametrize("more", [1, 20])
    def test_a_whole_chunk_comes_before_the_beginning_of_a_longer_one(self, more: int) -> None:
        """However much text the longer one has before it: what continues the whole one is found behind it."""
        whole = FakeChunk(self.document, 0, key=b"whole")
        longer = FakeChunk(np.concatenate([self.document, 100 + text(more)]), 500, key=b"longer")
        behind = FakeChunk(200 + text(12), 64, parent=b"whole", key=b"behind")  # too short to be found by itself
        row = np.concatenate([300 + text(30), self.document, behind.tokens, 400 + text(20)])
        segments = moved(row, index_of(whole, longer, behind))
        assert [s.chunk for s in segments] == [whole, behind]
        assert segments[0].to_end
        assert moved(row, index_of(whole, longer, behind), stop=104)[-1].stop == 104  # in the one behind

    def test_of_several_behind_it_the_one_that_serves_most(self) -> None:
        """Of those that serve as much, the one with fewest tokens besides. They are too short to be found alone."""
        first = FakeChunk(text(32, 1), 0, key=b"first")
        row = np.r_[text(32, 1), self.document[:12], 200 + text(20)]
        ends = [self.document[:9], self.document[:12], *(np.r_[self.document[:12], 100 + text(n)] for n in (30, 3))]
        behind = [FakeChunk(end, 32, parent=b"first", key=b"%d" % n) for n, end in enumerate(ends)]
        for held, best in (((0, 2, 3), 3), ((3, 2, 0), 3), ((0, 1), 1), ((2, 0), 2), ((2, 1, 3), 1), ((2,), 2)):
            segments = moved(row, index_of(first, *(behind[n] for n in held)))
            assert [s.chunk for s in segments] == [first, behind[best]]
            assert segments[-1].stop == 44

    def test_a_parent_of_another_length_is_another_history(self) -> None:
        first = FakeChunk(text(32, 1), 500, key=b"first")
        behind = FakeChunk(self.document, 900, parent=b"first")
        segments = moved(np.concatenate([text(32, 1), self.document]), index_of(first, behind))
        assert [s.continues for s in segments] == [False, False]

    def test_nothing_continues_a_part(self) -> None:
        first = FakeChunk(text(32, 1), 500, key=b"first")
        behind = FakeChunk(self.document, 520, parent=b"first")
        segments = moved(np.concatenate([text(20, 1), self.document]), index_of(first, behind))
        assert len(segments) == 2
        assert not segments[1].continues

    @pytest.mark.parametrize(("left_out", "found"), [(0, [(30, 33), (33, 97)]), (5, [(33, 92)])])
    def test_only_what_is_there_from_its_beginning_was_computed_behind_what_is_before_it(
        self, left_out: int, found: list[tuple[int, int]]
    ) -> None:
        head = text(64, 1)
        chunks = FakeChunk(head, 500, key=b"head"), FakeChunk(self.document, 564, parent=b"head")
        row = np.concatenate([100 + text(30), head[-3:], self.document[left_out:]])
        assert [(s.start, s.stop) for s in moved(row, index_of(*chunks))] == found

    @pytest.mark.parametrize("before", [0, 10, 64, 100])
    @pytest.mark.parametrize("chunks", [True, False], ids=["stored text before it", "new text before it"])
    def test_behind_the_same_text_there_is_no_seam(self, before: int, chunks: bool) -> None:
        """Whatever distance it has moved by, and whether what serves the text before it has moved as far."""
        head = text(100, 9)[:before]
        behind = FakeChunk(
            self.document,
            500 + before,
            parent=text_key(np.concatenate([text(500), head]), 500 + before),
            content_only=True,
        )
        other = FakeChunk(head, 0, key=b"other") if chunks and before >= 16 else FakeChunk(700 + text(30), 0)
        row = np.concatenate([text(500)[-70:], head, self.document, 400 + text(20)])
        segments = moved(row, index_of(behind, other))
        assert segments[-1].chunk is behind
        assert segments[-1].continues
        for at, continues in ((-1, False), (-32, False), (-33, True)):
            changed = row.copy()
            changed[70 + before + at] += 1000
            assert moved(changed, index_of(behind, other))[-1].continues is continues

    def test_nor_before_a_part_of_it(self) -> None:
        before = text(80, 9)
        behind = FakeChunk(self.document, 80, parent=text_key(before, 80), content_only=True)
        row = np.concatenate([before, self.document[10:]])
        assert [s.continues for s in moved(row, index_of(behind))] == [False]


@pytest.mark.parametrize("before", [0, 50])
def test_the_longest_part_of_what_is_inside_a_chunk(before: int) -> None:
    """Twice as many tokens as are looked for, at least; whichever was stored first."""
    document, head = text(80, 3), 100 + text(before)

    def inside(n: int, seed: int) -> FakeChunk:
        return FakeChunk(np.concatenate([200 + text(16, seed), document[1 : 1 + n], 300 + text(9, seed)]), seed)

    for n in (31, 32, 33):
        row = np.concatenate([head, document[1 : 1 + n]])
        found = [(s.start, s.stop) for s in moved(row, index_of(FakeChunk(document)), before)]
        assert found == ([(before, before + n)] if n >= 2 * MIN_MOVED_TOKENS else [])
    row = np.concatenate([head, document[1:65], 400 + text(20)])
    for n, more in ((40, 1), (40, 2), (40, 20), (32, 32)):
        chunks = [inside(n, 1), inside(n + more, 2)]
        for held in (chunks, chunks[::-1]):
            (segment,) = moved(row, index_of(*held), before)
            assert (segment.chunk, segment.start, segment.stop) == (chunks[1], before, before + n + more)


@pytest.mark.parametrize("later", [None, FakeChunk(100 + text(64))], ids=["nothing", "another"])
@pytest.mark.parametrize("calls", range(9))
def test_what_is_evicted_meanwhile_is_not_served(calls: int, later: FakeChunk | None) -> None:
    """An index answers so many times, and then has nothing, or another chunk."""
    document = text(200, 4)
    index: Any = index_of(*stored(document, FixedChunker(64)))
    left = calls

    def once(answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*asked: Any) -> Any:
            nonlocal left
            left -= 1
            return answer(*asked) if left >= 0 else later

        return ask

    for name in ("whole", "leading", "behind", "under"):
        setattr(index, name, once(getattr(index, name)))
    row = np.concatenate([100 + text(30), document, 100 + text(20), document[70:120]])
    served = check(find_moved(row, 0, len(row), index), row, 0, len(row))
    assert (served == 250) == (calls >= 8)


def test_a_collision_cannot_match() -> None:
    """An index that finds a chunk for whatever it is asked serves nothing that is not there."""
    wrong = FakeChunk(text(64, 1))

    class Colliding:
        max_tokens = 64

        def known_heads(self, hashes: list[int]) -> list[int]:
            return list(range(len(hashes)))

        known_windows = known_heads

        def whole(self, text: bytes) -> FakeChunk:
            return wrong

        leading = whole

        def inside(self, window: bytes) -> list[tuple[FakeChunk, int]]:
            return [(wrong, 16)]

        def behind(self, parent: bytes, text: bytes) -> FakeChunk:
            return wrong

        def under(self, key: bytes) -> FakeChunk:
            return wrong

    tokens = 100 + text(300, 2)
    assert find_moved(tokens, 0, 300, Colliding()) == ()  # type: ignore[arg-type]


def test_hashes_of_codes() -> None:
    """Codes of images are large and negative: the same hash wherever they stand, another one for other tokens."""
    codes = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 400)
    index = index_of(FakeChunk(codes[100:200]))
    assert [(s.start, s.stop) for s in moved(codes, index)] == [(100, 200)]
    for tokens in range(18):
        found = [(s.start, s.stop) for s in moved(codes, index, 100, 100 + tokens)]
        assert found == ([(100, 100 + tokens)] if tokens >= MIN_MOVED_TOKENS else [])
    assert window_hashes(text_of(codes))[0] != window_hashes(text_of(codes[::-1]))[0]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_the_index_forgets_what_is_removed(steps: list[tuple[bool, int]]) -> None:
    pool = [FakeChunk(text(10 + 2 * i, i % 3, words=2), i, b"%d" % (i % 2), b"%d" % i) for i in range(31)]
    index, held = index_of(), set()
    for add, i in steps:
        if add and i not in held:
            index.add(pool[i])
            held.add(i)
        elif not add and i in held:
            index.remove(pool[i])
            held.remove(i)
    for i, chunk in enumerate(pool):
        assert (chunk in index.variants(chunk.tokens)) == (i in held)
    for i in held:
        index.remove(pool[i])
    one, other = (FakeChunk(text(32, seed), key=b"same") for seed in (1, 2))
    for chunk in (one, other):
        index.add(chunk)
    index.remove(one)
    assert index.under(b"same") is other
    index.remove(other)
    assert len(index) == 0
    assert not any((index._heads, index._inside, index._slots, index._behind, index._by_key))
    assert not any(index._variants)
