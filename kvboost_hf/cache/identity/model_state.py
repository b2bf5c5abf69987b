"""The state that caches share through their model."""

import threading
from typing import Any

from kvboost_hf.cache.identity.fingerprint import ModelFingerprint
from kvboost_hf.compat import KeptOnModel


class ModelState(KeptOnModel):
    """Fingerprint, lock and attachment of one model."""

    def __init__(self) -> None:
        self.fingerprint = ModelFingerprint()
        self.lock = threading.RLock()
        self.attached: Any = None  # a `hook.Attachment`: makes a cache for calls that bring none
