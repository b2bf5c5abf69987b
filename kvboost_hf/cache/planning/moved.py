"""Columns of a batch that moved chunks serve: planned before a forward, chosen by a repair, and tracked after it.

    row     [ held | exact | moved | computed | moved | … | computed ]
              0    held    hit                                      n

A moved chunk has the right tokens and the wrong history. Its keys are rotated to their new positions when they are put
into the layers. A `Repair` chooses which of its tokens are computed again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, Segment
from kvboost_hf.config import ReusePolicy

LAST_TOKENS = 16  # the end of a prompt is computed even where it is stored
_RATIO, _MOST_FOR_A_SEAM = 0.15, 64
_NEAR = 8  # tokens behind a seam, from which on `Query` counts a token for less
Mask = NDArray[np.bool_]  # [columns] of a row, or [batch, columns]
Scores = NDArray[np.float64]


class Measure(Enum):
    """The score of each moved token that a repair needs."""

    NOTHING = "nothing"
    ATTENTION = "attention"  # the square root of how much the end of the prompt attends to it, summed over layers
    DEVIATION = "deviation"  # how far its values are from the stored ones, in an early layer


@dataclass(frozen=True, slots=True)
class RepairRow:
    """The columns of a row: those computed in any case, and those that moved chunks can serve."""

    computed: Mask  # [columns], tokens of no stored chunk, and those that are never moved
    moved: Mask  # [columns], tokens that moved chunks serve unless they are computed again; disjoint from `computed`
    seams: tuple[int, ...]  # columns at which chunks of another history begin

    def around_seams(self, before: int = 0, after: int = 0) -> Mask:
        """Moved tokens among the last `before` ones in front of each seam and the first `after` ones behind it."""
        found = np.zeros_like(self.moved)
        for seam in self.seams:
            found[max(0, seam - before) : seam + after] = True
        return found & self.moved

    def behind_seam(self) -> NDArray[np.int64]:
        """How many tokens each column is behind the last seam at or before it; before the first one, the column."""
        last = np.zeros(len(self.moved), dtype=np.int64)
        last[list(self.seams)] = self.seams
        found: NDArray[np.int64] = np.arange(len(last)) - np.maximum.accumulate(last)
        return found


class Repair:
    """Chooses the moved tokens that are computed again. The base class chooses none."""

    measure = Measure.NOTHING

    def by_place(self, row: RepairRow, policy: ReusePolicy) -> Mask:
        """The tokens chosen by their place alone, before anything is measured."""
        return np.zeros_like(row.moved)

    def weigh(self, row: RepairRow, scores: Scores) -> Scores:
        """The scores by which tokens are chosen, of those that were measured."""
        return scores

    def choose(self, row: RepairRow, policy: ReusePolicy, scores: Scores | None = None, slack: float = 1.0) -> Mask:
        """All tokens that are computed again, [columns], a part of `row.moved`.

        `scores` [columns] are as `measure` says: tokens with high scores first, those below zero never; None before
        they are measured. More tokens are kept, by the factor `slack`, while their scores can still be measured again.
        """
        chosen = self.by_place(row, policy) | row.around_seams(before=policy.overlap_k)
        if scores is None:
            return chosen
        scores = self.weigh(row, scores)
        ranked = np.flatnonzero(row.moved & ~chosen & ~(scores < 0))
        ranked = ranked[np.argsort(-scores[ranked], kind="stable")]
        scores = np.maximum(scores, 0.0)
        total = scores[row.moved].sum()
        count = _budget(policy, row, scores[ranked], total - scores[ranked].sum(), int(chosen.sum()), total)
        chosen[ranked[: max(0, math.ceil(slack * count) - int(chosen.sum()))]] = True
        return chosen

    def needs_scores(self, row: RepairRow, policy: ReusePolicy) -> bool:
        """Whether the budget exceeds the tokens chosen by place, apart from rounding at each seam."""
        most = max(budget(row, policy.recompute_ratio), budget(row, policy.max_recompute_ratio or 0.0))
        left = most - int(self.choose(row, policy).sum())
        return self.measure is not Measure.NOTHING and left > len(row.seams)


def budget(row: RepairRow, ratio: float | None) -> int:
    """The number of moved tokens that a ratio allows; None is 15% of those behind each seam, 64 at most."""
    if ratio is None:
        behind = np.add.reduceat(row.moved.astype(np.int64), row.seams) if row.seams else np.zeros(0)
        return int(np.minimum(np.ceil(_RATIO * behind - 1e-9), _MOST_FOR_A_SEAM).sum())
    return math.ceil(ratio * int(row.moved.sum()) - 1e-9)


def _budget(policy: ReusePolicy, row: RepairRow, ranked: Scores, covered: float, chosen: int, total: float) -> int:
    """How many moved tokens to compute again, `chosen` ones and what `ranked` scores demand included."""
    floor = budget(row, policy.recompute_ratio)
    if policy.max_recompute_ratio is None or not total > 0:
        return floor
    reached = covered + np.cumsum(ranked) >= policy.min_coverage * total
    wanted = chosen + (int(reached.argmax()) + 1 if reached.any() else len(ranked))
    return min(max(floor, wanted), max(floor, budget(row, policy.max_recompute_ratio)))


class CacheBlend(Repair):
    """Chooses the tokens whose values, computed anew in an early layer, are farthest from the stored ones.

    Yao et al., EuroSys 2025, https://arxiv.org/abs/2405.16444.
    """

    measure = Measure.DEVIATION


class FirstK(Repair):
    """Chooses as many tokens after each seam as `recompute_ratio` allows; short chunks leave their share to others.

    EPIC's LegoLink (Hu et al., 2024, https://arxiv.org/abs/2410.15332).
    """

    def by_place(self, row: RepairRow, policy: ReusePolicy) -> Mask:
        """The first tokens after each seam: as many after each, and as many as stay within the budget."""
        count, best = budget(row, policy.recompute_ratio), row.around_seams(after=0)
        low, high = 0, len(row.moved)
        while low < high:
            middle = (low + high + 1) // 2
            found = row.around_seams(after=middle)
            if found.sum() <= count:
                low, best = middle, found
            else:
                high = middle - 1
        return best


class Query(Repair):
    """Chooses the tokens with most attention, divided by the square root of 1 + distance from the seam / 8.

    Choosing by the query's attention is ProphetKV's idea (https://arxiv.org/abs/2602.02579). Attention over stored K/V
    does not show how a token's K/V would change behind its new history. On real text, that falls with the distance
    from the seam: the squared difference of a value is a third of its square at the seam, an eighth 12 tokens behind
    it, and a thirtieth 100 tokens behind it.
    """

    measure = Measure.ATTENTION

    def weigh(self, row: RepairRow, scores: Scores) -> Scores:
        """Less, the farther a token is from its seam."""
        return scores / np.sqrt(1 + row.behind_seam() / _NEAR)


class Selective(Repair):
    """Chooses `seam_tokens` tokens after each seam, whose history has changed most."""

    def by_place(self, row: RepairRow, policy: ReusePolicy) -> Mask:
        """The first tokens after each seam."""
        return row.around_seams(after=policy.seam_tokens)


REPAIRS: dict[str, Repair] = {
    "none": Repair(),
    "first_k": FirstK(),
    "selective": Selective(),
    "cacheblend": CacheBlend(),
    "query": Query(),
}


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """A plan in which moved chunks serve some of the columns."""

    reuse: ReusePlan  # what is put into the layers, up to the last column; zeros where no chunk serves
    # Per row, the columns that are computed in any case, and those that moved chunks serve.
    rows: tuple[RepairRow, ...]

    @property
    def first_computed(self) -> int:
        """The first column that is not exact in every row."""
        found = [np.flatnonzero(row.computed | row.moved) for row in self.rows]
        return min(int(each[0]) if len(each) else self.reuse.filled for each in found)

    @property
    def moved(self) -> Mask:
        """[batch, columns], those that moved chunks serve."""
        return np.stack([row.moved for row in self.rows])

    @property
    def present(self) -> Mask:
        """[batch, columns], those that are in the layers before anything is computed."""
        return ~np.stack([row.computed for row in self.rows])


def plan_blend(
    ids: Tokens,
    exact: ReusePlan,
    logits: int,
    find: Callable[[Tokens, int, int], tuple[Segment, ...]],
    sink_tokens: int,
) -> BlendPlan | None:
    """Find moved chunks for what the store has no exact K/V of; None where nothing can be moved.

    `ids` are all [batch, columns], of which so many last `logits` are wanted. `find` is `find_moved`. The first
    `sink_tokens` of a row are not moved.
    """
    columns = ids.shape[1]
    found: dict[bytes, tuple[Segment, ...]] = {}  # beams and num_return_sequences repeat rows
    rows: list[RowPlan] = []
    repairs: list[RepairRow] = []
    for tokens, pad, plan in zip(ids, exact.pads, exact.rows, strict=True):
        own = tokens[pad:]
        key = own.tobytes()
        if key not in found:
            found[key] = find(own, max(plan.hit, sink_tokens), len(own) - max(logits, LAST_TOKENS))
        segments = found[key]
        moved, computed = np.zeros(columns, dtype=bool), np.zeros(columns, dtype=bool)
        computed[max(exact.held, pad, plan.hit + pad) :] = True
        for segment in segments:
            moved[segment.start + pad : segment.stop + pad] = True
        seams = tuple(segment.start + pad for segment in segments if not segment.continues)
        repairs.append(RepairRow(computed & ~moved, moved, seams))
        rows.append(RowPlan(len(own), (*plan.segments, *segments), (), plan.miss))
    if not any(found.values()):
        return None
    return BlendPlan(ReusePlan(exact.held, columns, tuple(rows), exact.pads), tuple(repairs))


def choose_columns(wanted: Sequence[Mask], spare: Sequence[Mask]) -> NDArray[np.int64]:
    """The columns to compute, [batch, m]: those `wanted` in each row, and as many as others need from `spare`.

    A forward computes the same number of columns of every row. Rows that need fewer compute some of their moved ones
    besides, which can only make them better, and then whatever there is.
    """
    width = max(int(row.sum()) for row in wanted)
    chosen: list[NDArray[np.int64]] = []
    for row, rest in zip(wanted, spare, strict=True):
        more = np.flatnonzero(rest & ~row)
        chosen.append(np.sort(np.concatenate([np.flatnonzero(row), more[::-1][: width - int(row.sum())]])))
    return np.stack(chosen)


@dataclass(frozen=True, slots=True)
class MovedColumns:
    """The columns of a batch that moved chunks served, and those of them that were not computed again.

    K/V of a token equals that of a plain forward only if that of every token before it does. So from the first stale
    column on, the row is tainted: its K/V must not be found by prefix key. Columns that are computed again in order,
    from the first stale one on, are those of a plain forward again.
    """

    moved: Mask  # [batch, columns], those that moved chunks served, computed again or not. Later ones were computed
    stale: Mask  # [batch, columns], those that were not computed again in every layer

    def is_tainted(self, row: int) -> bool:
        """Whether a row has stale columns."""
        return bool(self.stale[row].any())

    def tainted_from(self, row: int) -> int:
        """The first stale column of a row that has some."""
        return int(self.stale[row].argmax())

    @property
    def exact_columns(self) -> int:
        """How many first columns are those of a plain forward in every row."""
        return min(self.tainted_from(row) for row in range(len(self.stale)) if self.is_tainted(row))

    def tainted_columns(self, held: int) -> int:
        """How many of the first `held` columns are tainted, over all rows."""
        return sum(max(0, held - self.tainted_from(row)) for row in range(len(self.stale)) if self.is_tainted(row))

    def next_tainted(self, held: int, most: int) -> Mask:
        """The first tainted columns of each row, at most `most` of them, of `held` ones: [batch, held]."""
        found = np.zeros((len(self.stale), held), dtype=bool)
        for row in range(len(self.stale)):
            if self.is_tainted(row):
                start = self.tainted_from(row)
                found[row, start : start + most] = True
        return found

    def repaired(self, columns: Mask) -> "MovedColumns | None":
        """What is left once the `columns` that `next_tainted` gave were computed again; None if nothing is."""
        stale = np.zeros_like(columns)
        for row in range(len(stale)):
            if self.is_tainted(row):
                stale[row, self.tainted_from(row) :] = True
        stale &= ~columns
        moved = np.zeros_like(stale)
        moved[:, : self.moved.shape[1]] = self.moved
        return MovedColumns(moved, stale) if stale.any() else None

    def run_at(self, row: int, column: int) -> "tuple[bool, int | None]":
        """Whether a moved chunk served a column, and the column at which that changes next; None if it never does."""
        moved = self.moved[row, column:]
        if not len(moved):
            return False, None
        changes = np.flatnonzero(moved != moved[0])
        if len(changes):
            return bool(moved[0]), column + int(changes[0])
        return bool(moved[0]), self.moved.shape[1] if moved[0] else None

    def run_ends(self, row: int, column: int) -> bool:
        """Whether the run of `run_at` ends, in a row that has stale columns."""
        return self.is_tainted(row) and bool(self.moved[row, column:].any())

    def crop(self, length: int) -> "MovedColumns | None":
        """The first `length` columns; None if none of them is stale."""
        stale = self.stale[:, :length]
        return MovedColumns(self.moved[:, :length], stale) if stale.any() else None

    def select(self, rows: NDArray[np.int64]) -> "MovedColumns | None":
        """Row i becomes what row `rows[i]` was."""
        stale = self.stale[rows]
        return MovedColumns(self.moved[rows], stale) if stale.any() else None

    def extend(self, moved: Mask, stale: Mask) -> "MovedColumns":
        """Add columns: `moved` and `stale` cover all columns, the known ones included."""
        known = self.moved.shape[1]
        moved, stale = moved.copy(), stale.copy()
        moved[:, :known] |= self.moved
        stale[:, :known] |= self.stale
        return MovedColumns(moved, stale)
