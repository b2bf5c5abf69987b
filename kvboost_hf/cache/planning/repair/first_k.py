"""EPIC's LegoLink: recompute the first tokens after each seam (Hu et al., 2024, https://arxiv.org/abs/2410.15332)."""

from kvboost_hf.cache.planning.repair.base import Mask, Repair, RepairRow, budget
from kvboost_hf.config import ReusePolicy


class FirstK(Repair):
    """Chooses as many tokens after each seam as `recompute_ratio` allows; short chunks leave their share to others."""

    def by_place(self, row: RepairRow, policy: ReusePolicy) -> Mask:
        """See `Repair.by_place`."""
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
