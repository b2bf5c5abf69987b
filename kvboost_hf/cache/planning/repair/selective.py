"""Recompute a fixed number of tokens after each seam."""

from kvboost_hf.cache.planning.repair.base import Mask, Repair, RepairRow
from kvboost_hf.config import ReusePolicy


class Selective(Repair):
    """Chooses `seam_tokens` tokens after each seam, whose history has changed most."""

    def by_place(self, row: RepairRow, policy: ReusePolicy) -> Mask:
        """See `Repair.by_place`."""
        return row.around_seams(after=policy.seam_tokens)
