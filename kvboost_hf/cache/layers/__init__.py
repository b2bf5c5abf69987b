"""Makes the layers that take the place of a model's, and caches of them for forwards of our own.

Those that few models have are here, too. Two of them are held as transformers made them: `OpaqueLayer`, which only its
model understands, and `EmptyLayer`.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvboost_hf.cache.codecs import make_codec
from kvboost_hf.cache.layers.base import LayerState, ReuseLayer, kv_layers
from kvboost_hf.cache.layers.growing import GrowingLayer, SlidingLayer
from kvboost_hf.cache.layers.hidden_states import HiddenStates
from kvboost_hf.cache.layers.pieced import PiecedLayer
from kvboost_hf.cache.layers.quantized import QuantizedLayer, exact_layers
from kvboost_hf.cache.layers.stateful import (
    HybridLayer,
    HybridSlidingLayer,
    Marks,
    StateLayer,
    are_as_marked,
    marks_of,
)
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

T = TypeVar("T")


class EmptyLayer(ReuseLayer):
    """A layer that never holds anything: its model layer shares the K/V of another, or has no attention."""

    can_branch = True

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @property
    def native(self) -> Any:
        """The layer that transformers sees."""
        return self._layer

    def fresh(self) -> "EmptyLayer":
        return EmptyLayer(type(self._layer)())


class OpaqueLayer(ReuseLayer):
    """A layer that only its model understands: all of it is one state, of a batch of one row."""

    is_stateful = True
    single_row = True
    _marks: Marks | None = None
    _kept: tuple[int, dict[str, Any]] | None = None  # at which column, and a copy of all

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._unused = _copied(layer.__dict__)

    @property
    def intact(self) -> bool:
        return are_as_marked(_leaves(self._layer.__dict__, torch.Tensor), self._marks)

    def note_state(self) -> None:
        self._marks = marks_of(_leaves(self._layer.__dict__, torch.Tensor))

    @property
    def native(self) -> Any:
        """The layer that transformers sees."""
        return self._layer

    @property
    def length(self) -> int | None:
        return int(self._layer.get_seq_length()) if isinstance(self._layer, CacheLayerMixin) else None

    def fresh(self) -> "OpaqueLayer":
        layer = copy.copy(self._layer)
        layer.__dict__ = _copied(self._unused)
        return OpaqueLayer(layer)

    def share(self) -> "OpaqueLayer":
        """A copy."""
        twin = self.fresh()
        twin._layer.__dict__ = _copied(self._layer.__dict__)
        return twin

    def reset(self) -> None:
        self._kept = None
        self._become(self._unused)

    def _become(self, held: dict[str, Any]) -> None:
        """Hold a copy of that."""
        record_past = getattr(self._layer, "record_past", None)
        self._layer.__dict__ = _copied(held)
        if record_past is not None:
            self._layer.record_past = record_past

    def can_rewind(self, length: int) -> bool:
        return self._kept is not None and self._kept[0] == length

    def truncate(self, length: int) -> None:
        if self._kept is not None and self._kept[0] >= length:
            column, held = self._kept
            if column == length:
                self._become(held)
            else:
                self._kept = None

    def keep_state(self, column: int) -> None:
        self._kept = column, _copied(self._layer.__dict__)

    def can_crop(self, tokens: int, held: int) -> bool:
        """Whether `crop` can remove the last tokens of `held`: none."""
        return tokens == 0

    def stop_recording(self) -> None:
        self._kept = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in _leaves(self._layer.__dict__, torch.Tensor))

    def state_bytes(self) -> int:
        return self.nbytes

    def save_state(self, row: int) -> LayerState | None:
        assert row == 0, "such a layer cannot be taken apart by rows"
        saved = _on_host(self._layer.__dict__)
        return LayerState([held.tensor for held in _leaves(saved, _OnHost)], saved)

    def load_states(self, rows: Sequence[LayerState | None]) -> None:
        (state,) = rows
        assert state is not None
        self._kept = None
        self._become(state.extra)


# Anything that a layer may hold: tensors, in containers.


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A tensor in host memory, and where it was."""

    tensor: torch.Tensor
    device: torch.device


def _on_host(value: Any) -> Any:
    """A copy of `value` with all tensors in host memory."""
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(False), torch.no_grad():
            return _OnHost(torch.empty_like(value, device="cpu").copy_(value.detach()), value.device)
    if isinstance(value, dict):
        return {key: _on_host(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(inner) for inner in value)
    return value


def _copied(value: Any) -> Any:
    """A copy of `value`, tensors that were put on the host back where they were."""
    if isinstance(value, _OnHost):
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty_like(value.tensor, device=value.device).copy_(value.tensor)
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(False), torch.no_grad():
            return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(inner) for inner in value)
    return value


def _leaves(value: Any, kind: type[T]) -> list[T]:
    """All objects of a kind in `value`, and in containers within it."""
    if isinstance(value, kind):
        return [value]
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [leaf for part in inner for leaf in _leaves(part, kind)]


class IndexedLayer(GrowingLayer):  # type: ignore[no-untyped-call]
    """Full-attention K/V with the keys of an indexer that picks what is attended to (dynamic sparse attention).

    `indexer_keys` are [batch, length, index_head_dim]; `indexer_position_ids`, for models that keep them,
    [kinds, batch, length].
    """

    can_branch = False
    _num_tensors = 4  # keys, values, indexer keys, indexer positions

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether there are indexer keys."""
        return self._tensors[2].buffer is not None

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """All indexer keys, or None."""
        return self._tensors[2].view()[:, 0] if self.is_indexer_initialized else None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append [batch, m, index_head_dim] and return all indexer keys."""
        self._append(2, indexer_key_states[:, None])
        return self._tensors[2].view()[:, 0]

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """All indexer positions, or None."""
        positions = self._tensors[3]
        return positions.view()[..., 0].transpose(0, 1) if positions.buffer is not None else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: torch.Tensor | None) -> None:
        if value is not None:  # the old ones with the new ones behind them
            new = value[..., self._tensors[3].stop :]
            self._append(3, new.transpose(0, 1)[..., None])


class SparseLayer(GrowingLayer):  # type: ignore[no-untyped-call]
    """Full-attention K/V with the keys [batch, heads, length, dim] that choose blocks to attend to (MiniMax-M3)."""

    can_branch = False
    _num_tensors = 3

    @property
    def idx_keys(self) -> torch.Tensor | None:
        """All index keys, or None."""
        return self._tensors[2].view() if self._tensors[2].buffer is not None else None

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Append [batch, heads, m, dim] and return all index keys."""
        self._append(2, idx_k)
        return self._tensors[2].view()


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
