"""Answers a prompt from K/V in fewer bits, and counts the tokens that were read as codes."""

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.layers.quantized import QuantizedLayer
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.verify.measure import Answer, answer
from kvboost_hf.verify.watched import WatchedCodec


def answer_from_codes(
    model: PreTrainedModel,
    store: ChunkStore,
    live_quant: KVQuantConfig | None,
    ids: torch.Tensor,
    max_new_tokens: int,
) -> tuple[Answer, ChunkReuseCache, int]:
    """Store a prompt, ids [1, n], and answer it with a new cache that reads it from the store.

    Args:
        model: Answers.
        store: With the codec in question, as a `WatchedCodec`, or with K/V as it is.
        live_quant: How both caches hold K/V, or None.
        ids: The prompt.
        max_new_tokens: At most so many.

    Returns:
        The answer, the cache that it came from, and how many tokens of the prompt were read as codes: decoded from
        the store, or held by the layers; with both, the fewer.
    """
    before = ChunkReuseCache(model, store, live_quant=live_quant)
    answer(model, ids, 1, before)
    before.reset()  # the tail is stored, too
    decoded = _num_decoded(store)
    cache = ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0), live_quant=live_quant)
    found = answer(model, ids, max_new_tokens, cache)
    read = []
    if isinstance(store.codec, WatchedCodec):
        report = cache.report
        read.append(report.reused_tokens - report.tier_tokens["live"] if _num_decoded(store) > decoded else 0)
    if live_quant is not None:
        held = (layer.num_coded for layer in cache.layers if isinstance(layer, QuantizedLayer))
        read.append(min(max(held, default=0), ids.shape[1]))
    return found, cache, min(read)


def _num_decoded(store: ChunkStore) -> int:
    return store.codec.num_decoded if isinstance(store.codec, WatchedCodec) else 0
