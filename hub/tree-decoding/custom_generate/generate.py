"""`generate()` in which a smaller model drafts trees of tokens, by the package kvboost_hf."""

from typing import Any
from weakref import WeakKeyDictionary

from kvboost_hf import ChunkReuseCache, ChunkStore, TreeDecoding

_parts: "WeakKeyDictionary[Any, tuple[ChunkStore, dict[int, TreeDecoding]]]" = WeakKeyDictionary()


def generate(model: Any, draft: Any = None, past_key_values: Any = None, **arguments: Any) -> Any:
    """Run `model.generate()` with drafts, checked several at once: the tokens are those of the model alone.

    Args:
        model: A causal language model.
        draft: A smaller model with the same vocabulary.
        past_key_values: A cache of your own; by default K/V is kept as long as the model is.
        arguments: Those of `generate()`.

    Raises:
        ValueError: there is no draft, or it does not fit.
    """
    if draft is None:
        raise ValueError("`draft` must be a smaller model with the same vocabulary, got None. Pass draft=model.")
    if model not in _parts:
        _parts[model] = ChunkStore(model), {}
    store, trees = _parts[model]
    if id(draft) not in trees:
        trees[id(draft)] = TreeDecoding(draft)
    cache = ChunkReuseCache(model, store) if past_key_values is None else past_key_values
    return model.generate(custom_generate=trees[id(draft)], past_key_values=cache, **arguments)
