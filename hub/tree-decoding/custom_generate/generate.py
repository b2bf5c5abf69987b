"""`generate()` in which a smaller model drafts trees of tokens, by the package kvboost_hf."""

from typing import Any
from weakref import WeakKeyDictionary

from transformers.generation.utils import ALL_CACHE_NAMES

from kvboost_hf import ChunkReuseCache, ChunkStore, TreeDecoding

_CACHE = ALL_CACHE_NAMES[0]  # `past_key_values`; since transformers 5.24 `cache`
_parts: "WeakKeyDictionary[Any, tuple[ChunkStore, dict[int, TreeDecoding]]]" = WeakKeyDictionary()


def generate(model: Any, draft: Any = None, **arguments: Any) -> Any:
    """Run `model.generate()` with drafts, checked several at once: the tokens are those of the model alone.

    Args:
        model: A causal language model.
        draft: A smaller model with the same vocabulary.
        arguments: Those of `generate()`. Without a cache of your own, K/V is kept as long as the model is.

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
    if arguments.get(_CACHE) is None:
        arguments[_CACHE] = ChunkReuseCache(model, store)
    return model.generate(custom_generate=trees[id(draft)], **arguments)
