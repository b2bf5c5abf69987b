"""Keys or values of which most are held as codes.

    columns   [0, sinks)   [sinks, coded)                 [coded, stop)
    held as   exact        blocks of `window`, in codes   exact: the window

When the window is twice as long as it has to be, its older half becomes a block: at fixed columns, however the columns
came. A block is encoded once. Where it is cut in two, its codes stay, and count up to the cut; the next block begins
there.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from kvboost_hf.cache.codecs.base import Codec, Planes, Role
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor
from kvboost_hf.compat import LayerRotation
from kvboost_hf.handles import CodePlanes

_BLOCKS = 32  # encoded or decoded at once: bounds what a codec takes on its way


def block_capacity(blocks: int) -> int:
    """Blocks that a buffer for `blocks` of them is given."""
    return blocks + max(1, blocks // 16)


def _always(columns: int) -> Callable[[int], int]:
    return lambda needed: columns


class CodedTensor:
    """A tensor [batch, heads, columns, dim] that grows along its columns.

    Args:
        codec: Encodes the blocks, each on its own.
        role: What it holds.
        rotation: How it turns with the position, or None.
        sinks: The first columns, which stay exact.
        window: At least so many last columns are exact, and less than twice as many.
    """

    def __init__(self, codec: Codec, role: Role, rotation: LayerRotation | None, sinks: int, window: int) -> None:
        self._codec, self._role, self._rotation = codec, role, rotation
        self._sinks, self._window = sinks, window
        self._exact = GrowingTensor(_always(sinks + 2 * window))  # the sinks, and the window behind them
        self._blocks: list[int] = []  # of each, how many of its columns count
        self._planes: dict[str, GrowingTensor] = {}  # [batch, 1, blocks, what one block has of the plane]
        self._shapes: dict[str, torch.Size] = {}  # of what one block has of a plane

    @property
    def stop(self) -> int:
        """Columns held."""
        return self._exact.stop + sum(self._blocks)

    @property
    def like(self) -> torch.Tensor:
        """A tensor with the batch size, heads, dim, dtype and device of the columns."""
        assert self._exact.buffer is not None
        return self._exact.buffer

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, room to spare included."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def keep_first(self, columns: int) -> None:
        """Keep so many first columns exact, in place of `sinks`; too late once there are blocks."""
        if not self._blocks:
            self._sinks = columns
            self._exact.room = _always(columns + 2 * self._window)

    @torch.no_grad()
    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Append [batch, heads, m, dim], and encode what leaves the window.

        Returns:
            All columns but those that were codes before, [batch, heads, columns, dim]; the new ones as they were
            given. Not to be kept for longer than until the next call.
        """
        blocks = (self._exact.stop + new.shape[2] - self._sinks) // self._window - 1
        if blocks <= 0:
            self._exact.append(new)
            return self._exact.view()
        if self._exact.stop:
            new = torch.cat([self._exact.view(), new], dim=2)
        sinks, coded, window = new.tensor_split((self._sinks, self._sinks + blocks * self._window), dim=2)
        self._encode(coded)
        self._exact.truncate(0)
        self._exact.append(torch.cat([sinks, window], dim=2))
        return new

    def append_and_view(self, new: torch.Tensor) -> torch.Tensor:
        """Append [batch, heads, m, dim] and return all columns, the new ones as they were given."""
        if torch.is_grad_enabled():  # what a graph has seen must not be written to
            seen = torch.cat([self.read(0, self.stop), new], dim=2) if self.stop else new
            self.append(new)
            return seen
        blocks = len(self._blocks)
        exact = self.append(new)
        return self.whole(blocks, exact) if blocks else exact

    @torch.no_grad()
    def read(self, start: int, stop: int, rows: slice = slice(None)) -> torch.Tensor:
        """Columns [start, stop) of some rows, decoded, in a new tensor."""
        return self._read(start, stop, rows, len(self._blocks), self._exact.view()[rows])

    @torch.no_grad()
    def whole(self, blocks: int, exact: torch.Tensor) -> torch.Tensor:
        """All columns: the first `blocks` blocks, decoded, between the exact ones that `append` has returned."""
        return self._read(0, exact.shape[2] + sum(self._blocks[:blocks]), slice(None), blocks, exact)

    def code_planes(self) -> CodePlanes | None:
        """The quantized columns, for an attention that reads codes; None if there are none, or none can."""
        if not self._blocks:
            return None
        planes = {
            name: torch.unflatten(plane.view()[:, 0], -1, tuple(self._shapes[name]))
            for name, plane in self._planes.items()
        }
        return self._codec.code_planes(planes, self._role, self._rotation, self._window, self.like.shape[3])

    @property
    def blocks(self) -> tuple[int, ...]:
        """Of each block, how many of its columns count."""
        return tuple(self._blocks)

    @property
    def sinks(self) -> int:
        """How many of the first columns stay exact."""
        return self._sinks

    def _read(self, start: int, stop: int, rows: slice, blocks: int, exact: torch.Tensor) -> torch.Tensor:
        out = exact.new_empty((*exact.shape[:2], stop - start, exact.shape[3]))
        coded = sum(self._blocks[:blocks])
        sinks, window = exact[:, :, : self._sinks], exact[:, :, self._sinks :]
        decoded = self._decoded(start, min(stop, self._sinks + coded), rows)
        for first, part in ((0, sinks), *decoded, (self._sinks + coded, window)):
            begin, end = max(first, start), min(first + part.shape[2], stop)
            if begin < end:
                out[:, :, begin - start : end - start].copy_(part[:, :, begin - first : end - first])
        return out

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""
        coded = sum(self._blocks)
        self._exact.truncate(max(length - coded, min(length, self._sinks)))
        starts = [0, *accumulate(self._blocks)]
        left = max(length - self._sinks, 0)
        self._blocks = [min(size, left - at) for size, at in zip(self._blocks, starts, strict=False) if at < left]
        for plane in self._planes.values():
            plane.truncate(len(self._blocks))

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        for tensor in self._tensors():
            tensor.select(rows)

    def share(self) -> "CodedTensor":
        """One that reads the same buffers; whichever of the two writes first copies."""
        twin = CodedTensor(self._codec, self._role, self._rotation, self._sinks, self._window)
        twin._exact, twin._blocks, twin._shapes = self._exact.share(), list(self._blocks), self._shapes
        twin._planes = {name: plane.share() for name, plane in self._planes.items()}
        return twin

    def move(self, device: torch.device) -> None:
        """Move all buffers."""
        for tensor in self._tensors():
            tensor.move(device)

    @property
    def intact(self) -> bool:
        """Whether nobody else has written to what is held."""
        return all(tensor.intact for tensor in self._tensors())

    def _tensors(self) -> Sequence[GrowingTensor]:
        return [self._exact, *self._planes.values()]

    def _encode(self, coded: torch.Tensor) -> None:
        """Append blocks, [batch, heads, blocks * window, dim]."""
        batch, heads, _, dim = coded.shape
        blocks = coded.reshape(batch, heads, -1, self._window, dim).transpose(1, 2)
        for part in torch.split(blocks, _BLOCKS, dim=1):
            count = part.shape[1]
            planes = self._codec.encode(part.flatten(0, 1), self._role, [self._rotation] * (batch * count))
            for name, plane in planes.items():
                self._shapes[name] = plane.shape[1:]
                held = self._planes.setdefault(name, GrowingTensor(block_capacity))
                held.append(plane.reshape(batch, 1, count, -1))
            self._blocks += [self._window] * count

    def _decoded(self, start: int, stop: int, rows: slice) -> Iterator[tuple[int, torch.Tensor]]:
        """The blocks that have a part in [start, stop): runs of columns, and where each begins."""
        starts = list(accumulate(self._blocks, initial=self._sinks))
        first = max(bisect_right(starts, start) - 1, 0)
        while first < len(self._blocks) and starts[first] < stop:
            last = min(first + _BLOCKS, len(self._blocks))
            while starts[last - 1] >= stop:
                last -= 1
            yield starts[first], self._decode(first, last, rows)
            first = last

    def _decode(self, first: int, last: int, rows: slice) -> torch.Tensor:
        """The columns that count of the blocks [first, last): [rows, heads, columns, dim]."""
        planes: Planes = {}
        for name, plane in self._planes.items():
            part = plane.view()[rows, 0, first:last]
            planes[name] = part.reshape(-1, *self._shapes[name])
        _, heads, _, dim = self.like.shape
        shape = (len(next(iter(planes.values()))), heads, self._window, dim)
        blocks = self._codec.decode(planes, shape, self.like.dtype, self._role, self._rotation)
        columns = blocks.view(-1, last - first, *shape[1:]).transpose(1, 2).flatten(2, 3)
        sizes = self._blocks[first:last]
        if min(sizes) == self._window:
            return columns
        return torch.cat([columns.narrow(2, i * self._window, size) for i, size in enumerate(sizes)], dim=2)
