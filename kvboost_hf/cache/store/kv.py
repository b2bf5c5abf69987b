"""What the store keeps of a chunk, of all layers: columns, or the states at a point."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from kvboost_hf.cache.codecs.base import Codec, Planes, Role
from kvboost_hf.cache.codecs.raw import Raw
from kvboost_hf.cache.layers.base import LayerState, Piece, ReuseLayer
from kvboost_hf.cache.layers.pieced import are_joined_on
from kvboost_hf.cache.store import transfer
from kvboost_hf.cache.tiers.record import Blob
from kvboost_hf.compat import KeyRotation, LayerRotation

_RAW = Raw()
_RUN = 1 << 17  # numbers to decode at once on a CPU

Place = tuple[int, int]  # block, and index in it


class ColumnFormat:
    """How a store keeps columns.

    Args:
        codec: Of keys and values; whatever else layers keep is kept as it is.
        rotation: How the model's keys turn with their positions, where that is known.
    """

    def __init__(self, codec: Codec = _RAW, rotation: KeyRotation | None = None) -> None:
        self.codec, self.rotation = codec if not codec.lossless else _RAW, rotation
        self._known: dict[tuple[int, int, torch.dtype], _TensorFormat] = {}

    def of(self, layer_idx: int, tensor: int, dtype: torch.dtype) -> "_TensorFormat":
        """How one of a layer's tensors is kept."""
        key = layer_idx, tensor, dtype
        known = self._known.get(key)
        if known is None:
            rotation = self.rotation.layers[layer_idx] if self.rotation is not None else None
            keys = tensor == (rotation.tensor if rotation is not None else 0)
            codec = self.codec if tensor < 2 and dtype.is_floating_point else _RAW
            known = self._known[key] = _TensorFormat(codec, "keys" if keys else "values", rotation if keys else None)
        return known

    def nbytes(self, layers: Sequence[ReuseLayer], tokens: int) -> int:
        """Bytes of so many columns of one row."""
        total = 0
        alike: dict[tuple[Any, ...], int] = {}  # most tensors are like others
        for idx, layer in enumerate(layers):
            for at, spec in enumerate(layer.column_specs):
                form = self.of(idx, at, spec.dtype)
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


class Groups(NamedTuple):
    """How many tensors of a block are moved together: a few at first, and twice as many each time, up to the most."""

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
    """Planes that are on their way."""

    def result(self) -> object:
        """Return once what is done from now on finds them there."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Tensors of several layers that are alike, encoded together.

    Args:
        planes: What the codec has made of them, [tensors, …] each, in host memory.
        shape: heads, tokens and head_dim of each.
        dtype: Of each.
        role: What they are.
        codec: Decodes them.
        rotations: Of each.
        device: Where the model computed them.
        blob: What the planes are views of, unchecked, or None if they are owned.
        number: Of this block in the blob.
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
        planes = _RAW.encode(x, "keys", ())
        return cls(planes, (heads, tokens, dim), x.dtype, "keys", _RAW, (None,) * count, x.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes.values())

    def wait(self) -> None:
        """Return once the planes can be read: by the host, or by what is queued on their device from now on."""
        if self.ready is not None:
            self.ready.result()

    def check(self, index: int) -> None:
        """Raise DamagedBlobError if a tensor was read from somewhere, and is not what was written there."""
        if self.blob is not None:
            for name in self.planes:
                self.blob.check(f"{self.number}.{name}", index)

    @property
    def is_elsewhere(self) -> bool:
        """Whether its planes are not on the device that the model computes on, and have to be copied there."""
        return transfer.link.is_apart(self.device) and any(p.device != self.device for p in self.planes.values())

    @property
    def is_viewed(self) -> bool:
        """Whether its tensors are read where they are, one by one."""
        return self.codec.lossless and not transfer.link.is_apart(self.device)

    def run(self, start: int, groups: Groups | None = None) -> range:
        """Tensors from `start` on to move and to decode at once: fewer calls, for little memory.

        Args:
            start: The first one.
            groups: Where they have to be moved, not all of them, so that those of the first layers are there early.
        """
        stop, is_apart = len(self.rotations), transfer.link.is_apart(self.device)
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
            DamagedBlobError: if they are not what was stored; not told of what `is_viewed`.
        """
        self.wait()
        if self.blob is not None and not self.is_viewed:
            for index in run:
                self.check(index)
        send, device = transfer.link.send, self.device
        return self._decode(
            {name: send(plane[run.start : run.stop], device) for name, plane in self.planes.items()}, run
        )

    def _decode(self, own: Mapping[str, torch.Tensor], run: range) -> torch.Tensor:
        return self.codec.decode(own, (len(run), *self.shape), self.dtype, self.role, self.rotations[run.start])


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys and values of a chunk, owned, in as few blocks as their shapes and devices allow.

    All layers of a chunk come and go together, so that one block, and one transfer, serves them all where the layers
    are alike. Layers with a window have blocks of their own: far from the end of a prompt they are not needed.

    Args:
        blocks: What is kept.
        places: Per layer, where each of its tensors is; None for a layer without columns.
    """

    blocks: tuple[Block, ...]
    places: tuple[tuple[Place, ...] | None, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is kept, in host memory."""
        for block in self.blocks:
            block.wait()
        return tuple(plane for block in self.blocks for plane in block.planes.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(block.nbytes for block in self.blocks)

    def can_follow(self, other: "LayerKV") -> bool:
        """Whether both can be copied together: on a GPU, not encoded, and different in nothing but their tokens."""
        return (
            self.places == other.places
            and len(self.blocks) == len(other.blocks)
            and all(map(_alike, self.blocks, other.blocks))
        )

    @property
    def nbytes_elsewhere(self) -> int:
        """Bytes that must be copied to a device before it can compute with them."""
        return sum(block.nbytes for block in self.blocks if block.is_elsewhere)

    def reader(self, groups: Groups | None = None) -> "LayerKVReader":
        """Access where the model computes; in groups, if it is read layer by layer, and once: see `Block.run`."""
        return LayerKVReader(self, groups)

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
            for at in range(len(block.rotations)):
                block.check(at)

    def owned(self) -> "LayerKV":
        """The same in host memory of its own, checked."""
        self.check()
        return LayerKV(tuple(map(_owned, self.blocks)), self.places)

    def promoted(self) -> "LayerKV":
        """A copy where the model computes, checked. It is made behind all that is queued there so far."""
        self.check()
        return LayerKV(tuple(map(_promoted, self.blocks)), self.places)


def _alike(block: Block, other: Block) -> bool:
    return (
        block.device == other.device
        and are_joined_on(block.device)
        and block.codec.lossless
        and other.codec.lossless
        and block.dtype == other.dtype
        and block.shape[::2] == other.shape[::2]
    )


class LayerKVReader:
    """Columns of a chunk where the model computes: views on a CPU, else copies of several layers at once."""

    def __init__(self, kv: LayerKV, groups: Groups | None = None) -> None:
        self._kv, self._groups = kv, groups
        self._decoded: dict[int, tuple[range, Sequence[torch.Tensor]]] = {}
        self._last: tuple[int, Piece | None] | None = None  # pieces of one chunk are read one after the other
        self._views = self._all_views()

    def _all_views(self) -> list[Piece | None] | None:
        """The tensors of all layers, where they need neither be moved, decoded nor checked."""
        blocks = self._kv.blocks
        if not all(block.is_viewed and block.blob is None for block in blocks):
            return None
        decoded = [block.move(range(len(block.rotations))).unbind(0) for block in blocks]
        return [
            tuple([decoded[number][at] for number, at in places]) if places is not None else None
            for places in self._kv.places
        ]

    def layer(self, index: int) -> Piece | None:
        """The tensors of a layer, [heads, tokens, dim] each, or None if it has no columns.

        Raises:
            DamagedBlobError: if they are not what was stored.
        """
        if self._views is not None:
            return self._views[index]
        if self._last is None or self._last[0] != index:
            places = self.places(index)
            self._last = index, tuple(self._tensor(*place) for place in places) if places is not None else None
        return self._last[1]

    def places(self, index: int) -> tuple[Place, ...] | None:
        """Where the tensors of a layer are."""
        return self._kv.places[index]

    def run(self, number: int, at: int) -> range:
        """Tensors of a block that are moved together, from one on."""
        return self._kv.blocks[number].run(at, self._groups)

    def move(self, number: int, run: range) -> torch.Tensor:
        """See `Block.move`."""
        return self._kv.blocks[number].move(run)

    def _tensor(self, number: int, at: int) -> torch.Tensor:
        run, decoded = self._decoded.get(number, (range(0), ()))
        if at not in run:
            run = self.run(number, at)
            decoded = self.move(number, run).unbind(0)
            self._decoded[number] = run, decoded
        block = self._kv.blocks[number]
        if block.is_viewed:  # from a file, the others need not be there yet
            block.check(at)
        return decoded[at - run.start]


class JoinedKVReader:
    """Columns of consecutive chunks, copied together where the model computes.

    Args:
        readers: Of the chunks, in order, each of which can follow the one before.
    """

    def __init__(self, readers: Sequence[LayerKVReader]) -> None:
        self._readers = readers
        self._joined: dict[int, tuple[range, Sequence[torch.Tensor]]] = {}

    def layer(self, index: int) -> Piece | None:
        """See `LayerKVReader.layer`."""
        places = self._readers[0].places(index)
        return tuple(self._tensor(*place) for place in places) if places is not None else None

    def _tensor(self, number: int, at: int) -> torch.Tensor:
        run, joined = self._joined.get(number, (range(0), ()))
        if at not in run:
            run = self._readers[0].run(number, at)
            joined = torch.cat([reader.move(number, run) for reader in self._readers], dim=2).unbind(0)
            self._joined[number] = run, joined
        return joined[at - run.start]


def copy_columns(
    layers: Sequence[ReuseLayer], row: int, start: int, stop: int, form: ColumnFormat | None = None
) -> LayerKV:
    """Copy a row's columns [start, stop) of every layer to host memory, in a format; None keeps them as they are."""
    form = form or ColumnFormat()
    numbers: dict[tuple[Any, ...], int] = {}  # of the blocks, by what their tensors have in common
    parts: list[list[torch.Tensor]] = []
    rotations: list[list[LayerRotation | None]] = []
    places: list[tuple[Place, ...] | None] = []
    for idx, layer in enumerate(layers):
        columns = layer.columns(row, start, stop)
        own: list[Place] = []
        for at, part in enumerate(columns or ()):
            codec, role, rotation = form.of(idx, at, part.dtype)
            key = (part.shape, part.dtype, part.device, layer.is_sliding, codec, "keys" if codec is _RAW else role)
            number = numbers.setdefault(key, len(parts))
            if number == len(parts):
                parts.append([])
                rotations.append([])
            own.append((number, len(parts[number])))
            parts[number].append(part)
            rotations[number].append(rotation)
        places.append(tuple(own) if columns is not None else None)
    blocks: list[Block] = []
    for (shape, dtype, device, _, codec, role), number in numbers.items():
        planes, ready = _on_host(codec.encode(torch.stack(parts[number]).detach(), role, rotations[number]))
        blocks.append(Block(planes, tuple(shape), dtype, role, codec, tuple(rotations[number]), device, ready=ready))
    return LayerKV(tuple(blocks), tuple(places))


def _on_host(planes: Planes) -> tuple[Planes, Future[None] | None]:
    """Planes that nobody else writes to; of a device with memory of its own, there as soon as the future is done."""
    device = next(iter(planes.values())).device
    if not transfer.link.is_apart(device):
        return {name: plane.cpu() for name, plane in planes.items()}, None
    planes = dict(planes)
    return planes, _staging(device).submit(planes)


class _Staging:
    """Brings planes from a device to pinned host memory: in a thread, and by a stream, of its own.

    To pin memory takes longer than to copy into it (8 ms and 0.3 ms for 17 MB beside an H100), and whoever has asked
    for a token waits for neither. Until they have arrived, planes take memory of the device: no more than an eighth of
    what is free there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, transfer.link.stream("staging", device)
        self._thread = ThreadPoolExecutor(1, "kvboost-staging")
        self._lock = threading.Lock()
        self._waiting = self._room = 0  # bytes

    def submit(self, planes: Planes) -> Future[None]:
        """Have planes moved, each in its place; they are computed by what was queued on the current stream so far."""
        made = transfer.link.record(transfer.link.current(self._device))
        nbytes = sum(plane.nbytes for plane in planes.values())
        with self._lock:
            if not self._waiting:
                self._room = transfer.link.free_bytes(self._device) // 8
            self._waiting += nbytes
            is_full = self._waiting > self._room
            moved = self._thread.submit(self._move, planes, made, nbytes)
        if is_full:
            wait([moved])
        return moved

    def _move(self, planes: Planes, made: transfer.Event, nbytes: int) -> None:
        try:
            hosts = {name: transfer.link.pinned(plane.shape, plane.dtype) for name, plane in planes.items()}
            self._stream.wait_event(made)
            with transfer.link.using(self._stream):
                for name, plane in planes.items():
                    hosts[name].copy_(plane, non_blocking=True)
            transfer.link.record(self._stream).synchronize()
            planes.update(hosts)
        finally:
            with self._lock:
                self._waiting -= nbytes


@cache
def _staging(device: torch.device) -> _Staging:
    return _Staging(device)


def _owned(block: Block) -> Block:
    """A copy of a block in host memory; pinned, if it is to go to a device with memory of its own."""
    block.wait()
    pins = transfer.link.is_apart(block.device)
    planes: Planes = {}
    for name, plane in block.planes.items():
        host = transfer.link.pinned(plane.shape, plane.dtype) if pins else torch.empty(plane.shape, dtype=plane.dtype)
        planes[name] = host.copy_(plane)
    return replace(block, planes=planes, blob=None, ready=None)


def _promoted(block: Block) -> Block:
    """A copy of a block on its device."""
    block.wait()
    link, device = transfer.link, block.device
    if not link.is_apart(device):
        copies = {name: plane.to(device, copy=True) for name, plane in block.planes.items()}
        return replace(block, planes=copies, blob=None, ready=None)
    planes = {name: torch.empty_like(plane, device=device) for name, plane in block.planes.items()}
    stream = link.stream("promotion", device)
    # Behind the forward that has asked for a token, which none of these copies holds up.
    stream.wait_event(link.record(link.current(device)))
    with link.using(stream):
        for name, plane in block.planes.items():
            planes[name].copy_(plane, non_blocking=True)
            link.hold(planes[name], stream)
    return replace(block, planes=planes, blob=None, ready=_OnDevice(device, link.record(stream)))


class _OnDevice:
    """A copy to a device that is under way.

    Args:
        device: Where to.
        copied: Behind it.
    """

    def __init__(self, device: torch.device, copied: transfer.Event) -> None:
        self._device, self._copied = device, copied
        self._is_there = False

    def result(self) -> None:
        """What is queued from now on finds it there."""
        if not self._is_there:
            transfer.link.current(self._device).wait_event(self._copied)
            self._is_there = self._copied.query()


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The states of all layers of one row after some token; None for a layer without one."""

    layers: tuple[LayerState | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(state.nbytes for state in self.layers if state is not None)

    @property
    def can_be_written(self) -> bool:
        """Whether there is nothing in them that has no form outside of this process."""
        return all(state is None or state.told is not None for state in self.layers)

    def parts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """All tensors by name, and how they belong together, as JSON."""
        tensors: dict[str, torch.Tensor] = {}
        told: list[dict[str, Any] | None] = []
        for idx, state in enumerate(self.layers):
            if state is not None:
                tensors |= {f"{idx}.{at}": t[None].contiguous() for at, t in enumerate(state.tensors) if t is not None}
                told.append({"present": [tensor is not None for tensor in state.tensors], "extra": state.told})
            else:
                told.append(None)
        return tensors, {"layers": told}

    def owned(self) -> "LayerStates":
        """The same in memory of its own."""
        return LayerStates(
            tuple(
                LayerState([t.clone() if t is not None else None for t in state.tensors], state.extra)
                if state is not None
                else None
                for state in self.layers
            )
        )


def copy_states(layers: Sequence[ReuseLayer], row: int) -> LayerStates:
    """Copy a row's states of every layer to host memory."""
    return LayerStates(tuple(layer.save_state(row) for layer in layers))
