"""`generate()` that keeps the K/V of each prompt and reuses it for later ones, by the package kvboost_hf."""

from typing import Any
from weakref import WeakKeyDictionary

from kvboost_hf import ChunkReuseCache, ChunkStore

_stores: "WeakKeyDictionary[Any, ChunkStore]" = WeakKeyDictionary()


def generate(model: Any, past_key_values: Any = None, **arguments: Any) -> Any:
    """Run `model.generate()` with a cache over a store that lives as long as the model.

    Args:
        model: A causal language model.
        past_key_values: A cache of your own, which is used in place of that.
        arguments: Those of `generate()`.
    """
    if past_key_values is None:
        store = _stores.get(model)
        if store is None:
            store = _stores.setdefault(model, ChunkStore(model))
        past_key_values = ChunkReuseCache(model, store)
    return model.generate(past_key_values=past_key_values, **arguments)
