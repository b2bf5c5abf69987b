"""What the cache keeps on a model."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.fingerprint import ModelFingerprint
from kvboost_hf.compat import KeptOnModel

if TYPE_CHECKING:
    from kvboost_hf.cache.store import ChunkStore


class ModelState(KeptOnModel):
    """Fingerprint, default store and attachment of one model."""

    def __init__(self) -> None:
        self.fingerprint = ModelFingerprint()
        self.lock = threading.RLock()
        self.default_store: ChunkStore | None = None
        self.attached: Callable[[PreTrainedModel], Cache] | None = None  # makes a cache for calls that bring none
