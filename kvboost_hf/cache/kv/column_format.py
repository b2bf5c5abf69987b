"""The format that a store keeps columns in: a codec for keys and values, and how keys turn with their positions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvboost_hf.cache.codecs.base import Codec, Role
from kvboost_hf.cache.codecs.exact_start import ExactStart
from kvboost_hf.cache.codecs.raw import Raw
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.compat import KeyRotation, LayerRotation

RAW = Raw()


class ColumnFormat:
    """Format of columns in a store.

    Args:
        codec: Of keys and values; whatever else layers keep is kept as it is.
        rotation: How the model's keys turn with their positions, where that is known.
        layers: How many layers of K/V the model has: one behind them is kept as it is. None if it may have any number.
    """

    def __init__(self, codec: Codec = RAW, rotation: KeyRotation | None = None, layers: int | None = None) -> None:
        self.codec, self.rotation, self._layers = codec if not codec.lossless else RAW, rotation, layers
        self._at_start = ExactStart(self.codec) if self.codec.sink_tokens else self.codec
        self._known: dict[tuple[int, int, torch.dtype, bool], _TensorFormat] = {}

    def of(self, layer_idx: int, tensor: int, dtype: torch.dtype, *, at_start: bool) -> "_TensorFormat":
        """Format of one of a layer's tensors; `at_start` where its columns are those that a prompt begins with."""
        key = layer_idx, tensor, dtype, at_start
        known = self._known.get(key)
        if known is None and self._layers is not None and layer_idx >= self._layers:
            known = self._known[key] = _TensorFormat(RAW, "values", None)
        if known is None:
            rotation = self.rotation.layers[layer_idx] if self.rotation is not None else None
            keys = tensor == (rotation.tensor if rotation is not None else 0)
            own = self._at_start if at_start else self.codec
            codec = own if tensor < 2 and dtype.is_floating_point else RAW
            known = self._known[key] = _TensorFormat(codec, "keys" if keys else "values", rotation if keys else None)
        return known

    def nbytes(self, layers: Sequence[ReuseLayer], tokens: int, *, at_start: bool) -> int:
        """Bytes of so many columns of one row."""
        total = 0
        alike: dict[tuple[Any, ...], int] = {}  # most tensors are like others
        for idx, layer in enumerate(layers):
            for at, spec in enumerate(layer.column_specs):
                form = self.of(idx, at, spec.dtype, at_start=at_start)
                key = (form.codec, form.role, spec)
                if key not in alike:
                    shape = (1, spec.heads, tokens, spec.dim)
                    alike[key] = form.codec.nbytes(shape, spec.dtype, form.role)
                total += alike[key]
        return total


class _TensorFormat(NamedTuple):
    codec: Codec
    role: Role
    rotation: LayerRotation | None
