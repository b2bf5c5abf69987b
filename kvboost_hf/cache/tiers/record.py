"""A chunk or states as one blob, in the safetensors format, with checksums; and back."""

from kvboost_hf.cache.tiers.base import Entry


def read_entry(blob: memoryview) -> Entry:
    """What a blob is found by.

    Raises:
        ValueError: if that part of the blob is damaged, or it is none.
    """
    raise NotImplementedError
