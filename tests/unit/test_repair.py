"""Which moved tokens are computed again: by place, by what is measured, and how many."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_hf import ReusePolicy
from tests.internals.cache import REPAIRS, MovedColumns, RepairRow, Scores, choose_columns, goes_on

pytestmark = pytest.mark.daily


def row(*moved: tuple[int, int], length: int = 100, seams: tuple[int, ...] | None = None) -> RepairRow:
    """A row with moved tokens in some intervals, each of which begins with a seam unless seams are told."""
    served = np.zeros(length, dtype=bool)
    for start, stop in moved:
        served[start:stop] = True
    return RepairRow(~served, served, tuple(start for start, _ in moved) if seams is None else seams)


def policy(repair: str, **settings: Any) -> ReusePolicy:
    return ReusePolicy(mode="blend", repair=repair, **settings)  # type: ignore[arg-type]


def chosen(repair: str, given_row: RepairRow, scores: Scores | None = None, **settings: Any) -> list[int]:
    found = REPAIRS[repair].choose(given_row, policy(repair, **settings), scores)
    return np.flatnonzero(found).tolist()


def test_none_and_overlap() -> None:
    assert chosen("none", row((10, 40), (40, 60))) == []
    assert chosen("none", row((10, 40), (40, 60)), overlap_k=3) == [37, 38, 39]  # what is before 10 is computed anyway


def test_selective_is_after_a_seam() -> None:
    both = row((10, 40), (40, 60))
    assert chosen("selective", both, seam_tokens=2) == [10, 11, 40, 41]
    assert chosen("selective", row((10, 60), seams=(10,)), seam_tokens=2) == [10, 11]  # one run: one seam


def test_first_k_shares_the_ratio_and_gives_what_short_chunks_leave_to_others() -> None:
    assert chosen("first_k", row((10, 30), (50, 80)), recompute_ratio=0.2) == [*range(10, 15), *range(50, 55)]
    assert len(chosen("first_k", row((0, 4), (4, 100)), recompute_ratio=0.5)) == 50


def test_scores_fill_up_the_ratio() -> None:
    scores = np.arange(100.0)
    assert chosen("cacheblend", row((10, 60)), scores, recompute_ratio=0.1) == [55, 56, 57, 58, 59]


def test_what_is_attended_to_counts_less_the_farther_it_is_from_its_seam() -> None:
    even = row((10, 60), (70, 90))
    assert chosen("query", even, np.ones(100), recompute_ratio=0.1) == [10, 11, 12, 13, 70, 71, 72]
    scores = np.ones(100)
    scores[58] = (1 + 48 / 8) ** 0.5 + 0.01  # that much makes up for 48 tokens
    assert chosen("query", even, scores, recompute_ratio=0.01) == [58]
    scores[58] -= 0.02
    assert chosen("query", even, scores, recompute_ratio=0.01) == [10]


def test_far_from_its_seam_hardly_anything_is_computed_again_unless_a_ratio_is_given() -> None:
    edited = row((10, 4010), length=4100)
    assert len(chosen("query", edited, np.ones(4100))) == 64
    assert len(chosen("query", edited, np.ones(4100), recompute_ratio=0.15)) == 600
    assert len(chosen("query", row((10, 4010), length=4100, seams=(10, 2010)), np.ones(4100))) == 128
    assert len(chosen("query", row((10, 90)), np.ones(100))) == 12  # 15%


def test_a_short_text_between_two_edits_allows_a_share_of_its_own_tokens() -> None:
    """Not as many as a long one; moved tokens before all seams, which go on from exact ones, allow none."""
    between = row((10, 2010), (2020, 2040), length=2100)
    assert len(chosen("query", between, np.ones(2100))) == 64 + 3
    assert len(chosen("query", row((10, 2010), length=2100, seams=(1990,)), np.ones(2100))) == 3
    assert chosen("query", row((10, 2010), length=2100, seams=()), np.ones(2100)) == []


@pytest.mark.parametrize(
    ("given_policy", "goes_on_after"),
    [(None, (False, "ride", "ride")), *((each, (each,) * 3) for each in (True, False, 16, "ride"))],
)
def test_the_repair_goes_on_where_seams_are_dense(given_policy: Any, goes_on_after: tuple[Any, ...]) -> None:
    """Not behind an edit, but with six notes, and with four documents of 800 tokens."""
    found = policy("query", progressive=given_policy)
    assert tuple(goes_on(found, moved, seams) for moved, seams in ((4000, 1), (1400, 6), (3300, 4))) == goes_on_after


@pytest.mark.parametrize("seams", [1, 4])
def test_a_seam_for_every_1024_tokens_is_dense(seams: int) -> None:
    found = policy("query", progressive=None)
    assert goes_on(found, 1024 * seams, seams) == "ride"
    assert goes_on(found, 1024 * seams + 1, seams) is False


def test_the_controller_raises_the_ratio_until_enough_is_covered() -> None:
    scores = np.zeros(100)
    scores[20:30] = 1.0  # a fifth of the tokens has all there is
    fixed = {"recompute_ratio": 0.1}
    given_row = row((10, 60))
    assert len(chosen("cacheblend", given_row, scores, **fixed)) == 5
    assert chosen("cacheblend", given_row, scores, **fixed, max_recompute_ratio=0.5) == list(range(20, 29))
    assert len(chosen("cacheblend", given_row, scores, **fixed, max_recompute_ratio=0.14)) == 7
    assert len(chosen("cacheblend", given_row, scores, **fixed, max_recompute_ratio=0.5, min_coverage=0.3)) == 5


def test_scores_are_measured_where_the_budget_exceeds_what_is_chosen_by_place() -> None:
    def needs(repair: str, **settings: Any) -> bool:
        return REPAIRS[repair].needs_scores(row((10, 60)), policy(repair, **settings))

    assert [needs("cacheblend", recompute_ratio=ratio) for ratio in (0.0, 0.02, 0.04)] == [False, False, True]
    assert needs("cacheblend", recompute_ratio=0.02, max_recompute_ratio=0.04)
    assert not needs("cacheblend", recompute_ratio=0.02, max_recompute_ratio=0.02)
    assert not any(needs(repair, recompute_ratio=0.5) for repair in ("none", "selective", "first_k"))


@given(
    cuts=st.lists(st.integers(1, 99), min_size=1, max_size=12, unique=True).map(sorted),
    ratio=st.floats(0, 1),
    repair=st.sampled_from(["first_k", "query", "cacheblend"]),
    seed=st.integers(0, 100),
)
def test_the_ratio_holds(cuts: list[int], ratio: float, repair: str, seed: int) -> None:
    given_row = row((5, 100), seams=(5, *[cut for cut in cuts if cut > 5]))
    scores = None if repair == "first_k" else np.random.default_rng(seed).random(100)
    found = chosen(repair, given_row, scores, recompute_ratio=ratio)
    wanted = int(np.ceil(95 * ratio - 1e-9))
    assert set(found) <= set(range(5, 100))
    assert len(found) <= wanted
    assert len(found) >= wanted - (len(given_row.seams) if repair == "first_k" else 0)
    if ratio == 1:
        assert len(found) == 95


def test_rows_get_equally_many_columns() -> None:
    wanted = [np.isin(np.arange(10), found) for found in ([1, 9], [2, 3, 4, 9], [])]
    spare = [np.arange(10) >= 1] * 3
    found = choose_columns(wanted, spare)
    assert found.shape == (3, 4)
    assert found[1].tolist() == [2, 3, 4, 9]
    assert {1, 9} <= set(found[0].tolist())
    assert (np.diff(found, axis=1) > 0).all()
    assert found.min() >= 1


class TestBlended:
    moved = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], dtype=bool)
    stale = np.array([[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=bool)
    blended = MovedColumns(moved, stale)

    def test_taint_begins_with_the_first_stale_column(self) -> None:
        assert self.blended.is_tainted(0)
        assert not self.blended.is_tainted(1)
        assert self.blended.tainted_from(0) == 2
        assert self.blended.tainted_columns(5) == 3
        assert self.blended.tainted_columns(1) == 0

    def test_pieces(self) -> None:
        pieces, at = [], 0
        while True:
            moved, stop = self.blended.run_at(0, at)
            pieces.append((at, moved))
            if stop is None:
                break
            at = stop
        assert pieces == [(0, False), (1, True), (3, False), (4, True), (5, False)]
        assert self.blended.run_at(0, 7) == (False, None)

    def test_columns_are_repaired_in_order(self) -> None:
        first = self.blended.next_tainted(8, 3)
        assert [np.flatnonzero(row).tolist() for row in first] == [[2, 3, 4], []]
        left = self.blended.repaired(first)
        assert left is not None
        assert left.tainted_from(0) == 5
        assert left.run_at(0, 1) == (True, 3)  # which of them were moved is still known
        last = left.next_tainted(9, 100)  # a token was decoded meanwhile
        assert np.flatnonzero(last[0]).tolist() == [5, 6, 7, 8]
        assert left.repaired(last) is None

    def test_nothing_is_left_of_it(self) -> None:
        assert self.blended.crop(2) is None
        assert self.blended.select(np.array([1, 1])) is None
        kept = self.blended.select(np.array([1, 0]))
        assert kept is not None
        assert [kept.is_tainted(i) for i in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repair": "all"}, r"`repair` must be one of .*'query'.*, got 'all'\."),
        ({"recompute_ratio": 1.5}, r"`recompute_ratio` must be from 0 to 1, got 1.5\."),
        *[
            ({"progressive": value}, r"`progressive` must be True, False, None, 'ride' or a positive number .*, got ")
            for value in (0, -1, 1.5, "idle", [1])
        ],
        ({"recompute_ratio": True}, r"`recompute_ratio` must be a number, got True\."),
        (
            {"max_recompute_ratio": 0.1, "recompute_ratio": 0.15},
            r"`max_recompute_ratio` must be at least `recompute_ratio` \(0.15\), got 0.1\.",
        ),
        ({"seam_tokens": -1}, r"`seam_tokens` must be 0 or more, got -1\."),
        ({"overlap_k": 1.0}, r"`overlap_k` must be an int, got 1.0\."),
        ({"audit_rate": 0.1}, r"`audit_rate` must be 0 with mode 'blend', .* verify_correctness\(\)\."),
    ],
)
def test_bad_policies(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReusePolicy(mode="blend", **settings)
