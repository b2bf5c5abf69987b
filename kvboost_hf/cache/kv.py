"""What the store keeps of a chunk, of all layers: columns, or the states at a point."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from kvboost_hf.cache.codecs.base import Codec, Planes, Role
from kvboost_hf.cache.codecs.raw import Raw
from kvboost_hf.cache.layers import LayerState, Piece, ReuseLayer
from kvboost_hf.cache.pieced import are_joined_on
from kvboost_hf.cache.tiers.record import Blob
from kvboost_hf.compat import KeyRotation, LayerRotation

_RAW = Raw()
_RUN = 1 << 17  # numbers to decode at once

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
        return sum(
            self.of(idx, at, spec.dtype).codec.nbytes(
                (1, spec.heads, tokens, spec.dim), spec.dtype, self._role(idx, at)
            )
            for idx, layer in enumerate(layers)
            for at, spec in enumerate(layer.column_specs)
        )

    def _role(self, layer_idx: int, tensor: int) -> Role:
        return self.of(layer_idx, tensor, torch.float32).role


class _TensorFormat(NamedTuple):
    codec: Codec
    role: Role
    rotation: LayerRotation | None


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
        ready: Done when the planes have arrived in host memory, until when they are where the model computes; None if
            they were there from the start.
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
    ready: Future[None] | None = None

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
        """Return once the planes are in host memory, and can be read."""
        if self.ready is not None:
            self.ready.result()

    def check(self, index: int) -> None:
        """Raise DamagedBlobError if a tensor was read from somewhere, and is not what was written there."""
        if self.blob is not None:
            for name in self.planes:
                self.blob.check(f"{self.number}.{name}", index)

    def run(self, start: int) -> range:
        """Tensors from `start` on to decode at once: fewer calls, for little memory; all where none is taken."""
        if self.codec.lossless:
            return range(len(self.rotations))
        most = max(1, _RUN // max(1, prod(self.shape)))
        stop = start + 1
        while stop < min(start + most, len(self.rotations)) and self.rotations[stop] is self.rotations[start]:
            stop += 1
        return range(start, stop)

    def decode(self, planes: Mapping[str, torch.Tensor], run: range) -> torch.Tensor:
        """Tensors [len(run), heads, tokens, head_dim], from planes that may have been moved."""
        own = {name: plane[run.start : run.stop] for name, plane in planes.items()}
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

    def reader(self) -> "LayerKVReader":
        """Access where the model computes."""
        return LayerKVReader(self)

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
        return self._with_planes(lambda block: {name: _own(p, block.device) for name, p in block.planes.items()})

    def moved(self) -> "LayerKV":
        """A copy where the model computes, checked."""
        self.check()
        return self._with_planes(
            lambda block: {name: p.to(block.device, non_blocking=True, copy=True) for name, p in block.planes.items()}
        )

    def _with_planes(self, planes: Callable[[Block], Planes]) -> "LayerKV":
        for block in self.blocks:
            block.wait()
        blocks = (replace(block, planes=planes(block), blob=None, ready=None) for block in self.blocks)
        return LayerKV(tuple(blocks), self.places)


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
    """Columns of a chunk where the model computes: views on a CPU, else one transfer for each plane that is read."""

    def __init__(self, kv: LayerKV) -> None:
        self._kv = kv
        self._planes: dict[int, Planes] = {}
        self._decoded: dict[int, tuple[range, Sequence[torch.Tensor]]] = {}
        self._last: tuple[int, Piece | None] | None = None  # pieces of one chunk are read one after the other
        self._views = self._all_views()

    def _all_views(self) -> list[Piece | None] | None:
        """The tensors of all layers, where they need neither be moved, decoded nor checked."""
        blocks = self._kv.blocks
        if not all(each.codec.lossless and each.blob is None and each.device.type == "cpu" for each in blocks):
            return None
        decoded: list[Sequence[torch.Tensor]] = []
        for block in blocks:
            block.wait()
            decoded.append(block.decode(block.planes, range(len(block.rotations))).unbind(0))
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

    def whole(self, number: int) -> torch.Tensor:
        """All tensors of a block, [tensors, heads, tokens, head_dim].

        Raises:
            DamagedBlobError: if they are not what was stored.
        """
        block = self._kv.blocks[number]
        for at in range(len(block.rotations)):
            block.check(at)
        self._move(number)
        return block.decode(self._planes[number], range(len(block.rotations)))

    def _move(self, number: int) -> None:
        """Have the planes of a block where the model computes."""
        if number not in self._planes:
            block = self._kv.blocks[number]
            block.wait()
            moved = {name: plane.to(block.device, non_blocking=True) for name, plane in block.planes.items()}
            self._planes[number] = moved

    def _tensor(self, number: int, at: int) -> torch.Tensor:
        block = self._kv.blocks[number]
        self._move(number)
        run, decoded = self._decoded.get(number, (range(0), ()))
        if at not in run:
            run = block.run(at)
            if not block.codec.lossless:
                for index in run:
                    block.check(index)
            decoded = block.decode(self._planes[number], run).unbind(0)
            self._decoded[number] = run, decoded
        if block.codec.lossless:  # read one by one: from a file, the others need not be there yet
            block.check(at)
        return decoded[at - run.start]


class JoinedKVReader:
    """Columns of consecutive chunks, copied together where the model computes.

    Args:
        readers: Of the chunks, in order, each of which can follow the one before.
    """

    def __init__(self, readers: Sequence[LayerKVReader]) -> None:
        self._readers = readers
        self._joined: dict[int, tuple[torch.Tensor, ...]] = {}

    def layer(self, index: int) -> Piece | None:
        """See `LayerKVReader.layer`."""
        places = self._readers[0].places(index)
        return tuple(self._tensor(*place) for place in places) if places is not None else None

    def _tensor(self, number: int, at: int) -> torch.Tensor:
        if number not in self._joined:
            self._joined[number] = torch.cat([reader.whole(number) for reader in self._readers], dim=2).unbind(0)
        return self._joined[number][at]


def copy_columns(
    layers: Sequence[ReuseLayer], row: int, start: int, stop: int, form: ColumnFormat | None = None
) -> LayerKV:
    """Copy a row's columns [start, stop) of every layer to host memory, in a format; None keeps them as they are."""
    form = form or ColumnFormat()
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    rotations: dict[tuple[Any, ...], list[LayerRotation | None]] = {}
    places: list[tuple[Place, ...] | None] = []

    def place(part: torch.Tensor, layer_idx: int, tensor: int, windowed: bool) -> Place:
        codec, role, rotation = form.of(layer_idx, tensor, part.dtype)
        alike = (codec, role) if codec is not _RAW else (codec, "keys")
        key = (part.device, part.dtype, part.shape, windowed, *alike)
        groups.setdefault(key, []).append(part.detach())
        rotations.setdefault(key, []).append(rotation)
        return list(groups).index(key), len(groups[key]) - 1

    for idx, layer in enumerate(layers):
        columns = layer.columns(row, start, stop)
        parts = enumerate(columns) if columns is not None else ()
        places.append(
            tuple(place(part, idx, at, layer.is_sliding) for at, part in parts) if columns is not None else None
        )
    blocks: list[Block] = []
    for key, parts_of in groups.items():
        device, dtype, shape, _, codec, role = key
        planes = codec.encode(torch.stack(parts_of), role, rotations[key])
        planes, ready = _on_host(planes)
        own = tuple(rotations[key])
        blocks.append(Block(planes, tuple(shape), dtype, role, codec, own, device, ready=ready))
    return LayerKV(tuple(blocks), tuple(places))


def _on_host(planes: Planes) -> tuple[Planes, Future[None] | None]:
    """Planes that nobody else writes to; of a CUDA device, in host memory as soon as the future is done."""
    device = next(iter(planes.values())).device
    if device.type != "cuda":
        return {name: plane.cpu() for name, plane in planes.items()}, None
    planes = dict(planes)
    return planes, _staging(device).submit(planes)


class _Staging:
    """Brings planes from a CUDA device to pinned host memory: in a thread, and by a stream, of its own.

    To pin memory takes longer than to copy into it (8 ms and 0.3 ms for 17 MB beside an H100), and whoever has asked
    for a token waits for neither. Until they have arrived, planes take memory of the device: no more than an eighth of
    what is free there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "kvboost-staging")
        self._lock = threading.Lock()
        self._waiting = self._room = 0  # bytes

    def submit(self, planes: Planes) -> Future[None]:
        """Have planes moved, each in its place; they are computed by what was queued on the current stream so far."""
        made = torch.cuda.current_stream(self._device).record_event()
        nbytes = sum(plane.nbytes for plane in planes.values())
        with self._lock:
            if not self._waiting:
                self._room = torch.cuda.mem_get_info(self._device)[0] // 8
            self._waiting += nbytes
            is_full = self._waiting > self._room
            moved = self._thread.submit(self._move, planes, made, nbytes)
        if is_full:
            wait([moved])
        return moved

    def _move(self, planes: Planes, made: torch.cuda.Event, nbytes: int) -> None:
        try:
            hosts = {name: _pinned(plane) for name, plane in planes.items()}
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(made)
                for name, plane in planes.items():
                    hosts[name].copy_(plane, non_blocking=True)
                arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                arrived.record(self._stream)
            arrived.synchronize()
            planes.update(hosts)
        finally:
            with self._lock:
                self._waiting -= nbytes


@cache
def _staging(device: torch.device) -> _Staging:
    return _Staging(device)


def _pinned(like: torch.Tensor) -> torch.Tensor:
    """Host memory that a device copies from and to by itself; ordinary memory where no more can be pinned."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(like.shape, dtype=like.dtype)


def _own(plane: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy in host memory; pinned, if it is to go to a CUDA device."""
    host = _pinned(plane) if device.type == "cuda" else torch.empty(plane.shape, dtype=plane.dtype)
    return host.copy_(plane)


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
