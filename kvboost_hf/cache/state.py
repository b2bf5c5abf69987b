"""What the cache keeps on a model."""

import threading
from typing import TYPE_CHECKING, Any

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
        self.attached: Any = None  # a `hook.Attachment`: makes a cache for calls that bring none
