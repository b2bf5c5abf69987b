"""The form in which a store keeps tensors: the codec of each, and blocks of those that are alike.

The tensors of a block, of several layers, are encoded, moved and decoded together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from kvboost_hf import device_link
from kvboost_hf.cache.codecs.base import Codec, ExactStart, Planes, Raw, Role
from kvboost_hf.cache.kv.transfer import on_device
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.tiers.record import Blob
from kvboost_hf.compat import KeyRotation, LayerRotation

RAW = Raw()

_RUN = 1 << 17  # numbers to decode at once on a CPU


class ColumnFormat:
    """Format of columns in a store.

    Args:
        codec: The codec of keys and values; whatever else layers keep is kept as it is.
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
        alike: dict[tuple[Any, ...], int] = {}  # most layers, and most tensors, are like others
        own = self.rotation is not None or self._layers is not None  # layers may be kept in other ways
        for idx, layer in enumerate(layers):
            specs = layer.column_specs
            of_layer = (specs, idx if own else 0)
            if of_layer not in alike:
                alike[of_layer] = 0
                for at, spec in enumerate(specs):
                    form = self.of(idx, at, spec.dtype, at_start=at_start)
                    key = (form.codec, form.role, spec)
                    if key not in alike:
                        shape = (1, spec.heads, tokens, spec.dim)
                        alike[key] = form.codec.nbytes(shape, spec.dtype, form.role)
                    alike[of_layer] += alike[key]
            total += alike[of_layer]
        return total


class _TensorFormat(NamedTuple):
    codec: Codec
    role: Role
    rotation: LayerRotation | None


class Groups(NamedTuple):
    """Sizes of the groups of tensors that are moved together: the first, then doubled up to the most."""

    first: int
    most: int

    def end(self, at: int) -> int:
        """Behind the last tensor of the group that one belongs to."""
        stop = size = self.first
        while at >= stop:
            size = min(2 * size, self.most)
            stop += size
        return stop


class Arriving(Protocol):
    """A copy of planes that is under way."""

    def result(self) -> object:
        """Return once work that is done from now on finds them there."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Tensors of several layers that are alike, encoded together.

    Args:
        planes: The encoded planes, [tensors, …] each, in host memory.
        shape: heads, tokens and head_dim of each.
        dtype: The data type of each tensor.
        role: Keys or values.
        codec: Decodes them.
        rotations: The rotation of each tensor, or None.
        device: Where the model computed them.
        blob: The blob that the planes are views of, unchecked; None if they are owned.
        number: The number of this block in the blob.
        ready: Done when the planes have arrived in host memory, until when they are where the model computes; or,
            copied to a device, when they have arrived there. None if they were there from the start.
    """

    planes: Planes
    shape: tuple[int, int, int]
    dtype: torch.dtype
    role: Role
    codec: Codec
    rotations: tuple[LayerRotation | None, ...]
    device: torch.device
    blob: Blob | None = None
    number: int = 0
    ready: Arriving | None = None

    @classmethod
    def raw(cls, x: torch.Tensor) -> "Block":
        """Tensors [tensors, heads, tokens, head_dim] as they are."""
        count, heads, tokens, dim = x.shape
        planes = RAW.encode(x, "keys", ())
        return cls(planes, (heads, tokens, dim), x.dtype, "keys", RAW, (None,) * count, x.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        total = 0
        for plane in self.planes.values():
            total += plane.nbytes
        return total

    def wait(self) -> None:
        """Return once the planes can be read: by the host, or by what is queued on their device from now on."""
        if self.ready is not None:
            self.ready.result()

    def check(self, run: range | None = None) -> None:
        """Raise DamagedBlobError if tensors were read from somewhere, and are not what was written there."""
        if self.blob is not None:
            for name in self.planes:
                self.blob.check(f"{self.number}.{name}", run if run is not None else range(len(self.rotations)))

    @property
    def is_elsewhere(self) -> bool:
        """Whether its planes are not on the device that the model computes on, and have to be copied there."""
        return device_link.link.is_apart(self.device) and any(p.device != self.device for p in self.planes.values())

    @property
    def is_viewed(self) -> bool:
        """Whether its tensors are read where they are, one by one."""
        return self.codec.lossless and (self.device.type == "cpu" or not device_link.link.is_apart(self.device))

    def run(self, start: int, groups: Groups | None = None) -> range:
        """Tensors from `start` on to move and to decode at once: fewer calls, for little memory.

        Args:
            start: The first one.
            groups: Where they have to be moved, not all of them, so that those of the first layers are there early.
        """
        stop, is_apart = len(self.rotations), device_link.link.is_apart(self.device)
        if is_apart and groups is not None:
            stop = min(stop, groups.end(start))
        elif self.codec.lossless:
            return range(stop)
        elif not is_apart:
            stop = min(stop, start + max(1, _RUN // max(1, prod(self.shape))))
        if not self.codec.lossless:
            own = self.rotations[start]
            stop = next((at for at in range(start, stop) if self.rotations[at] is not own), stop)
        return range(start, stop)

    def decode(self, planes: Mapping[str, torch.Tensor], run: range) -> torch.Tensor:
        """Tensors [len(run), heads, tokens, head_dim], from planes that may have been moved."""
        return self._decode({name: plane[run.start : run.stop] for name, plane in planes.items()}, run)

    def move(self, run: range) -> torch.Tensor:
        """Tensors [len(run), heads, tokens, head_dim] where the model computes.

        Raises:
            DamagedBlobError: if they are not what was stored (where `is_viewed`, checked later).
        """
        self.wait()
        if self.blob is not None and not self.is_viewed:
            self.check(run)
        send, device = device_link.link.send, self.device
        return self._decode(
            {name: send(plane[run.start : run.stop], device) for name, plane in self.planes.items()}, run
        )

    def viewed(self, run: range) -> torch.Tensor:
        """Tensors [len(run), heads, tokens, head_dim] where they are, of a block that `is_viewed`."""
        if self.ready is not None:
            self.ready.result()
        (plane,) = self.planes.values()
        own = plane[run.start : run.stop]
        return own if own.device == self.device else device_link.link.send(own, self.device)

    def _decode(self, own: Mapping[str, torch.Tensor], run: range) -> torch.Tensor:
        return self.codec.decode(own, (len(run), *self.shape), self.dtype, self.role, self.rotations[run.start])

    def owned(self) -> "Block":
        """A copy in host memory; pinned, if it is to go to a device with memory of its own."""
        self.wait()
        pins = device_link.link.is_apart(self.device)
        planes: Planes = {}
        for name, plane in self.planes.items():
            shape, dtype = plane.shape, plane.dtype
            host = device_link.link.pinned(shape, dtype) if pins else torch.empty(shape, dtype=dtype)
            planes[name] = host.copy_(plane)
        return replace(self, planes=planes, blob=None, ready=None)

    def promoted(self) -> "Block":
        """A copy on the device that the model computes on."""
        self.wait()
        planes, ready = on_device(self.planes, self.device)
        return replace(self, planes=planes, blob=None, ready=ready)
