"""Names of `kvboost_hf.cache.tiers.disk`, which Windows does not have."""

from kvboost_hf.cache.tiers.disk import DiskTier, files
from kvboost_hf.cache.tiers.disk.index import charge
