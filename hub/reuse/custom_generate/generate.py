"""`generate()` that keeps the K/V of each prompt and reuses it for later ones, by the package kvboost_hf."""

from typing import Any
from weakref import WeakKeyDictionary

from transformers.generation.utils import ALL_CACHE_NAMES

from kvboost_hf import ChunkReuseCache, ChunkStore

_CACHE = ALL_CACHE_NAMES[0]  # `past_key_values`; since transformers 5.24 `cache`
_stores: "WeakKeyDictionary[Any, ChunkStore]" = WeakKeyDictionary()


def generate(model: Any, **arguments: Any) -> Any:
    """Run `model.generate()` with a cache over a store that lives as long as the model.

    Args:
        model: A causal language model.
        arguments: Those of `generate()`. A cache of your own is used in place of that.
    """
    if arguments.get(_CACHE) is None:
        store = _stores.get(model)
        if store is None:
            store = _stores.setdefault(model, ChunkStore(model))
        arguments[_CACHE] = ChunkReuseCache(model, store)
    return model.generate(**arguments)
