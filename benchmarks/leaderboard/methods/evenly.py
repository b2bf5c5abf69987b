"""Moved tokens at even distances: what every choice of tokens has to beat."""

import numpy as np

from benchmarks.leaderboard.method import Method, shares
from kvboost_hf import ReusePolicy
from kvboost_hf.cache.planning.moved import Mask, Repair, RepairRow, budget


class Evenly(Repair):
    """Chooses as many moved tokens as `recompute_ratio` allows, at even distances."""

    def by_place(self, row: RepairRow, policy: ReusePolicy) -> Mask:
        """See `Repair.by_place`."""
        moved = np.flatnonzero(row.moved)
        chosen = np.zeros_like(row.moved)
        chosen[moved[np.linspace(0, len(moved) - 1, budget(row, policy.recompute_ratio), dtype=int)]] = True
        return chosen


METHOD = Method(
    source="ours",
    about="Computes moved tokens at even distances again, wherever the seams are.",
    settings=shares(),
    repair=Evenly(),
)
