"""ProphetKV: the tokens that the question attends to."""

from benchmarks.leaderboard.method import Method, shares
from kvboost_hf.cache.planning.moved import Measure, Repair


class AttentionAlone(Repair):
    """Chooses the tokens with most attention of the prompt's end, wherever the seams are."""

    measure = Measure.ATTENTION


METHOD = Method(
    source="ProphetKV, 2026, https://arxiv.org/abs/2602.02579",
    about="Computes the tokens again that the question attends to most.",
    settings=shares(),
    repair=AttentionAlone(),
)
