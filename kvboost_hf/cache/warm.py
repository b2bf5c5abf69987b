"""Computing the K/V of a text ahead of the first request."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.report import ReuseReport
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store import ChunkStore, Put
from kvboost_hf.compat import cache_argument, input_device, rope_regime
from kvboost_hf.config import ReusePolicy
from kvboost_hf.errors import StoreFullError

_TOKENS_PER_FORWARD = 2048  # bounds the activations of a long text


@torch.no_grad()
def warm(
    model: PreTrainedModel,
    store: ChunkStore,
    text_or_ids: str | Sequence[int] | torch.Tensor,
    *,
    tokenizer: Any,
    pin: bool,
    policy: ReusePolicy | None,
) -> ReuseReport:
    """See `ChunkStore.warm`."""
    ids = _as_ids(text_or_ids, tokenizer).to(input_device(model))
    cache = ChunkReuseCache(model, store, policy)
    # A text that is longer than what its rotary frequencies were trained for has others from its first token on.
    at_once = ids.shape[1] if rope_regime(model, ids.shape[1]) else _TOKENS_PER_FORWARD
    for part in torch.split(ids, at_once, dim=1):
        model(input_ids=part, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
    pinned_before = store.pinned_keys()
    results = cache.store_all(pinned=pin)
    if pin and any(result in (Put.NO_ROOM, Put.NO_PARENT, Put.GONE) for result in results):
        store.unpin(store.pinned_keys() - pinned_before)
        raise StoreFullError(
            f"A text of {ids.shape[1]} tokens does not fit into `max_bytes`={store.max_bytes} beside the "
            f"{len(pinned_before)} chunks pinned already. Raise `max_bytes`, warm a shorter text, or pass `pin=False`."
        )
    return cache.report


def _as_ids(text_or_ids: str | Sequence[int] | torch.Tensor, tokenizer: Any) -> torch.Tensor:
    if isinstance(text_or_ids, str):
        if tokenizer is None:
            raise ValueError(
                "Warming a text needs `tokenizer`: store.warm(text, tokenizer=tokenizer), or pass its ids."
            )
        text_or_ids = tokenizer(text_or_ids)["input_ids"]
    ids = torch.as_tensor(text_or_ids, dtype=torch.long)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(
            f"`text_or_ids` must be a text or ids of the shape [n] or [1, n], n > 0, got {list(ids.shape)}."
        )
    return ids
