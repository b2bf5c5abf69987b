"""The state that caches share through their model."""

import warnings
from typing import Any, Self

from kvboost_hf import forks
from kvboost_hf.cache.identity.fingerprint import ModelFingerprint
from kvboost_hf.compat import KeptOnModel


class ModelState(KeptOnModel):
    """Fingerprint, lock and attachment of one model."""

    def __init__(self) -> None:
        self.fingerprint = ModelFingerprint()
        self.lock = forks.rlock()
        self.attached: Any = None  # a `hook.Attachment`: makes a cache for calls that bring none

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        self._warn_of_copy()
        return super().__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._warn_of_copy()
        return super().__deepcopy__(memo)

    def _warn_of_copy(self) -> None:
        """A copy is not attached: a store belongs to one model, and the salt is a secret that no file may hold."""
        if self.attached is not None:
            warnings.warn(
                "A copied, pickled or saved model is not attached, though this one is: its store belongs to it alone. "
                "Call attach(copy) to have the copy reuse K/V, too.",
                stacklevel=2,
            )
