"""CacheBlend: recompute the tokens that deviate most (Yao et al., EuroSys 2025, https://arxiv.org/abs/2405.16444)."""

from kvboost_hf.cache.planning.repair.base import Measure, Repair


class CacheBlend(Repair):
    """Chooses the tokens whose values, computed anew in an early layer, are farthest from the stored ones."""

    measure = Measure.DEVIATION
