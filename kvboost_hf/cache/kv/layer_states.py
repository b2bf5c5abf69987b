"""`LayerStates`: the states of all layers after some token, as a store keeps them: as they are, or in fewer bits.

The codecs are those of K/V. A recurrent state of one row, [heads, …, key dim, value dim], is encoded as values are,
with a scale for each group of numbers along its last dimension. A convolution state, [channels, kernel], is encoded by
tokens, as [kernel, channels].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from kvboost_hf.cache.codecs.base import Codec, Planes
from kvboost_hf.cache.kv.layer_kv import RAW
from kvboost_hf.cache.layers.base import LayerState, ReuseLayer, extra_as_json


class StateCodes(NamedTuple):
    """A tensor of a state, encoded."""

    planes: Planes  # codes and scales, [1, …] each, in host memory
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes.values())

    def decode(self) -> torch.Tensor:
        """The tensor, in memory of its own."""
        heads, rows, dim = as_columns(self.shape)
        columns = self.codec.decode(self.planes, (1, heads, rows, dim), self.dtype, "values", None)
        return (columns[0, 0].mT.contiguous() if len(self.shape) == 2 else columns).reshape(self.shape)

    def clone(self) -> "StateCodes":
        """The same in memory of its own."""
        return self._replace(planes={name: plane.clone() for name, plane in self.planes.items()})


def as_columns(shape: Sequence[int]) -> tuple[int, int, int]:
    """Heads, tokens and dim under which a codec takes a tensor of this shape."""
    if len(shape) == 2:
        return 1, shape[1], shape[0]
    return prod(shape[:-2]), shape[-2], shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class CodedState:
    """The state of one row in a layer, with some of its tensors encoded."""

    tensors: tuple[torch.Tensor | StateCodes | None, ...]  # as `LayerState` has them
    extra: Any  # the same

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors if t is not None)

    def decode(self) -> LayerState:
        """The state, as the layer takes it."""
        return LayerState([t.decode() if isinstance(t, StateCodes) else t for t in self.tensors], self.extra)


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The states of all layers of one row after some token; None for a layer without one."""

    layers: tuple[LayerState | CodedState | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(state.nbytes for state in self.layers if state is not None)

    @property
    def can_be_written(self) -> bool:
        """Whether all of them have a form outside of this process."""
        return all(state is None or extra_as_json(state.extra) is not None for state in self.layers)

    def layer(self, index: int) -> LayerState | None:
        """The state of a layer, decoded; None for a layer without one."""
        state = self.layers[index]
        return state.decode() if isinstance(state, CodedState) else state

    def parts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All tensors by name, and how they belong together, as JSON."""
        tensors: dict[str, torch.Tensor] = {}
        layout: list[dict[str, Any] | None] = []
        for idx, state in enumerate(self.layers):
            if state is None:
                layout.append(None)
                continue
            for at, t in enumerate(state.tensors):
                if isinstance(t, StateCodes):
                    tensors |= {f"{idx}.{at}.{name}": plane for name, plane in t.planes.items()}
                elif t is not None:
                    tensors[f"{idx}.{at}"] = t[None].contiguous()
            present = [tensor is not None for tensor in state.tensors]
            layout.append({"present": present, "extra": extra_as_json(state.extra)})
        return tensors, {"layers": layout}

    def owned(self) -> "LayerStates":
        """The same in memory of its own."""
        return LayerStates(tuple(_owned(state) if state is not None else None for state in self.layers))


def _owned(state: LayerState | CodedState) -> LayerState | CodedState:
    if isinstance(state, CodedState):
        return CodedState(tuple(t.clone() if t is not None else None for t in state.tensors), state.extra)
    return LayerState([t.clone() if t is not None else None for t in state.tensors], state.extra)


def copy_states(layers: Sequence[ReuseLayer], row: int) -> LayerStates:
    """Copy a row's states of every layer to host memory."""
    return LayerStates(tuple(layer.save_state(row) for layer in layers))


class StateFormat:
    """Format of states in a store: tensors that the codec does not make smaller are kept as they are.

    Attributes:
        mark: Names the codec in roots, behind that of K/V; nothing for states as they are.
        gain: Bytes of the states that were encoded last, for each byte of their codes.
    """

    def __init__(self, codec: Codec = RAW) -> None:
        self.codec, self.gain = codec if not codec.lossless else RAW, 1.0
        self.mark = "" if codec.lossless else f";states:{codec.name}"

    def codes(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether a tensor of a state is encoded."""
        return self._coded_bytes(shape, dtype) is not None

    def nbytes(self, layers: Sequence[ReuseLayer], row: int) -> int:
        """Bytes that the states of a row, as they are now, would take."""
        if self.codec.lossless:
            return sum(layer.state_bytes() for layer in layers)
        views = [layer.view_state(row) for layer in layers]  # none of a layer that only its model understands
        return sum(
            self._bytes_of(view) if view is not None else layer.state_bytes()
            for view, layer in zip(views, layers, strict=True)
        )

    def nbytes_of(self, states: LayerStates) -> int:
        """Bytes that states would take."""
        return sum(self._bytes_of(state) for state in states.layers if state is not None)

    def encode(self, states: LayerStates) -> LayerStates:
        """The states in this format; tensors that stay as they are are not copied."""
        if self.codec.lossless:
            return states
        coded = LayerStates(tuple(self._encoded(state) for state in states.layers))
        self.gain = states.nbytes / max(coded.nbytes, 1)
        return coded

    def _coded_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Bytes of the codes of a tensor; None if it stays as it is."""
        if self.codec.lossless or len(shape) < 2 or not dtype.is_floating_point:
            return None
        nbytes = self.codec.nbytes((1, *as_columns(shape)), dtype, "values")
        return nbytes if nbytes < prod(shape) * dtype.itemsize else None

    def _bytes_of(self, state: LayerState | CodedState) -> int:
        if isinstance(state, CodedState) or extra_as_json(state.extra) is None:
            return state.nbytes
        total = 0
        for t in state.tensors:
            if t is not None:
                coded = self._coded_bytes(tuple(t.shape), t.dtype)
                total += t.nbytes if coded is None else coded
        return total

    def _encoded(self, state: LayerState | CodedState | None) -> LayerState | CodedState | None:
        if not isinstance(state, LayerState) or extra_as_json(state.extra) is None:
            return state  # what has no form outside of this process is what its model understands, and nobody else
        return CodedState(tuple(self._encoded_tensor(t) for t in state.tensors), state.extra)

    def _encoded_tensor(self, x: torch.Tensor | None) -> torch.Tensor | StateCodes | None:
        if x is None or not self.codes(tuple(x.shape), x.dtype):
            return x
        columns = (x.mT if x.ndim == 2 else x).reshape(1, *as_columns(x.shape))
        return StateCodes(self.codec.encode(columns, "values", (None,)), tuple(x.shape), x.dtype, self.codec)
