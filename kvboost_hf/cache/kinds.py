"""Which of our layers serves in place of which of transformers'."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from kvboost_hf.cache.layers import GrowingLayer, ReuseLayer
from kvboost_hf.cache.states import EmptyLayer, HybridLayer, HybridSlidingLayer, OpaqueLayer, StateLayer
from kvboost_hf.cache.windows import IndexedLayer, SlidingLayer, SparseLayer
from kvboost_hf.compat import SERVED_LAYERS, cache_layers

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


def make_layers(model: PreTrainedModel) -> list[ReuseLayer]:
    """Our layers for a model that `compat` has found to be served."""
    return [_MAKERS[type(stock).__name__](stock) for stock in cache_layers(model)]
