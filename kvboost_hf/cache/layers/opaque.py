"""A layer that only its model understands: all of it is saved and restored as one state."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvboost_hf.cache.layers.base import LayerState, ReuseLayer
from kvboost_hf.cache.layers.stateful import Marks, are_as_marked, marks_of


class OpaqueLayer(ReuseLayer):
    """A layer that only its model understands: all of it is one state, of a batch of one row.

    Args:
        layer: The layer that transformers made, unused yet.
    """

    is_stateful = True
    single_row = True
    _marks: Marks | None = None

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._unused = _copied(layer.__dict__)

    @property
    def intact(self) -> bool:
        """See `ReuseLayer.intact`."""
        return are_as_marked(_tensors(self._layer.__dict__), self._marks)

    def note_state(self) -> None:
        """See `ReuseLayer.note_state`."""
        self._marks = marks_of(_tensors(self._layer.__dict__))

    @property
    def native(self) -> Any:
        """The layer that transformers sees."""
        return self._layer

    @property
    def length(self) -> int | None:
        """Columns seen so far; None for a layer that does not count them."""
        return int(self._layer.get_seq_length()) if isinstance(self._layer, CacheLayerMixin) else None

    def fresh(self) -> "OpaqueLayer":
        """An empty layer of the same kind."""
        layer = copy.copy(self._layer)
        layer.__dict__ = _copied(self._unused)
        return OpaqueLayer(layer)

    def share(self) -> "OpaqueLayer":
        """A copy."""
        twin = self.fresh()
        twin._layer.__dict__ = _copied(self._layer.__dict__)
        return twin

    def reset(self) -> None:
        """Drop everything."""
        record_past = getattr(self._layer, "record_past", None)
        self._layer.__dict__ = _copied(self._unused)
        if record_past is not None:
            self._layer.record_past = record_past

    def can_rewind(self, length: int) -> bool:
        """See `ReuseLayer.can_rewind`."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in _tensors(self._layer.__dict__))

    def state_bytes(self) -> int:
        """See `ReuseLayer.state_bytes`."""
        return self.nbytes

    def save_state(self, row: int) -> LayerState | None:
        """See `ReuseLayer.save_state`."""
        assert row == 0, "such a layer cannot be taken apart by rows"
        saved = _on_host(self._layer.__dict__)
        return LayerState([held.tensor for held in _held(saved)], saved)

    def load_states(self, rows: Sequence[LayerState | None]) -> None:
        """See `ReuseLayer.load_states`."""
        (state,) = rows
        assert state is not None
        record_past = getattr(self._layer, "record_past", None)
        self._layer.__dict__ = _copied(state.extra)
        if record_past is not None:
            self._layer.record_past = record_past


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


def _held(value: Any) -> list[_OnHost]:
    if isinstance(value, _OnHost):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [held for part in inner for held in _held(part)]


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


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in inner for tensor in _tensors(part)]
