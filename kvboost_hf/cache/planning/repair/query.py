"""Recompute the tokens that the end of the prompt attends to, above all those near a seam.

Choosing by the query's attention is ProphetKV's idea (https://arxiv.org/abs/2602.02579). Attention over stored K/V
does not show how a token's K/V would change behind its new history. On real text, that falls with the distance from
the seam: the squared difference of a value is a third of its square at the seam, an eighth 12 tokens behind it, and a
thirtieth 100 tokens behind it.
"""

from kvboost_hf.cache.planning.repair.base import Measure, Repair, RepairRow, Scores

_HALF = 8  # tokens behind a seam: there a token counts half


class Query(Repair):
    """Chooses the tokens with most attention, divided by 1 + distance from the seam / 8."""

    measure = Measure.ATTENTION

    def weigh(self, row: RepairRow, scores: Scores) -> Scores:
        """See `Repair.weigh`."""
        return scores / (1 + row.behind_seam() / _HALF)
