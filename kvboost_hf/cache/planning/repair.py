"""Repairs: ways to choose which tokens of moved chunks are computed again."""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.config import ReusePolicy

_RATIO, _MOST_FOR_A_SEAM = 0.15, 128
_HALF = 8  # tokens behind a seam: there a token counts half for `Query`
Mask = NDArray[np.bool_]  # [columns] of a row, or [batch, columns]
Scores = NDArray[np.float64]


class Measure(Enum):
    """The score of each moved token that a repair needs."""

    NOTHING = "nothing"
    ATTENTION = "attention"  # the square root of how much the end of the prompt attends to it, summed over layers
    DEVIATION = "deviation"  # how far its values are from the stored ones, in an early layer


@dataclass(frozen=True, slots=True)
class RepairRow:
    """The columns of a row: those computed in any case, and those that moved chunks can serve.

    Args:
        computed: [columns], tokens of no stored chunk, and those that are never moved.
        moved: [columns], tokens that moved chunks serve unless they are computed again; disjoint from `computed`.
        seams: Columns at which chunks of another history begin.
    """

    computed: Mask
    moved: Mask
    seams: tuple[int, ...]

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
        """All tokens that are computed again.

        Args:
            row: The row.
            policy: The policy whose ratios limit how many.
            scores: [columns], as `measure` says; tokens with high scores first, those below zero never. None before
                they are measured.
            slack: Factor of the number: more tokens are kept while their scores can still be measured again.

        Returns:
            [columns], a part of `row.moved`.
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
    """The number of moved tokens that a ratio allows; None is 15% of them, but no more than 128 for each seam."""
    moved = int(row.moved.sum())
    if ratio is None:
        return min(math.ceil(_RATIO * moved - 1e-9), _MOST_FOR_A_SEAM * len(row.seams))
    return math.ceil(ratio * moved - 1e-9)


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
        """The first tokens after each seam."""
        return first_after_seams(row, budget(row, policy.recompute_ratio))


def first_after_seams(row: RepairRow, count: int, most: int | None = None) -> Mask:
    """`count` moved tokens or a few less, the same number after each seam, but not more than `most`."""
    best = row.around_seams(after=0)
    low, high = 0, len(row.moved) if most is None else most
    while low < high:  # the largest number after each seam that stays within the count
        middle = (low + high + 1) // 2
        found = row.around_seams(after=middle)
        if found.sum() <= count:
            low, best = middle, found
        else:
            high = middle - 1
    return best


class Query(Repair):
    """Chooses the tokens with most attention, divided by 1 + distance from the seam / 8.

    Choosing by the query's attention is ProphetKV's idea (https://arxiv.org/abs/2602.02579). Attention over stored K/V
    does not show how a token's K/V would change behind its new history. On real text, that falls with the distance
    from the seam: the squared difference of a value is a third of its square at the seam, an eighth 12 tokens behind
    it, and a thirtieth 100 tokens behind it.
    """

    measure = Measure.ATTENTION

    def weigh(self, row: RepairRow, scores: Scores) -> Scores:
        """Less, the farther a token is from its seam."""
        return scores / (1 + row.behind_seam() / _HALF)


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
