"""Recompute the tokens after each seam, and those that the end of the prompt attends to.

Choosing by the query's attention is ProphetKV's idea (https://arxiv.org/abs/2602.02579). Attention over stored K/V
does not show how a token's K/V would change with its new history. It changes most after each seam, so these tokens
come first.
"""

from kvboost_hf.cache.planning.repair.base import Mask, Measure, Repair, RepairRow, budget
from kvboost_hf.cache.planning.repair.first_k import first_after_seams
from kvboost_hf.config import ReusePolicy


class Query(Repair):
    """Chooses up to `seam_tokens` after each seam, and the rest of the ratio by the attention of the prompt's end."""

    measure = Measure.ATTENTION

    def by_place(self, row: RepairRow, policy: ReusePolicy) -> Mask:
        """See `Repair.by_place`."""
        return first_after_seams(row, budget(row, policy.recompute_ratio), most=policy.seam_tokens)
