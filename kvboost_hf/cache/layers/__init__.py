"""Makes the layers that take the place of a model's, and caches of them for forwards of our own."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from kvboost_hf.cache.codecs import make_codec
from kvboost_hf.cache.layers.base import ReuseLayer, kv_layers
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.opaque import EmptyLayer, OpaqueLayer
from kvboost_hf.cache.layers.pieced import PiecedLayer
from kvboost_hf.cache.layers.quantized import QuantizedLayer, exact_layers
from kvboost_hf.cache.layers.stateful import HybridLayer, HybridSlidingLayer, StateLayer
from kvboost_hf.cache.layers.windows import HiddenStates, IndexedLayer, SlidingLayer, SparseLayer
from kvboost_hf.compat import (
    SERVED_LAYERS,
    KeyRotation,
    PrivateCache,
    Shown,
    attn_implementation,
    cache_layers,
    input_device,
    key_rotation,
)
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.handles import ATTENTION, PiecedKV, read_in_place

# By name: some of them come and go between releases, and some live with their model. Exactly these, no subclasses: a
# class that changes what a layer keeps would be served wrongly.
_MAKERS: dict[str, Callable[[Any], ReuseLayer]] = {
    "DynamicLayer": lambda stock: GrowingLayer(),
    "DynamicSlidingWindowLayer": lambda stock: SlidingLayer(stock.sliding_window),
    "DynamicIndexedLayer": lambda stock: IndexedLayer(),
    "LinearAttentionLayer": lambda stock: StateLayer(stock.number_of_states),
    "LinearAttentionAndFullAttentionLayer": lambda stock: HybridLayer(stock.number_of_states),
    "LinearAttentionAndSlidingWindowAttentionLayer": lambda stock: HybridSlidingLayer(
        stock.sliding_window, stock.number_of_states
    ),
    "DummyLayer": EmptyLayer,
    "MiniMaxM3VLSparseCacheLayer": lambda stock: SparseLayer(),
    "DeepseekV4HCACache": OpaqueLayer,
    "DeepseekV4CSACache": OpaqueLayer,
}
assert frozenset(_MAKERS) == SERVED_LAYERS


def make_layers(
    model: PreTrainedModel,
    live_quant: KVQuantConfig | None = None,
    *,
    hidden_layers: tuple[int, ...] = (),
    contiguous: bool = False,
) -> list[ReuseLayer]:
    """Our layers for a model that `compat` has found to be served.

    With `live_quant`, those of full attention hold codes, but for the first and the last ones. Without it, and where
    `kvboost_fa2` can read chunks where they are, they leave them there, unless they are to be `contiguous`: sums over
    chunks may round otherwise. With `hidden_layers`, one of their hidden states follows.
    """
    stocks = cache_layers(model)
    layers = [_MAKERS[type(stock).__name__](stock) for stock in stocks]
    if live_quant is None:
        if not contiguous and attn_implementation(model) == ATTENTION and read_in_place(PiecedKV, input_device(model)):
            layers = [PiecedLayer() if type(layer) is GrowingLayer else layer for layer in layers]
        return [*in_place_of(stocks, layers), *([HiddenStates(hidden_layers)] if hidden_layers else [])]
    codec, found = make_codec(live_quant), key_rotation(model)
    rotations = found.layers if isinstance(found, KeyRotation) else [None] * len(layers)
    ends = exact_layers(live_quant, len(layers))
    for idx in range(ends, len(layers) - ends):
        if type(layers[idx]) is GrowingLayer:
            layers[idx] = QuantizedLayer(codec, live_quant, rotations[idx])
    return in_place_of(stocks, layers)


def in_place_of(stocks: list[Any], layers: list[ReuseLayer]) -> list[ReuseLayer]:
    """The layers, each with the one of transformers whose place it takes: pickles have that in place of ours."""
    for stock, layer in zip(stocks, layers, strict=True):
        layer.stock = stock
    return layers


def private_cache(layers: Sequence[ReuseLayer]) -> PrivateCache:
    """A cache for a forward of our own, which extends these layers."""
    cache = PrivateCache([layer.native for layer in kv_layers(layers)])
    if isinstance(last := layers[-1], HiddenStates):

        def keep(shown: Shown) -> Shown:
            last.append(shown.of)
            return shown

        cache.hidden_layers, cache.take_hidden_states = last.which, keep
    return cache
