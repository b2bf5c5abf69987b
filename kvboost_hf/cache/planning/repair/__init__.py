"""Repairs: ways to choose which tokens of moved chunks are computed again, one file each."""

from kvboost_hf.cache.planning.repair.base import Mask, Measure, Repair, RepairRow, Scores, budget
from kvboost_hf.cache.planning.repair.cacheblend import CacheBlend
from kvboost_hf.cache.planning.repair.first_k import FirstK
from kvboost_hf.cache.planning.repair.query import Query
from kvboost_hf.cache.planning.repair.selective import Selective

REPAIRS: dict[str, Repair] = {
    "none": Repair(),
    "first_k": FirstK(),
    "selective": Selective(),
    "cacheblend": CacheBlend(),
    "query": Query(),
}

__all__ = ["REPAIRS", "Mask", "Measure", "Repair", "RepairRow", "Scores", "budget"]
