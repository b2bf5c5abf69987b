"""What the library knows of a model: kept on the model itself, and never copied or saved with it."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.fingerprint import ModelFingerprint

if TYPE_CHECKING:
    from kvboost_hf.cache.store import ChunkStore

_ATTRIBUTE = "_kvboost_hf_state"


class ModelState:
    """Fingerprint, default store and attachment of one model."""

    def __init__(self) -> None:
        self.fingerprint = ModelFingerprint()
        self.lock = threading.RLock()
        self.default_store: ChunkStore | None = None
        self.attached: Callable[[PreTrainedModel], Cache] | None = None  # makes a cache for calls that bring none

    def __reduce__(self) -> tuple[type["ModelState"], tuple[()]]:
        return ModelState, ()  # a copied or loaded model starts afresh

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelState":
        return ModelState()


def state_of(model: PreTrainedModel) -> ModelState:
    """The state kept on `model`, made at the first call."""
    state = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(state, ModelState):
        state = model.__dict__.setdefault(_ATTRIBUTE, ModelState())
    return state
