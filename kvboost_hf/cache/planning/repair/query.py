"""The tokens that the question needs: after each seam, and where the end of the prompt looks.

Choosing by the query's attention is ProphetKV's idea (https://arxiv.org/abs/2602.02579). It cannot see what a token
would mean in its new history; the tokens after each seam are where that changes most, so they come first.
"""

from kvboost_hf.cache.planning.repair.base import Mask, Measure, Repair, RepairRow, budget
from kvboost_hf.cache.planning.repair.first_k import first_after_seams
from kvboost_hf.config import ReusePolicy


class Query(Repair):
    """Up to `seam_tokens` after each seam; what is left of the ratio, by the attention that the end pays."""

    measure = Measure.ATTENTION

    def by_place(self, row: RepairRow, policy: ReusePolicy) -> Mask:
        """See `Repair.by_place`."""
        return first_after_seams(row, budget(row, policy.recompute_ratio), most=policy.seam_tokens)
