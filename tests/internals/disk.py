"""Names of `kvboost_hf.cache.tiers.disk`, which Windows does not have."""

from kvboost_hf.cache.tiers import disk, disk_files, disk_index
from kvboost_hf.cache.tiers.disk import DiskTier
from kvboost_hf.cache.tiers.disk_files import NoticeFile
from kvboost_hf.cache.tiers.disk_index import charge
