"""Keys, cutting, planning: pure functions, checked against a brute-force reading of what they promise."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.internals.cache import (
    HEAD_TOKENS,
    Border,
    FixedChunker,
    RowPlan,
    Segment,
    Tokens,
    common_length,
    content_only_key,
    find_stems,
    paths_of,
    plan_batch,
    plan_row,
    plan_shared,
    prefix_key,
    root_key,
    states_key,
    text_of,
)

pytestmark = pytest.mark.daily

ROOT = root_key(b"model", b"")


class FakeChunk:
    def __init__(self, key: bytes, tokens: Tokens, parent: bytes = ROOT, start: int = 0) -> None:
        self.key, self.tokens, self.parent, self.start, self.content_only = key, tokens, parent, start, False
        self.length, self.text = len(tokens), text_of(tokens)


class FakeIndex:
    """A store of the prompts in `stored`, cut by `chunker`, tails included."""

    def __init__(self, chunker: FixedChunker, *stored: Tokens) -> None:
        self.chunks: dict[bytes, FakeChunk] = {}
        self.by_parent: dict[bytes, list[FakeChunk]] = {}
        for tokens in stored:
            border = Border(0, ROOT)
            while border.at < len(tokens):
                cut = chunker.next_cut(tokens, border.at) or len(tokens)
                part = tokens[border.at : cut]
                key = prefix_key(border.key, part)
                chunk = self.chunks.setdefault(key, FakeChunk(key, part, border.key, border.at))
                self.by_parent.setdefault(border.key, []).append(chunk)
                border = Border(cut, key)

    def find(self, key: bytes, tokens: Tokens) -> FakeChunk | None:
        chunk = self.chunks.get(key)
        return chunk if chunk is not None and np.array_equal(chunk.tokens, tokens) else None

    def siblings(self, parent: bytes, head: Tokens) -> list[FakeChunk]:
        return [c for c in self.by_parent.get(parent, []) if np.array_equal(c.tokens[: len(head)], head)]


def tokens(*values: int) -> Tokens:
    return np.array(values, dtype=np.int64)


def run(n: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 50, n)


@pytest.mark.parametrize("size", [0, -1, 100.5, 100, True, "128", None])
def test_chunk_size_must_be_a_positive_multiple_of_16(size: object) -> None:
    with pytest.raises(ValueError, match=r"`chunk_size` must be a positive multiple of 16 tokens, got "):
        FixedChunker(size)  # type: ignore[arg-type]


def test_keys_tell_apart_all_that_kv_depends_on() -> None:
    a, b = tokens(1, 2, 3), tokens(1, 2, 4)
    keys = {
        prefix_key(ROOT, a),
        prefix_key(ROOT, b),
        prefix_key(prefix_key(ROOT, b), a),  # another history
        prefix_key(root_key(b"other model", b""), a),
        prefix_key(root_key(b"model", b"salt"), a),
        prefix_key(root_key(b"models", b"alt"), a),  # no ambiguity where one part ends
        content_only_key(ROOT, b"", 0, a),
        content_only_key(ROOT, b"", 1, a),
        content_only_key(ROOT, ROOT, 0, a),
        content_only_key(root_key(b"other model", b""), b"", 0, a),
        states_key(ROOT, a),
    }
    assert len(keys) == 11
    assert content_only_key(ROOT, b"", 0, a) == content_only_key(ROOT, b"", 0, a.copy())


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_common_length(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_length(tokens(*a), tokens(*b)) == expected


@given(
    shared=st.integers(0, 120),
    stored_more=st.integers(0, 80),
    row_more=st.integers(1, 80),
    held=st.integers(0, 150),
    keep=st.integers(1, 5),
)
@example(64, 0, 1, 0, 5)  # it ends inside a chunk that is there
def test_a_row_is_served_what_it_shares(shared: int, stored_more: int, row_more: int, held: int, keep: int) -> None:
    """The hit is the shared prefix, less what is too short to be looked up, and never beyond the limit."""
    chunker = FixedChunker(32)
    common = run(shared, 1)
    stored = np.concatenate([common, 100 + run(stored_more, 2)])
    row = np.concatenate([common, 200 + run(row_more, 3)])
    index = FakeIndex(chunker, stored)
    limit = len(row) - keep
    held = min(held, max(limit, 0))
    border = Border(0, ROOT)
    while (cut := chunker.next_cut(row[:held], border.at)) is not None:
        border = Border(cut, prefix_key(border.key, row[border.at : cut]))
    plan = plan_row(row, held, border, limit, chunker, index)  # type: ignore[arg-type]

    reachable = shared if shared - shared // 32 * 32 >= HEAD_TOKENS else shared // 32 * 32
    assert plan.hit == max(held, min(reachable, limit))
    at = held
    for segment in plan.segments:  # gapless, and made of the row's own tokens
        assert segment.start == at
        at = segment.stop
        part = segment.chunk.tokens[segment.offset : segment.offset + segment.stop - segment.start]
        assert np.array_equal(part, row[segment.start : segment.stop])
    assert at == plan.hit
    assert (plan.miss is None) == (plan.hit >= limit)
    if plan.miss is not None:
        assert plan.miss.at == plan.hit
    assert [b.at for b in plan.borders] == [n for n in range(32, plan.hit + 1, 32) if n > border.at]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_of_several_the_one_that_shares_most_serves(order: tuple[int, ...]) -> None:
    """Whatever else it has in the same places, and however much longer it or the row is."""
    row, new = run(40, 1), 100 + run(40, 2)
    kept = [np.r_[row[:20], new[:30]], row[:25], np.r_[row[:10], new[:1], row[11:21], new], np.r_[row[:30], new[:9]]]
    for whole in ((), (row,), (np.r_[row, run(5)], np.r_[row, new[:5]])):
        index = FakeIndex(FixedChunker(64), *whole, *(kept[n] for n in order))
        plan = plan_row(row, 0, Border(0, ROOT), 39, FixedChunker(64), index)  # type: ignore[arg-type]
        assert plan.hit == (39 if whole else 30)


def test_a_hash_collision_cannot_match() -> None:
    chunker = FixedChunker(32)
    row = run(80)
    index = FakeIndex(chunker, run(80, 9))
    for cut in (32, 64):  # another prompt's chunks, under the very keys that this row asks for
        key = prefix_key(ROOT, row[:32]) if cut == 32 else prefix_key(prefix_key(ROOT, row[:32]), row[32:64])
        index.chunks[key] = FakeChunk(key, run(32, cut))
    assert plan_row(row, 0, Border(0, ROOT), 79, chunker, index).hit == 0  # type: ignore[arg-type]


def row_plan(hit: int) -> RowPlan:
    segments = (Segment(FakeChunk(b"", run(hit)), 0, 0, hit),) if hit else ()
    return RowPlan(hit, segments, (), None)


class TestBatch:
    def test_all_rows_served_to_the_same_column(self) -> None:
        plan = plan_batch([row_plan(64), row_plan(64)], [0, 0], held=0, limit=99, min_saving=64)
        assert plan.filled == 64
        assert plan.cold_groups == {}

    def test_a_cold_row_goes_ahead_alone(self) -> None:
        plan = plan_batch([row_plan(96), row_plan(0), row_plan(96)], [0, 0, 0], held=0, limit=99, min_saving=64)
        assert plan.filled == 96
        assert plan.cold_groups == {0: [1]}

    def test_not_for_a_small_saving(self) -> None:
        plan = plan_batch([row_plan(96), row_plan(64)], [0, 0], held=0, limit=99, min_saving=64)
        assert plan.filled == 64
        assert plan_batch([row_plan(96), row_plan(64)], [0, 0], 0, 99, min_saving=16).cold_groups == {64: [1]}

    def test_padding_is_no_hit(self) -> None:
        plan = plan_batch([row_plan(0), row_plan(0)], [80, 0], held=0, limit=99, min_saving=0)
        assert plan.filled == 0

    @given(
        st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=5),
        st.integers(0, 80),
    )
    def test_never_more_work_than_without(self, rows: list[tuple[int, int]], saving: int) -> None:
        plans = [row_plan(min(hit, 99 - pad)) for hit, pad in rows]
        pads = [pad for _, pad in rows]
        plan = plan_batch(plans, pads, held=0, limit=99, min_saving=saving)
        cold = sum((plan.filled - c) * len(r) for c, r in plan.cold_groups.items())
        computed = cold + (99 - plan.filled) * len(rows)
        assert computed + saving * len(plan.cold_groups) <= 99 * len(rows)


def rows_of(*texts: str) -> list[Tokens]:
    return [np.array([ord(letter) for letter in text], dtype=np.int64) for text in texts]


class TestStems:
    def test_a_tree(self) -> None:
        rows = rows_of("abcdef", "abcdeg", "abcxyz", "q")
        assert [(sorted(s.rows), s.start, s.stop) for s in find_stems(rows, [0] * 4, 0)] == [
            ([0, 1, 2], 0, 3),
            ([0, 1], 3, 5),
        ]

    def test_what_is_not_worth_a_forward_is_joined(self) -> None:
        rows = rows_of("abcdef", "abcdef", "abcdef", "a")
        assert [(sorted(s.rows), s.start, s.stop) for s in find_stems(rows, [0] * 4, 4)] == [([0, 1, 2], 0, 6)]

    def test_rows_that_know_it_are_not_part_of_it(self) -> None:
        rows = rows_of("abcdefgh", "abcdefgh", "abcdexyz")
        assert [(s.rows, s.start, s.stop) for s in find_stems(rows, [0, 2, 6], 0)] == [((0, 1), 0, 5), ((0, 1), 5, 8)]

    def test_equal_rows_of_a_batch(self) -> None:
        plan = plan_batch([row_plan(0)] * 4, [0] * 4, held=0, limit=99, min_saving=64)
        shared = plan_shared(plan, rows_of(*["a" * 100] * 4), 0, 99, 99, 64)
        assert (shared.filled, shared.ahead, shared.cost(99, 64)) == (99, 99, 99 + 64)
        assert plan_shared(plan, rows_of(*["a" * 100] * 4), 0, 99, 0, 64) is plan

    def test_a_forward_that_saves_just_what_it_costs_is_not_made(self) -> None:
        tokens, saved = rows_of(*["a" * 100] * 4), 3 * 99
        for cost in (saved - 1, saved, saved + 1):
            plan = plan_batch([row_plan(0)] * 4, [0] * 4, held=0, limit=99, min_saving=cost)
            assert (plan_shared(plan, tokens, 0, 99, 99, cost) is plan) == (cost >= saved)

    @given(
        st.lists(st.tuples(st.text("ab", min_size=1, max_size=60), st.integers(0, 30)), min_size=2, max_size=7),
        st.integers(0, 20),
        st.integers(1, 5),
        st.integers(0, 30),
    )
    @example([("aaabb", 0), ("aab", 1)], 1, 1, 0)  # a stem that saves just what it costs
    @example([("a" * 40, 0), *[("a" * 38, 0)] * 3], 0, 1, 4)  # behind padding that is held
    @example([("a" * 40, 9)] * 3, 0, 1, 4)
    def test_any_batch(self, given_rows: list[tuple[str, int]], saving: int, logits: int, held: int) -> None:
        """Less work than without, or no stems; paths have no gaps, begin in what is known, and are of their row."""
        tokens = rows_of(*(text for text, _ in given_rows))
        columns = max(map(len, tokens))
        limit = max(columns - logits, 0)
        pads = [columns - len(row) for row in tokens]
        held = min(held, limit)
        hits = [max(min(hit, limit - pad), held - pad, 0) for (_, hit), pad in zip(given_rows, pads, strict=True)]
        alone = plan_batch([row_plan(hit) for hit in hits], pads, held, limit, saving)
        plan = plan_shared(alone, tokens, 0, limit, limit, saving)
        assert plan is alone or plan.cost(limit, saving) < alone.cost(limit, saving)
        assert held <= plan.filled <= max(limit, held)
        stems = [stem for group in plan.stems for stem in group]
        assert all(stems)  # none is empty
        assert all(stem.start >= min(hits[row] for row in stem.rows) for stem in stems)  # none is known to all
        if stems:
            assert plan.paths == tuple(map(tuple, paths_of(stems, len(tokens))))
        for row, pad in enumerate(pads):
            path = plan.path(row)
            assert plan.starts(row) <= max(plan.filled, pad)
            known = max(plan.rows[row].hit, held - pad)
            for stem in path:
                assert stem.start <= known  # continues what comes before it
                known = stem.stop
                assert np.array_equal(tokens[row][: stem.stop], tokens[stem.rows[0]][: stem.stop])
                assert stem.stop <= max(limit - pad, 0)
            if path:  # what the store serves ends where they begin
                assert all(segment.stop <= path[0].start for segment in plan.rows[row].segments)
