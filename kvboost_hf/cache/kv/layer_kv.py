"""K/V of a chunk, of all layers: copied from them, read for them, and as parts of blobs.

A kernel reads the columns of many chunks by one table, which is made here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvboost_hf import device_link
from kvboost_hf.cache.kv.blocks import RAW, Block, ColumnFormat, Groups
from kvboost_hf.cache.kv.transfer import on_host
from kvboost_hf.cache.layers import base
from kvboost_hf.cache.layers.base import Piece, ReuseLayer
from kvboost_hf.compat import LayerRotation

Place = tuple[int, int]  # block, and index in it


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys and values of a chunk, owned, in as few blocks as their shapes and devices allow.

    All layers of a chunk come and go together, so that one block, and one transfer, serves them all where the layers
    are alike. Layers with a window have blocks of their own: far from the end of a prompt they are not needed.

    Args:
        blocks: All tensors.
        places: Per layer, where each of its tensors is; None for a layer without columns.
    """

    blocks: tuple[Block, ...]
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
        return sum(block.nbytes for block in self.blocks if block.is_elsewhere)

    def reader(self, groups: Groups | None = None) -> "LayerKVReader":
        """A reader of its columns where the model computes; in groups, if they are read layer by layer, and once."""
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

        Raises:
            DamagedBlobError: if they are not what was stored.
        """
        if self._at_once is None:
            self._at_once = self.kv.is_here
        if self._views is None and self._at_once:
            self._views = self._all_views()
        if self._views is not None:
            return self._views[index]
        if self._last is None or self._last[0] != index:
            places = self.places(index)
            self._last = index, tuple(self._tensor(*place) for place in places) if places is not None else None
        return self._last[1]

    def places(self, index: int) -> tuple[Place, ...] | None:
        """Places of the tensors of a layer."""
        return self.kv.places[index]

    def run(self, number: int, at: int) -> range:
        """Tensors of a block that are moved together, from one on."""
        return self.kv.blocks[number].run(at, self._groups)

    def move(self, number: int, run: range) -> torch.Tensor:
        """Tensors of a block where the model computes, as `Block.move` gives them."""
        return self.kv.blocks[number].move(run)

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
    """Columns of consecutive chunks, copied together where the model computes.

    Args:
        readers: What reads the chunks, in order; each can follow the one before.
    """

    def __init__(self, readers: Sequence[LayerKVReader]) -> None:
        self._readers = readers
        self._joined: dict[int, tuple[range, Sequence[torch.Tensor]]] = {}

    def layer(self, index: int) -> Piece | None:
        """The tensors of a layer, [heads, tokens, dim] each, of all chunks joined; None if it has no columns."""
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
    layers: Sequence[ReuseLayer],
    row: int,
    start: int,
    stop: int,
    form: ColumnFormat | None = None,
    *,
    at_start: bool = False,
) -> LayerKV:
    """Copy columns of every layer to host memory.

    Args:
        layers: All of them.
        row: The number of the row in the batch.
        start: The first column.
        stop: The one behind the last.
        form: To copy them to; None keeps them as they are.
        at_start: The row begins at `start`.
    """
    form = form or ColumnFormat()
    numbers: dict[tuple[Any, ...], int] = {}  # of the blocks, by what their tensors have in common
    parts: list[list[torch.Tensor]] = []
    rotations: list[list[LayerRotation | None]] = []
    places: list[tuple[Place, ...] | None] = []
    for idx, layer in enumerate(layers):
        columns = layer.columns(row, start, stop)
        own: list[Place] = []
        for at, part in enumerate(columns or ()):
            codec, role, rotation = form.of(idx, at, part.dtype, at_start=at_start)
            key = (part.shape, part.dtype, part.device, layer.is_sliding, codec, "keys" if codec is RAW else role)
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
        planes, ready = on_host(codec.encode(torch.stack(parts[number]).detach(), role, rotations[number]))
        blocks.append(Block(planes, tuple(shape), dtype, role, codec, tuple(rotations[number]), device, ready=ready))
    return LayerKV(tuple(blocks), tuple(places))


_ALIGNED_BYTES = 16
_FIELDS = (
    5  # row, first column, columns, first token in the chunk, tokens of the chunk; then an address for each block
)


class Run(NamedTuple):
    """Consecutive tokens of one chunk, and where they go."""

    kv: LayerKV | None  # None for columns that are zeroed
    at: int  # first token in the chunk
    length: int  # tokens
    row: int
    column: int  # of the first token, among those that a layer has opened


def can_gather(chunks: Sequence[LayerKV], device: torch.device) -> bool:
    """Whether a kernel can read the tensors of chunks, as they are, where they are.

    They must have arrived: their planes are where they are going to stay.

    Args:
        chunks: The K/V of the chunks.
        device: The device of the layers, with memory of its own.
    """
    link = device_link.link
    return all(
        block.codec.lossless
        and block.blob is None
        and block.shape[1] == kv.blocks[0].shape[1]
        and plane.data_ptr() % _ALIGNED_BYTES == 0
        and (plane.device == device or link.is_pinned(plane))
        for kv in chunks
        for block in kv.blocks
        for plane in block.planes.values()
    ) and all(kv.is_like(chunks[0]) for kv in chunks[1:])


def table_of(runs: Iterable[Run], like: LayerKV, device: torch.device) -> torch.Tensor:
    """Make the table [runs, 5 + blocks] of runs, int64, on a device: one copy, behind the current stream's work.

    Args:
        runs: All of them, of chunks that `can_gather` accepts.
        like: One of the chunks.
        device: The device.
    """
    addresses: dict[int, tuple[int, ...]] = {}
    rows: list[tuple[int, ...]] = []
    for kv, at, length, row, column in runs:
        if kv is None:
            rows.append((row, column, length, at, 0, *(0 for _ in like.blocks)))
            continue
        own = addresses.get(id(kv))
        if own is None:
            own = addresses[id(kv)] = tuple(_plane(block.planes).data_ptr() for block in kv.blocks)
        rows.append((row, column, length, at, kv.blocks[0].shape[1], *own))
    shape = torch.Size((len(rows), _FIELDS + len(like.blocks)))
    host = device_link.link.pinned(shape, torch.int64)
    host.copy_(torch.tensor(rows, dtype=torch.int64).view(shape))
    return device_link.link.send(host, device)


def places_in_table(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The columns of the table with the addresses of blocks, in place of the numbers of the blocks."""
    return [(_FIELDS + block, at) for block, at in places]


def planes_of(chunks: Iterable[LayerKV]) -> list[torch.Tensor]:
    """The tensors that a kernel reads."""
    return [_plane(block.planes) for kv in chunks for block in kv.blocks]


def _plane(planes: dict[str, torch.Tensor]) -> torch.Tensor:
    (plane,) = planes.values()
    return plane
