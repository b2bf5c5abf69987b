"""A tier in a folder: files with blobs, and an index in SQLite beside them."""

from kvboost_hf.cache.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
