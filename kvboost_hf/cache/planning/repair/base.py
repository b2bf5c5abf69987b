"""What every way of repairing moved chunks has in common. Pure numpy: no tensors, no model."""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.config import ReusePolicy

Mask = NDArray[np.bool_]
Scores = NDArray[np.float64]


class Measure(Enum):
    """What a repair has to know of each moved token besides its place."""

    NOTHING = "nothing"
    ATTENTION = "attention"  # how much the end of the prompt attends to it
    DEVIATION = "deviation"  # how far its values are from the stored ones, in an early layer


@dataclass(frozen=True, slots=True)
class RepairRow:
    """A row of a prompt, by column: what is computed in any case, and what moved chunks can serve.

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


class Repair:
    """Which moved tokens are computed again. This one: none."""

    measure = Measure.NOTHING

    def by_place(self, row: RepairRow, policy: ReusePolicy) -> Mask:
        """Those that can be told before anything is measured."""
        return np.zeros_like(row.moved)

    def choose(self, row: RepairRow, policy: ReusePolicy, scores: Scores | None = None, slack: float = 1.0) -> Mask:
        """All of them.

        Args:
            row: The row.
            policy: Sets how many.
            scores: [columns], of what `measure` says; tokens of high scores first, those below zero never. None before
                it is measured.
            slack: Factor of the number: more are kept while they can still be measured again.

        Returns:
            [columns], a part of `row.moved`.
        """
        chosen = self.by_place(row, policy) | row.around_seams(before=policy.overlap_k)
        if scores is None:
            return chosen
        ranked = np.flatnonzero(row.moved & ~chosen & ~(scores < 0))
        ranked = ranked[np.argsort(-scores[ranked], kind="stable")]
        scores = np.maximum(scores, 0.0)
        total = scores[row.moved].sum()
        count = _budget(policy, row, scores[ranked], total - scores[ranked].sum(), int(chosen.sum()), total)
        chosen[ranked[: max(0, math.ceil(slack * count) - int(chosen.sum()))]] = True
        return chosen

    def needs_scores(self, row: RepairRow, policy: ReusePolicy) -> bool:
        """Whether more is to be computed again than is told by place, but for what rounding leaves at each seam."""
        ratio = max(policy.recompute_ratio, policy.max_recompute_ratio or 0.0)
        left = budget(row, ratio) - int(self.choose(row, policy).sum())
        return self.measure is not Measure.NOTHING and left > len(row.seams)


def budget(row: RepairRow, ratio: float) -> int:
    """How many moved tokens a ratio stands for."""
    return math.ceil(ratio * int(row.moved.sum()) - 1e-9)


def _budget(policy: ReusePolicy, row: RepairRow, ranked: Scores, covered: float, chosen: int, total: float) -> int:
    """How many moved tokens to compute again, `chosen` ones and what `ranked` scores demand included."""
    floor = budget(row, policy.recompute_ratio)
    if policy.max_recompute_ratio is None or not total > 0:
        return floor
    reached = covered + np.cumsum(ranked) >= policy.min_coverage * total
    wanted = chosen + (int(reached.argmax()) + 1 if reached.any() else len(ranked))
    return min(max(floor, wanted), max(floor, budget(row, policy.max_recompute_ratio)))
