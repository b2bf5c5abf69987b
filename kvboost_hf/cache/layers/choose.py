"""Chooses the layer that takes the place of each of transformers' layers, and has that of last hidden states.

Last hidden states are what the head of a model computes logits from. Their layer stands behind the layers of K/V, so
that its columns are stored, loaded and cut with theirs. transformers does not see it: a hook behind the decoder layers
(`compat.hook_hidden_states`) gives it what it keeps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.codecs import make_codec
from kvboost_hf.cache.layers.base import ColumnSpec, Piece, ReuseLayer, Turn
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor
from kvboost_hf.cache.layers.pieced import PiecedLayer
from kvboost_hf.cache.layers.quantized import QuantizedLayer, exact_layers
from kvboost_hf.cache.layers.stateful import EmptyLayer, HybridLayer, HybridSlidingLayer, OpaqueLayer, StateLayer
from kvboost_hf.cache.layers.windows import IndexedLayer, SlidingLayer, SparseLayer
from kvboost_hf.compat import (
    SERVED_LAYERS,
    KeyRotation,
    PrivateCache,
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
    keeps_hidden: bool = False,
    contiguous: bool = False,
) -> list[ReuseLayer]:
    """Our layers for a model that `compat` has found to be served.

    With `live_quant`, those of full attention hold codes, but for the first and the last ones. Without it, and where
    `kvboost_fa2` can read chunks where they are, they leave them there, unless they are to be `contiguous`: sums over
    chunks may round otherwise. With `keeps_hidden`, one of hidden states follows.
    """
    stocks = cache_layers(model)
    layers = [_MAKERS[type(stock).__name__](stock) for stock in stocks]
    if live_quant is None:
        if not contiguous and attn_implementation(model) == ATTENTION and read_in_place(PiecedKV, input_device(model)):
            layers = [PiecedLayer() if type(layer) is GrowingLayer else layer for layer in layers]
        return [*in_place_of(stocks, layers), *([HiddenStates()] if keeps_hidden else [])]
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


class HiddenStates(ReuseLayer):
    """The last hidden states of all columns, as one tensor [batch, 1, columns, hidden_size]."""

    def __init__(self) -> None:
        self._states = GrowingTensor()

    @property
    def native(self) -> None:
        """None: transformers sees no such layer."""

    def append(self, states: torch.Tensor) -> None:
        """Append [batch, m, hidden_size]."""
        self.version += 1
        with torch.no_grad():
            self._states.append(states.detach()[:, None])

    def view(self, start: int) -> torch.Tensor:
        """[batch, columns, hidden_size] from column `start` on."""
        return self._states.view(start)[:, 0]

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self.version += 1
        self._states.select(rows)

    @property
    def intact(self) -> bool:
        return self._states.intact

    def seal(self) -> None:
        self._states.seal()

    @property
    def length(self) -> int:
        """Columns seen so far."""
        return self._states.stop

    @property
    def first(self) -> int:
        """The first column that is still held."""
        return self._states.first

    def share(self) -> "HiddenStates":
        """A layer that reads the same buffer; whichever of the two writes first copies."""
        twin = HiddenStates()
        twin.version, twin._states = self.version, self._states.share()
        return twin

    def reset(self) -> None:
        """Drop everything."""
        self.version += 1
        self._states = GrowingTensor()

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.version += 1
            self._states.truncate(length)

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        return (self._states.row(row, start, stop),) if self._states.buffer is not None else None

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]], turn: Turn | None = None) -> None:
        self.version += 1
        self._states.fill(start, stop, [[piece[0] for piece in pieces] for pieces in rows])

    def open(self, stop: int, like: Piece, batch: int) -> tuple[torch.Tensor, ...]:
        self.version += 1
        return (self._states.open(stop, like[0].expand(batch, -1, -1, -1)),)

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        buffer = self._states.buffer
        return (ColumnSpec(buffer.shape[1], buffer.shape[3], buffer.dtype),) if buffer is not None else ()

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self._states.buffer] if self._states.buffer is not None else []

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, room to spare included."""
        return self._states.nbytes


def kv_layers(layers: Sequence[ReuseLayer]) -> list[ReuseLayer]:
    """The layers that transformers sees."""
    return [layer for layer in layers if layer.native is not None]


def private_cache(layers: Sequence[ReuseLayer]) -> PrivateCache:
    """A cache for a forward of our own, which extends these layers."""
    cache = PrivateCache([layer.native for layer in kv_layers(layers)])
    if isinstance(last := layers[-1], HiddenStates):

        def keep(states: torch.Tensor) -> torch.Tensor:
            last.append(states)
            return states

        cache.take_hidden_states = keep
    return cache
