"""The store of a model's caches that were given none."""

from transformers import PreTrainedModel

from kvboost_hf import forks
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import KeptOnModel


class _DefaultStore(KeptOnModel):
    """The store of a model's caches that were given none."""

    def __init__(self) -> None:
        self.lock = forks.lock()
        self.store: ChunkStore | None = None


def default_store(model: PreTrainedModel) -> ChunkStore:
    """The store of a model's caches that were given none; made at the first call, and again after `close()`."""
    kept = _DefaultStore.of(model)
    with kept.lock:
        if kept.store is None or not kept.store.usable:
            kept.store = ChunkStore(model)
        return kept.store
