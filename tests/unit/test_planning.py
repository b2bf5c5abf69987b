"""What is decided without tensors, beside a reading of each promise that tries everything."""

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_hf import ReusePolicy
from tests.internals.cache import (
    HEAD_TOKENS,
    LAST_TOKENS,
    REPAIRS,
    Border,
    FixedChunker,
    MovedColumns,
    RepairRow,
    ReusePlan,
    RowPlan,
    Segment,
    Stem,
    best_order,
    budget,
    cut_off,
    find_stems,
    in_groups,
    plan_batch,
    plan_blend,
    plan_row,
    prefix_key,
    prompt_plan,
    trim_row,
)
from tests.unit.test_chunks_and_plan import ROOT, FakeIndex

pytestmark = pytest.mark.daily

# Orders


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 3), st.lists(st.permutations(range(3)), max_size=3), st.data())
def test_the_best_order_is_found(count: int, stored: list[list[int]], data: st.DataObject) -> None:
    """Documents of `HEAD_TOKENS` tokens each, behind 3 others."""
    texts = [[doc for doc in text if doc < count][: data.draw(st.integers(0, 3))] for text in stored]
    asked = list[tuple[int, ...]]()

    def known(docs: list[int]) -> int:
        asked.append(tuple(docs))
        common = [next((n for n, doc in enumerate(docs) if text[n : n + 1] != [doc]), len(docs)) for text in texts]
        return 3 + HEAD_TOKENS * max(common, default=0)

    found = best_order(range(count), known)
    given, best = known(list(range(count))), max(known(list(each)) for each in permutations(range(count)))
    assert (found.tokens, found.tokens_as_given) == (best, given)
    assert found.saved_tokens == best - given
    assert sorted(found.documents) == list(range(count))
    assert known(found.documents) == best
    if best == given:
        assert found.documents == list(range(count))
    rest = found.documents[(best - 3) // HEAD_TOKENS :]
    assert rest == sorted(rest)


def test_few_orders_are_looked_up() -> None:
    """Where everything is stored in every order, as where nothing is."""
    for step, most in ((HEAD_TOKENS, 2 * 64 + 8 + 3), (HEAD_TOKENS - 1, 2 + 8)):
        asked = list[int]()

        def known(docs: list[int], step: int = step, asked: list[int] = asked) -> int:
            asked.append(len(docs))
            return step * len(docs)

        assert best_order(range(8), known).documents == list(range(8))
        assert len(asked) <= most


def test_ties_stay_as_they_were_given() -> None:
    def known(docs: list[int]) -> int:
        return 20 * len([doc for doc, other in zip(docs, (2, 1), strict=False) if doc == other or doc == 3])

    assert best_order([0, 1, 2, 3], known).documents == [2, 1, 0, 3]


def test_groups_of_stems() -> None:
    stems = [Stem((0, 1), 0, 8), Stem((2, 3), 0, 6), Stem((0, 1), 8, 12), Stem((4, 5), 0, 3)]
    assert [len(stem) for stem in stems] == [8, 6, 4, 3]
    a, b, c, d = stems
    for waste, padded, equal, wanted in [
        (2, True, False, [(a, b), (d,), (c,)]),
        (1, True, False, [(a,), (b,), (d,), (c,)]),
        (5, True, False, [(a, b, d), (c,)]),
        (9, False, False, [(d,), (b,), (a,), (c,)]),
        (9, True, True, [(a, b, d), (c,)]),
    ]:
        assert in_groups(stems, 6, waste, padded=padded, equal_starts=equal) == wanted
    behind = [a, b, c, Stem((2, 3), 6, 10)]
    assert in_groups(behind, 6, 9, padded=True, equal_starts=True)[1:] == [(behind[3],), (c,)]
    assert in_groups(behind, 6, 9, padded=True, equal_starts=False)[1:] == [(c, behind[3])]


# Rows with states


class _Chunk:
    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length


def _row(states: dict[int, Any] | None = None) -> RowPlan:
    """[0, 8), [8, 16) and [16, 20) of three chunks."""
    parts = [(0, 8), (8, 16), (16, 20)]
    segments: Any = tuple(Segment(_Chunk(start, 8), 0, start, stop) for start, stop in parts)  # type: ignore[arg-type]
    return RowPlan(20, segments, (Border(8, b"a"), Border(16, b"b")), None, states)


def test_a_plan_is_cut_at_any_token() -> None:
    saved = {4: "four", 8: "eight", 16: "sixteen"}
    for stop in range(23):
        found = cut_off(_row(saved), stop)
        assert found.hit == min(stop, 20)
        assert [(s.start, s.stop) for s in found.segments] == [
            (start, min(end, stop)) for start, end in [(0, 8), (8, 16), (16, 20)] if start < stop
        ]
        assert [border.at for border in found.borders] == [at for at in (8, 16) if at <= stop]
        assert found.states is not None
        assert list(found.states) == [at for at in saved if at <= stop]
        assert cut_off(_row(), stop).states is None
        assert _row(saved).reach(stop) == max([at for at in saved if at <= stop], default=0)
        assert _row().reach(stop) == min(stop, 20)
    assert RowPlan(5, (), (), None).reach(9) == 0  # held, and nothing of it stored


@pytest.mark.parametrize(("keep", "hit"), [(0, 0), (1, 8), (2, 16), (3, 20)])
def test_what_saves_nothing_is_left_out_with_its_states(keep: int, hit: int) -> None:
    savings = iter([1.0] * keep + [-1.0] * (3 - keep))
    plan = _row({4: "four", 8: "eight", 16: "sixteen", 20: "end"})
    found = trim_row(plan, lambda _: next(savings))
    assert (found.hit, len(found.segments)) == (hit, keep)
    assert list(found.states or ()) == [at for at in (4, 8, 16, 20) if at <= hit]
    assert [border.at for border in found.borders] == [at for at in (8, 16) if at <= hit]
    assert (found is plan) == (keep == 3)
    ties = iter([0.0, 0.0, -1.0])
    assert trim_row(plan, lambda _: next(ties)).hit == 16  # what costs nothing is served


def test_a_segment_says_how_far_it_has_moved_and_whether_it_ends_its_chunk() -> None:
    segment = Segment(_Chunk(30, 8), 2, 10, 15)  # type: ignore[arg-type]
    assert (segment.shift, segment.to_end) == (-22, False)
    assert Segment(_Chunk(30, 8), 2, 10, 16).to_end  # type: ignore[arg-type]


def test_how_far_a_row_of_a_batch_can_be_served() -> None:
    for states, wanted in ((None, [0, 12, 18]), ({4: "", 14: ""}, [0, 4, 14])):
        for held in (0, 3):
            plan = ReusePlan(held, 0, (_row(states),), (2,))
            reach = [ReusePlan(held, filled, (_row(states),), (2,)).starts(0) for filled in (2, 14, 20)]
            assert reach == [max(held, at + 2) for at in wanted]
            stem = Stem((0, 1), 12, 17)
            with_stem = ReusePlan(held, 0, (_row(states),), (2,), ((stem,),), ((stem,),))
            assert with_stem.path(0) == (stem,)
            assert plan.path(0) == ()
            if states is None:
                assert [with_stem.reach(0, stop) for stop in (5, 14, 17, 18)] == [5, 14, 17, 18]
            else:
                assert [with_stem.reach(0, stop) for stop in (13, 16, 17, 18)] == [4, 14, 17, 17]


class _Saved:
    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens


class _WithStates(FakeIndex):
    """And states, by the key of the border before them."""

    def __init__(self, stored: Any, ends: list[int]) -> None:
        super().__init__(FixedChunker(16), stored)
        self.states: dict[bytes, list[_Saved]] = {}
        for end in ends:
            at, key = 0, ROOT
            while at + 16 < end:
                key = prefix_key(key, stored[at : at + 16])
                at += 16
            self.states.setdefault(key, []).append(_Saved(stored[at:end]))
        self.states.setdefault(ROOT, []).append(_Saved(stored[:6] + 1))  # of another text

    def states_after(self, parent: bytes, head: Any) -> list[_Saved]:
        return [each for each in self.states.get(parent, []) if len(head) == HEAD_TOKENS]


@pytest.mark.parametrize("limit", [35, 36, 37, 39])
@pytest.mark.parametrize("held", [0, 5, 16, 17, 36])
def test_states_that_a_row_can_go_on_from(held: int, limit: int) -> None:
    text, ends = np.arange(100, 140), [5, 8, 16, 20, 32, 36, 38]
    border = Border(0, ROOT)
    for at in (16, 32):
        if at <= held:
            border = Border(at, prefix_key(border.key, text[at - 16 : at]))
    found = plan_row(text, held, border, limit, FixedChunker(16), _WithStates(text, ends), stateful=True)
    assert found.hit == max(held, limit)
    assert sorted(found.states or ()) == [at for at in ends if held < at <= found.hit]
    plain = plan_row(text, held, border, limit, FixedChunker(16), _WithStates(text, ends))
    assert (plain.states, plain.hit) == (None, found.hit)
    short = plan_row(text[:39], held, border, 39, FixedChunker(16), _WithStates(text, ends), stateful=True)
    assert max(short.states or (0,)) <= 32  # seven tokens behind a border are not looked up


def test_a_border_that_is_not_the_last_one_is_caught_up_with() -> None:
    text = np.arange(100, 140)
    for held in (15, 16, 17, 32):
        found = plan_row(text, held, Border(0, ROOT), 39, FixedChunker(16), _WithStates(text, []))
        assert found.hit == 39
        assert all(segment.start < segment.stop for segment in found.segments)
        assert found.segments[0].start == held


def test_what_is_held_is_not_served_again() -> None:
    """Also where the nearest stored chunk agrees just as far as the row is held."""
    text = np.arange(100, 140)
    row = text.copy()
    row[26:] += 7
    border = Border(16, prefix_key(ROOT, text[:16]))
    for held, wanted in ((25, [(25, 26)]), (26, []), (27, [])):
        found = plan_row(row, held, border, 39, FixedChunker(16), _WithStates(text, []))
        assert [(segment.start, segment.stop) for segment in found.segments] == wanted
        assert found.hit == max(held, 26)


def test_of_several_stems_the_last_that_fits_is_reached() -> None:
    stems = (Stem((0, 1), 4, 8), Stem((0, 1), 8, 14), Stem((0, 1), 14, 19))
    cases: list[tuple[Any, list[int]]] = [({}, [0, 8, 8, 14, 19]), (None, [5, 8, 13, 14, 19])]
    for states, wanted in cases:
        row = RowPlan(4, (), (), None, states)
        plan = ReusePlan(0, 20, (row,), (0,), (stems,), (stems,))
        assert [plan.reach(0, stop) for stop in (5, 8, 13, 14, 20)] == wanted


def test_states_are_put_back_where_every_row_has_begun() -> None:
    states = dict.fromkeys([4, 8, 12, 16], "")
    for pads, wanted in (((0, 0), 16), ((0, 12), 16), ((0, 16), 0), ((0, 15), 16)):
        plan = plan_batch([_row(states), RowPlan(0, (), (), None, {})], pads, 0, 24, 1)
        assert plan.filled in (0, wanted)
        assert plan.filled == 0 or plan.filled > max(pads)
    one = plan_batch([_row(states)], (9,), 0, 24, 1)
    assert one.filled == 16 + 9


def test_a_branch_is_where_stored_kv_ends_behind_the_last_states() -> None:
    for states, filled, wanted in (({16: ""}, 16, 20), ({16: ""}, 20, None), (None, 20, None), (None, 14, 20)):
        assert ReusePlan(0, filled, (_row(states),), (0,)).branch == wanted
    assert ReusePlan(0, 4, (RowPlan(9, (), (), None),), (0,)).branch is None  # held, and nothing of it stored
    assert ReusePlan(0, 4, (RowPlan(0, (), (), None), _row()), (0, 3)).branch == 23


def test_stems_save_as_much_as_they_must() -> None:
    rows = [np.array([1, 2, 3, 4, 5, 6, 7, 8])] * 3
    for known, saved in (([0, 0, 0], 16), ([3, 3, 3], 10), ([0, 3, 8], 0), ([2, 3, 8], 0)):
        for least in (saved, saved + 1):
            found = find_stems(rows, known, least)
            if known[2] == 8:  # two rows are left
                begin = known[0]
                assert [(stem.rows, stem.start) for stem in find_stems(rows, known, 8 - begin)] == [((0, 1), begin)]
                assert find_stems(rows, known, 9 - begin) == []
            else:
                assert len(found) == (least == saved)
    assert find_stems(rows[:1], [0], 0) == []
    assert find_stems([rows[0], rows[0] + 9], [0, 0], 0) == []


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=5),
    st.integers(0, 6),
    st.integers(0, 20),
)
def test_rows_that_have_less_are_prefilled_first(rows: list[tuple[int, int]], held: int, more: int) -> None:
    """Rows of (hit, padding)."""
    filled = held + more
    plans = [cut_off(_row(), hit) for hit, _ in rows]
    plan = ReusePlan(held, filled, tuple(plans), tuple(pad for _, pad in rows))
    starts = [max(held, pad, min(hit + pad, filled)) if hit else max(held, pad) for hit, pad in rows]
    groups: dict[int, list[int]] = {}
    cold = [row for row, (_, pad) in enumerate(rows) if starts[row] < filled and starts[row] <= max(held, pad)]
    for row, start in enumerate(starts):
        if start < filled and row not in cold:
            groups.setdefault(start, []).append(row)
    if cold:
        start = max(held, min(rows[row][1] for row in cold))
        while start in groups:
            start -= 1
        groups[start] = cold
    assert plan.cold_groups == groups
    ahead = sum((filled - column) * len(group) for column, group in groups.items())
    assert plan.ahead == ahead
    assert plan.cost(filled + 3, 10) == ahead + 3 * len(rows) + 10 * len(groups)
    stems = ((Stem((0,), 0, 5), Stem((1,), 0, 3)), (Stem((0,), 5, 7),))
    with_stems = ReusePlan(held, filled, tuple(plans), plan.pads, (), stems)
    assert with_stems.ahead == ahead + 2 * 5 + 2
    assert with_stems.cost(filled, 10) == ahead + 12 + 10 * (len(groups) + 2)
    ends = [
        [border.at + pad for border in each.borders if border.at + pad <= filled]
        for each, (_, pad) in zip(plans, rows, strict=True)
    ]
    assert plan.last_border == min(max(each, default=held) for each in ends)


@pytest.mark.parametrize(("logits", "sinks"), [(1, 0), (LAST_TOKENS, 4), (LAST_TOKENS + 1, 30)])
def test_what_may_be_moved(logits: int, sinks: int) -> None:
    """Equal rows are looked up once; the last tokens, and those at the beginning, never move."""
    asked = list[tuple[int, int, int]]()
    ids = np.stack([np.arange(64), np.arange(64), np.arange(64) + 5, np.arange(64)])
    exact = ReusePlan(0, 20, (_row(), _row(), RowPlan(0, (), (), None), _row()), (0, 0, 4, 6))

    def find(own: Any, start: int, stop: int) -> tuple[Segment, ...]:
        asked.append((len(own), start, stop))
        return (Segment(_Chunk(7, 8), 0, 40, 44, moved=True),) if len(own) == 60 else ()  # type: ignore[arg-type]

    plan = plan_blend(ids, exact, logits, find, sinks)
    last = max(logits, LAST_TOKENS)
    assert asked == [(64, max(20, sinks), 64 - last), (60, sinks, 60 - last), (58, max(20, sinks), 58 - last)]
    assert plan is not None
    assert [np.flatnonzero(row.moved).tolist() for row in plan.rows] == [[], [], [44, 45, 46, 47], []]
    assert [row.seams for row in plan.rows] == [(), (), (44,), ()]
    assert [int(row.computed.argmax()) for row in plan.rows] == [20, 20, 4, 26]
    assert [int(row.computed.sum()) for row in plan.rows] == [44, 44, 56, 38]
    assert plan.first_computed == 4
    assert plan.moved.sum() == 4
    assert plan.present.sum(axis=1).tolist() == [20, 20, 8, 26]
    assert [row.hit for row in plan.reuse.rows] == [64, 64, 60, 58]
    assert plan_blend(ids[:2], ReusePlan(0, 20, exact.rows[:2], (0, 0)), logits, find, sinks) is None


# How a prompt is cut for states, and when it is loaded beside its forward


def test_where_states_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last border, where prompts part, before the first image, and at even distances from these."""

    def cuts(
        filled: int,
        *,
        border: int = 96,
        segments: bool = True,
        rows: int = 1,
        pads: tuple[int, ...] = (0,),
        **more: Any,
    ) -> tuple[list[int], list[int], list[int]]:
        monkeypatch.setattr(prompt_plan, "can_segment", lambda mixers, layers: segments)
        monkeypatch.setattr(prompt_plan, "spacing_of", lambda device: 16)
        store = SimpleNamespace(chunker=SimpleNamespace(chunk_size=32))
        stateful, regime = more.pop("stateful", True), more.pop("regime", b"")
        binding = SimpleNamespace(store=store, fact=lambda model, find: ())
        parts = SimpleNamespace(live=SimpleNamespace(stateful=stateful, regime=regime, layers=[]), binding=binding)
        ledger = SimpleNamespace(last_border=lambda limit, store, ids: border)
        media = np.zeros((rows, 100), dtype=bool)
        media[0, more.pop("media", [])] = True
        inputs = SimpleNamespace(input_ids=torch.zeros(rows, 1), verifies=more.pop("verifies", False))
        new = SimpleNamespace(media=media, cut=lambda column: column)
        told = {"limit": more.pop("limit", 99), "least": more.pop("least", 1)}
        prompt = SimpleNamespace(**told, new=new, ids=None, inputs=inputs)
        plan = SimpleNamespace(filled=filled, stems=more.pop("stems", ()), branch=more.pop("branch", None), pads=pads)
        plan.rows = [None] * rows
        assert not more
        given: tuple[Any, ...] = parts, None, plan, ledger, prompt
        return prompt_plan._state_cuts(*given)

    spaced = [16, 32, 48, 64, 80]
    assert cuts(0) == ([], [96], spaced)
    assert cuts(0, border=90) == ([], [90], spaced)
    assert cuts(0, border=88) == ([], [88], [*spaced, 96])
    assert cuts(0, border=87) == ([], [87], [16, 32, 48, 64, 96])
    assert cuts(80, border=96) == ([], [96], [])
    assert cuts(82, border=96) == ([], [], [98])  # it is too close to what is stored
    assert cuts(82, border=96, stems=((0,),)) == ([], [96], [])
    assert cuts(40, border=96, branch=60) == ([], [60, 96], [72, 88])
    assert cuts(40, border=96, branch=41) == ([], [41, 96], [56, 72, 88])
    assert cuts(40, border=96, branch=41, least=2) == ([], [96], [56, 72, 88])
    assert cuts(40, border=96, branch=94, least=2) == ([], [94, 96], [56, 72])
    assert cuts(40, border=96, branch=95, least=2) == ([], [95], [56, 72])
    assert cuts(0, stateful=False) == cuts(0, regime=b"long") == ([], [], [])
    assert cuts(98, border=96) == ([], [], [])
    assert cuts(99, border=96) == ([], [], [])
    assert cuts(0, border=96, limit=96, media=[50, 51]) == ([], [50, 96], [16, 32, 64, 80])
    assert cuts(0, segments=False) == ([96], [], [])
    assert cuts(0, segments=False, media=[50, 51]) == ([50], [], [])  # those behind it would lack the image
    assert cuts(0, verifies=True) == ([96], [], spaced)
    assert cuts(20, rows=2, pads=(0, 40)) == ([96], [], [52, 68, 84])
    assert cuts(20, rows=2, pads=(0, 96), branch=60) == ([], [], [])


@pytest.mark.parametrize("below", [True, False])
def test_what_is_worth_loading_beside_the_forward(below: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mebibyte of lower tiers; or, if nothing is there, of host memory that has to be copied."""

    def chunk(nbytes: int) -> Any:
        found = SimpleNamespace(entry=SimpleNamespace(nbytes=nbytes)) if below else None
        return SimpleNamespace(found=found, nbytes=nbytes, kv=SimpleNamespace(nbytes_elsewhere=nbytes))

    for sizes, worth in (((2**20,), True), ((2**20 - 1,), False), ((2**19, 2**19), True), ((), False)):
        monkeypatch.setattr(prompt_plan, "chunks_of", lambda plan, sizes=sizes: [chunk(size) for size in sizes])
        for rows, hands_out, kept in ((1, True, True), (2, False, True), (2, True, below)):
            layers: Any = [SimpleNamespace(hands_out=hands_out)]
            plan: Any = SimpleNamespace(rows=[None] * rows)
            assert prompt_plan._is_worth_overlapping(layers, plan) is (worth and kept)


# Moved columns


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text("me.", min_size=9, max_size=9), min_size=1, max_size=3), st.integers(0, 10), st.integers(0, 4))
def test_moved_columns(rows: list[str], held: int, most: int) -> None:
    """By letters: moved and stale, moved and exact again, computed."""
    moved = np.array([[letter in "me" for letter in row] for row in rows])
    stale = np.array([[letter == "m" for letter in row] for row in rows])
    found, firsts = MovedColumns(moved, stale), [row.find("m") for row in rows]
    assert [found.is_tainted(row) for row in range(len(rows))] == [first >= 0 for first in firsts]
    tainted = [first for first in firsts if first >= 0]
    assert [found.tainted_from(row) for row, first in enumerate(firsts) if first >= 0] == tainted
    assert found.tainted_columns(held) == sum(max(0, held - first) for first in tainted)
    if tainted:
        assert found.exact_columns == min(tainted)
    held = max(held, 9)
    following = found.next_tainted(held, most)
    assert following.tolist() == [[0 <= first <= at < first + most for at in range(held)] for first in firsts]
    rest = found.repaired(following)
    left = [[0 <= first and first + most <= at for at in range(held)] for first in firsts]
    assert (rest is None) == (not any(map(any, left)))
    if rest is not None:
        assert rest.stale.tolist() == left
        assert rest.moved.tolist() == [[*row, *[False] * (held - 9)] for row in moved.tolist()]
    for row, text in enumerate(rows):
        for column in range(11):
            runs = [letter in "me" for letter in text[column:]]
            if not runs:
                assert found.run_at(row, column) == (False, None)
            else:
                change = next((column + n for n, each in enumerate(runs) if each != runs[0]), None)
                end = 9 if change is None and runs[0] else change
                assert found.run_at(row, column) == (runs[0], end)
            assert found.run_ends(row, column) == ("m" in text and any(runs))
    for length in range(10):
        cropped = found.crop(length)
        assert (cropped is None) == (not stale[:, :length].any())
        if cropped is not None:
            assert (cropped.moved.shape[1], cropped.stale.shape[1]) == (length, length)
    order = np.array([0, len(rows) - 1, 0])
    chosen = found.select(order)
    assert (chosen is None) == (not stale[order].any())
    if chosen is not None:
        assert chosen.moved.tolist() == moved[order].tolist()
    wider = np.zeros((len(rows), 11), dtype=bool)
    wider[:, 10] = True
    longer = found.extend(wider, wider)
    assert longer.moved.tolist() == [[*row, False, True] for row in moved.tolist()]
    assert longer.stale.tolist() == [[*row, False, True] for row in stale.tolist()]
    assert wider.sum() == len(rows)  # it is the caller's


@pytest.mark.parametrize(("slack", "count"), [(1.0, 5), (1.5, 8), (2.0, 10)])
def test_more_is_kept_while_it_can_be_measured_again(slack: float, count: int) -> None:
    moved = np.zeros(100, dtype=bool)
    moved[10:60] = True
    row = RepairRow(~moved, moved, (10, 40))
    policy = ReusePolicy(mode="blend", repair="cacheblend", recompute_ratio=0.1, overlap_k=3)
    found = np.flatnonzero(REPAIRS["cacheblend"].choose(row, policy, np.arange(100.0), slack))
    assert found.tolist() == [37, 38, 39, *range(60 - count + 3, 60)]


def test_scores_are_needed_for_more_than_a_token_at_each_seam() -> None:
    moved = np.ones(40, dtype=bool)
    row = RepairRow(~moved, moved, (0, 20))  # 15% behind each seam are three
    cases: list[tuple[Any, float | None, float | None, bool]] = [
        ("cacheblend", None, None, True),
        ("cacheblend", 0.0, None, False),
        ("cacheblend", 0.05, None, False),
        ("cacheblend", 0.06, None, True),
        ("cacheblend", 0.0, 0.5, True),
        ("cacheblend", 0.5, 0.5, True),
        ("none", None, None, False),
    ]
    for name, ratio, most, needed in cases:
        policy = ReusePolicy(mode="blend", repair=name, recompute_ratio=ratio, max_recompute_ratio=most, overlap_k=0)
        assert REPAIRS[name].needs_scores(row, policy) == needed, (name, ratio, most)
    assert [budget(row, ratio) for ratio in (None, 0.0, 0.05, 0.06, 0.1, 1.0)] == [6, 0, 2, 3, 4, 40]


def test_nothing_is_computed_again_where_nothing_is_attended_to() -> None:
    moved = np.ones(20, dtype=bool)
    policy = ReusePolicy(mode="blend", repair="query", recompute_ratio=0.0, max_recompute_ratio=0.5)
    row = RepairRow(~moved, moved, (0,))
    assert not REPAIRS["query"].choose(row, policy, np.zeros(20)).any()
    some = np.zeros(20)
    some[7] = 1.0
    assert np.flatnonzero(REPAIRS["query"].choose(row, policy, some)).tolist() == [7]
