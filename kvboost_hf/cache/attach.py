"""`attach` and `detach`: reuse for calls that bring no cache of their own, such as pipelines."""

import threading
from collections.abc import Callable

from transformers import PreTrainedModel

from kvboost_hf.cache.hook import install
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.state import ModelState
from kvboost_hf.cache.store import ChunkStore
from kvboost_hf.config import KVQuantConfig, ReusePolicy

Salt = str | bytes | None


class _Attachment:
    """Makes a fresh `ChunkReuseCache` for each call; calls may come from several threads."""

    def __init__(
        self,
        store: ChunkStore | None,
        policy: ReusePolicy | None,
        salt: Salt | Callable[[], Salt],
        live_quant: KVQuantConfig | None,
    ) -> None:
        self._store, self._policy, self._salt, self._live_quant = store, policy, salt, live_quant
        self._last = threading.local()

    def __call__(self, model: PreTrainedModel) -> ChunkReuseCache:
        # Nobody tells us when a call has ended. Its cache is kept until the thread's next one, and the tokens that
        # fill no chunk go to the store then.
        last: ChunkReuseCache | None = getattr(self._last, "cache", None)
        if last is not None:
            last.store_tails()
        salt = self._salt() if callable(self._salt) else self._salt
        cache = ChunkReuseCache(model, self._store, self._policy, salt, live_quant=self._live_quant)
        self._last.cache = cache
        return cache

    @property
    def last(self) -> ChunkReuseCache | None:
        """The cache of this thread's last call."""
        return getattr(self._last, "cache", None)


def attach(
    model: PreTrainedModel,
    store: ChunkStore | None = None,
    policy: ReusePolicy | None = None,
    salt: Salt | Callable[[], Salt] = None,
    *,
    live_quant: KVQuantConfig | None = None,
) -> PreTrainedModel:
    """Give every later `generate()` call on `model` that passes no cache a `ChunkReuseCache`.

    The K/V of the last call stays in memory until the thread's next call, or until `detach`. Attaching again replaces
    the settings.

    Args:
        model: The model whose calls are served, for example a pipeline's `pipe.model`.
        store: Shared by all calls; None takes the model's default store.
        policy: How stored K/V may be used.
        salt: Separates those who must not see each other's prompts; None takes the store's. A function is asked
            at each call, such as the `get` of a context variable.
        live_quant: Hold K/V as codes, see `ChunkReuseCache`.

    Returns:
        `model`.

    Raises:
        ValueError: for a model that cannot be served, or a store that was made for another model.

    Example:
        >>> from transformers import pipeline
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> pipe = pipeline("text-generation", model=attach(model), tokenizer=tokenizer)
    """
    known = None if callable(salt) else salt
    ChunkReuseCache(model, store, policy, known, live_quant=live_quant)  # refuses now, not at the first call
    install(model)
    ModelState.of(model).attached = _Attachment(store, policy, salt, live_quant)
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`. Stored chunks, and caches that are passed by hand, stay as they are."""
    ModelState.of(model).attached = None
    return model


def last_cache(model: PreTrainedModel) -> ChunkReuseCache | None:
    """The cache that an attached model's last call in this thread was given: `last_cache(model).report`."""
    attached = ModelState.of(model).attached
    return attached.last if isinstance(attached, _Attachment) else None
