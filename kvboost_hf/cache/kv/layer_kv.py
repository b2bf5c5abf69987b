"""K/V of a chunk, of all layers: blocks of tensors that are alike, and readers of them.

The tensors of a block, of several layers, are encoded, moved and decoded together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from kvboost_hf import device_link
from kvboost_hf.cache.codecs.base import Codec, Planes, Raw, Role
from kvboost_hf.cache.layers import base
from kvboost_hf.cache.layers.base import Piece
from kvboost_hf.cache.tiers.record import Blob
from kvboost_hf.compat import LayerRotation
from kvboost_hf.device_link import on_device

RAW = Raw()

_RUN = 1 << 17  # numbers to decode at once on a CPU
Place = tuple[int, int]  # block, and index in it


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
    """Tensors of several layers that are alike, encoded together."""

    planes: Planes  # the encoded planes, [tensors, …] each, in host memory
    shape: tuple[int, int, int]  # heads, tokens and head_dim of each
    dtype: torch.dtype  # the data type of each tensor
    role: Role
    codec: Codec
    rotations: tuple[LayerRotation | None, ...]  # the rotation of each tensor, or None
    device: torch.device  # where the model computed them
    blob: Blob | None = None  # the blob that the planes are views of, unchecked; None if they are owned
    number: int = 0
    # Done when the planes have arrived in host memory, until when they are where the model computes; or, copied to a
    # device, when they have arrived there. None if they were there from the start.
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
    def is_viewed(self) -> bool:
        """Whether its tensors are read where they are, one by one."""
        return self.codec.lossless and (self.device.type == "cpu" or not device_link.link.is_apart(self.device))

    def run(self, start: int, groups: Groups | None = None) -> range:
        """Tensors from `start` on to move and to decode at once: fewer calls, for little memory.

        In `groups`, where they have to be moved, so that those of the first layers are there early.
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

    def move(self, run: range) -> torch.Tensor:
        """Tensors [len(run), heads, tokens, head_dim] where the model computes.

        DamagedBlobError: they are not what was stored (where `is_viewed`, checked later).
        """
        self.wait()
        if self.blob is not None and not self.is_viewed:
            self.check(run)
        send, device = device_link.link.send, self.device
        planes = {name: send(plane[run.start : run.stop], device) for name, plane in self.planes.items()}
        shape, rotation = (len(run), *self.shape), self.rotations[run.start]
        return self.codec.decode(planes, shape, self.dtype, self.role, rotation)

    def viewed(self, run: range) -> torch.Tensor:
        """Tensors [len(run), heads, tokens, head_dim] where they are, of a block that `is_viewed`."""
        if self.ready is not None:
            self.ready.result()
        (plane,) = self.planes.values()
        own = plane[run.start : run.stop]
        return own if own.device == self.device else device_link.link.send(own, self.device)

    def owned(self) -> "Block":
        """A copy in host memory; pinned, if it is to go to a device with memory of its own."""
        self.wait()
        pins = device_link.link.is_apart(self.device)
        planes: Planes = {}
        for name, plane in self.planes.items():
            shape, dtype = plane.shape, plane.dtype
            host = device_link.link.pinned(shape, dtype) if pins else torch.empty(shape, dtype=dtype, device="cpu")
            planes[name] = host.copy_(plane)
        return replace(self, planes=planes, blob=None, ready=None)

    def promoted(self) -> "Block":
        """A copy on the device that the model computes on."""
        self.wait()
        planes, ready = on_device(self.planes, self.device)
        return replace(self, planes=planes, blob=None, ready=ready)


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys and values of a chunk, owned, in as few blocks as their shapes and devices allow.

    All layers of a chunk come and go together, so that one block, and one transfer, serves them all where the layers
    are alike. Layers with a window have blocks of their own: far from the end of a prompt they are not needed.
    """

    blocks: tuple[Block, ...]
    # Per layer, where each of its tensors is; None for a layer without columns.
    places: tuple[tuple[Place, ...] | None, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All planes, in host memory."""
        for block in self.blocks:
            block.wait()
        return tuple(plane for block in self.blocks for plane in block.planes.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        total = 0
        for block in self.blocks:
            for plane in block.planes.values():
                total += plane.nbytes
        return total

    def is_like(self, other: "LayerKV") -> bool:
        """Whether neither is encoded, and they differ in nothing but their tokens."""
        return (
            self.places == other.places
            and len(self.blocks) == len(other.blocks)
            and all(map(_alike, self.blocks, other.blocks))
        )

    def can_follow(self, other: "LayerKV") -> bool:
        """Whether both can be copied together: they are alike, and on a GPU."""
        return all([block.device.type in base.JOINED_ON for block in self.blocks]) and self.is_like(other)

    @property
    def is_here(self) -> bool:
        """Whether the tensors of all layers are in memory where the model computes, and need not be decoded."""
        for block in self.blocks:
            if not block.is_viewed or (block.blob is not None and not block.blob.was_checked):
                return False
        return True

    @property
    def nbytes_elsewhere(self) -> int:
        """Bytes that must be copied to a device before it can compute with them."""
        apart = [block for block in self.blocks if device_link.link.is_apart(block.device)]
        return sum(b.nbytes for b in apart if any(plane.device != b.device for plane in b.planes.values()))

    # As a blob

    def parts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All planes by name, and how they belong together, as JSON."""
        for block in self.blocks:
            block.wait()
        tensors = {f"{n}.{name}": plane for n, block in enumerate(self.blocks) for name, plane in block.planes.items()}
        blocks = [
            {
                "planes": list(block.planes),
                "shape": block.shape,
                "dtype": str(block.dtype).removeprefix("torch."),
                "device": str(block.device),
            }
            for block in self.blocks
        ]
        return tensors, {"blocks": blocks, "places": self.places}

    def check(self) -> None:
        """Raise DamagedBlobError if something of it was read from somewhere, and is not what was written there."""
        for block in self.blocks:
            block.check()

    def owned(self) -> "LayerKV":
        """The same in host memory of its own, checked."""
        self.check()
        return LayerKV(tuple(block.owned() for block in self.blocks), self.places)

    def promoted(self) -> "LayerKV":
        """A copy where the model computes, checked. It is made behind all that is queued there so far."""
        self.check()
        return LayerKV(tuple(block.promoted() for block in self.blocks), self.places)


def are_alike_in_place(chunks: Sequence[LayerKV]) -> bool:
    """Whether chunks differ in nothing but their tokens, and are where the model computes, decoded and checked."""
    first = chunks[0]
    if any([block.blob is not None for kv in chunks for block in kv.blocks]):
        return False
    return all([block.is_viewed for block in first.blocks]) and all([kv.is_like(first) for kv in chunks[1:]])


def _alike(block: Block, other: Block) -> bool:
    return (
        block.device == other.device
        and block.codec.lossless
        and other.codec.lossless
        and block.dtype == other.dtype
        and block.shape[::2] == other.shape[::2]
    )


class LayerKVReader:
    """Columns of a chunk where the model computes: views on a CPU, else copies of several layers at once."""

    def __init__(self, kv: LayerKV, groups: Groups | None = None) -> None:
        self.kv, self._groups = kv, groups
        self._decoded: dict[int, tuple[range, Sequence[torch.Tensor], bool]] = {}
        self._last: tuple[int, Piece | None] | None = None  # pieces of one chunk are read one after the other
        self._at_once: bool | None = None  # whether all layers are read at once, when the first one is
        self._views: list[Piece | None] | None = None  # of all layers

    def _all_views(self) -> list[Piece | None]:
        self.kv.check()
        decoded = []
        for block in self.kv.blocks:
            decoded.append(block.viewed(range(len(block.rotations))).unbind(0))
        views: list[Piece | None] = []
        for places in self.kv.places:
            views.append(tuple([decoded[number][at] for number, at in places]) if places is not None else None)
        return views

    def layer(self, index: int) -> Piece | None:
        """The tensors of a layer, [heads, tokens, dim] each, or None if it has no columns.

        DamagedBlobError: they are not what was stored.
        """
        if self._at_once is None:
            self._at_once = self.kv.is_here
        if self._views is None and self._at_once:
            self._views = self._all_views()
        if self._views is not None:
            return self._views[index]
        if self._last is None or self._last[0] != index:
            places = self.kv.places[index]
            self._last = index, tuple(self._tensor(*place) for place in places) if places is not None else None
        return self._last[1]

    def _tensor(self, number: int, at: int) -> torch.Tensor:
        run, decoded, unchecked = self._decoded.get(number, (range(0), (), False))
        block = self.kv.blocks[number]
        if at not in run:
            run = block.run(at, self._groups)
            decoded = block.move(run).unbind(0)
            unchecked = block.blob is not None and block.is_viewed  # the others need not be there yet
            self._decoded[number] = run, decoded, unchecked
        if unchecked:
            block.check(range(at, at + 1))
        return decoded[at - run.start]


class JoinedKVReader:
    """Columns of consecutive chunks, each of which can follow the one before, joined where the model computes."""

    def __init__(self, chunks: Sequence[LayerKV], groups: Groups | None) -> None:
        self._chunks, self._groups = chunks, groups
        self._joined: dict[int, tuple[range, Sequence[torch.Tensor]]] = {}

    def layer(self, index: int) -> Piece | None:
        """The tensors of a layer, [heads, tokens, dim] each, of all chunks joined; None if it has no columns."""
        places = self._chunks[0].places[index]
        return tuple(self._tensor(*place) for place in places) if places is not None else None

    def _tensor(self, number: int, at: int) -> torch.Tensor:
        run, joined = self._joined.get(number, (range(0), ()))
        if at not in run:
            run = self._chunks[0].blocks[number].run(at, self._groups)
            joined = torch.cat([kv.blocks[number].move(run) for kv in self._chunks], dim=2).unbind(0)
            self._joined[number] = run, joined
        return joined[at - run.start]


class ColumnReader(Protocol):
    """Has K/V of consecutive tokens."""

    def layer(self, layer_idx: int, /) -> Piece | None:
        """The tensors of a layer, [heads, tokens, dim] each, or None if it keeps no columns."""


class Zeros:
    """Reads zeros, `tokens` at most, for columns that are computed when all others are in place; of the form of
    another.
    """

    def __init__(self, like: ColumnReader, tokens: int) -> None:
        self._like, self._tokens = like, tokens
        self._made: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._last: tuple[int, Piece | None] | None = None  # a layer is read for all rows before the next one

    def layer(self, layer_idx: int) -> Piece | None:
        """Zeros for each tensor of a layer, [heads, tokens, dim], or None if it keeps no columns."""
        if self._last is None or self._last[0] != layer_idx:
            like = self._like.layer(layer_idx)
            self._last = layer_idx, None if like is None else tuple([self._zeros(each) for each in like])
        return self._last[1]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        kind = like.dtype, like.device
        if kind not in self._made:
            self._made[kind] = torch.zeros((), dtype=like.dtype, device=like.device)
        return self._made[kind].expand(like.shape[0], self._tokens, like.shape[2])
