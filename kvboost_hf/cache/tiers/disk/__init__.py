"""A tier in a folder: files with blobs, and an index in SQLite beside them."""

import sys

if sys.platform == "win32":
    raise ImportError(
        "A disk tier needs a POSIX system, such as Linux, macOS or the Windows Subsystem for Linux. On Windows, use "
        "the tier file:///C:/FOLDER, which keeps K/V in files, too."
    )

from kvboost_hf.cache.tiers.disk.tier import DiskTier, holds_blobs

__all__ = ["DiskTier", "holds_blobs"]
