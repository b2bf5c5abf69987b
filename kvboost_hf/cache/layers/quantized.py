"""A layer that holds its K/V as codes, and what a cache of such layers takes.

    columns   [0, sinks)   [sinks, coded)                 [coded, stop)
    held as   exact        blocks of `window`, in codes   exact: the window

When the window is twice as long as it has to be, its older half becomes a block: at fixed columns, however the columns
came. A block is encoded once. Where it is cut in two, its codes stay, and count up to the cut; the next block begins
there.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate

import torch
from transformers.cache_utils import CacheLayerMixin

from kvboost_hf.cache.codecs import LiveQuant, live_config, make_codec
from kvboost_hf.cache.codecs.base import Codec, Planes, Role
from kvboost_hf.cache.layers.base import ColumnSpec, Piece, Turn
from kvboost_hf.cache.layers.growing import ColumnLayer
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor, capacity, write_behind_padding
from kvboost_hf.compat import LayerRotation
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.fields import require_int
from kvboost_hf.handles import CodedKV, CodePlanes, KVHandle, read_in_place

_BLOCKS = 32  # encoded or decoded at once: bounds what a codec takes on its way


def block_capacity(blocks: int) -> int:
    """Blocks that a buffer for `blocks` of them is given."""
    return blocks + max(1, blocks // 16)


def _always(columns: int) -> Callable[[int], int]:
    return lambda needed: columns


class CodedTensor:
    """A tensor [batch, heads, columns, dim] that grows along its columns, in blocks that are encoded each on its own.

    The first columns, the `sinks`, stay exact, and at least `window` last ones, of which there are less than twice as
    many.
    """

    first = 0  # it lets go of none

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

        Returns all columns but those that were codes before, [batch, heads, columns, dim]; the new ones as they were
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


class QuantizedLayer(ColumnLayer):  # type: ignore[no-untyped-call]
    """Full-attention K/V of one layer, in codes but for the first and the last columns (`CodedTensor`).

    An attention that can read codes is given them. Any other is given all columns, decoded into tensors that nobody
    else keeps: at any time, those of one layer are whole. What is computed within one forward attends to itself
    exactly. No gradient reaches earlier forwards.
    """

    can_branch = True
    _tensors: list[CodedTensor]

    def __init__(self, codec: Codec, config: KVQuantConfig, rotation: LayerRotation | None) -> None:
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        self._codec, self._config, self._rotation = codec, config, rotation
        self.version = 0
        self._tampered = False  # somebody else has set keys or values
        self._tensors = self._empty()

    # What transformers calls

    # A compiled model breaks its graph here: shapes and lists change at each step.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, num_kv_heads, m, head_dim] and return everything that may be attended to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.version += 1
        keys, values = self._tensors
        if self.hands_out and not torch.is_grad_enabled() and read_in_place(CodedKV, key_states.device):
            codes = keys.code_planes(), values.code_planes()
            if codes[0] is not None and codes[1] is not None:
                return self._hand_out(codes[0], codes[1], key_states, value_states)
        return keys.append_and_view(key_states), values.append_and_view(value_states)

    def _hand_out(
        self, key_codes: CodePlanes, value_codes: CodePlanes, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return what was codes before as it is held."""
        keys, values = self._tensors
        blocks = keys.blocks
        exact = keys.append(key_states), values.append(value_states)
        lengths = _lengths(blocks, key_states.device)
        kv = CodedKV(key_codes, value_codes, lengths, sum(blocks), keys.sinks, *exact)
        made = (
            KVHandle(kv, partial(tensor.whole, len(blocks), part), part, part.shape[2] + kv.coded)
            for tensor, part in zip(self._tensors, exact, strict=True)
        )
        return next(made), next(made)

    def reset(self) -> None:
        self.version += 1
        self.is_initialized = self._tampered = False
        self._tensors = self._empty()

    # What the cache calls

    @property
    def intact(self) -> bool:
        return not self._tampered and super().intact

    @property
    def num_coded(self) -> int:
        """Columns held as codes."""
        return sum(self._tensors[0].blocks)

    def fresh(self) -> "QuantizedLayer":
        return QuantizedLayer(self._codec, self._config, self._rotation)

    def lend(self) -> "QuantizedLayer":
        """Another layer, for what has become codes cannot be taken back."""
        twin = self.share()
        twin.hands_out = self.hands_out
        return twin

    def expect_padding(self, columns: int) -> None:
        """Keep exact what every row of a batch begins with: all columns up to the first tokens of its shortest row."""
        for tensor in self._tensors:
            tensor.keep_first(columns + self._config.sink_tokens)

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        """A row's columns [start, stop), decoded."""
        if not self.is_initialized:
            return None
        return tuple(tensor.read(start, stop, slice(row, row + 1))[0] for tensor in self._tensors)

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]], turn: Turn | None = None) -> None:
        assert start == self.length, "every column is needed"
        like = next(piece for pieces in rows for piece in pieces)
        if not self.is_initialized:
            self.lazy_initialization(like[0], like[1])
        self.version += 1
        for i, tensor in enumerate(self._tensors):
            heads, _, dim = like[i].shape
            new = like[i].new_empty(len(rows), heads, stop - start, dim)
            for out, pieces in zip(new, rows, strict=True):
                write_behind_padding(out, [piece[i] for piece in pieces])
            tensor.append(new)

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        """The size of one token in each tensor, decoded."""
        held = [tensor.like for tensor in self._tensors] if self.is_initialized else []
        return tuple(ColumnSpec(like.shape[1], like.shape[3], like.dtype) for like in held)

    def _empty(self) -> list[CodedTensor]:
        rotation = self._rotation if self._rotation is not None and self._rotation.tensor == 0 else None
        sizes = self._config.sink_tokens, self._config.window
        keys = CodedTensor(self._codec, "keys", rotation, *sizes)
        return [keys, CodedTensor(self._codec, "values", None, *sizes)]

    def _hand_out_tensor(self, index: int) -> torch.Tensor:
        """Decoded, in a tensor that nobody else reads."""
        return self._tensors[index].read(0, self._tensors[index].stop)

    def _adopt(self, index: int, new: torch.Tensor | None) -> None:
        self._tampered = True
        self._tensors[index] = self._empty()[index]
        if new is not None:
            self._tensors[index].append(new)

    @property
    def _batch_size(self) -> int:
        return self._tensors[0].like.shape[0]


@lru_cache(maxsize=16)  # layers have the same blocks, and keep them for many steps
def _lengths(blocks: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(blocks, dtype=torch.int32, device=device)


def exact_layers(config: KVQuantConfig, layers: int) -> int:
    """How many layers at either end of a model with so many stay exact."""
    return min(config.exact_layers, layers // 4)


def mark(config: KVQuantConfig) -> bytes:
    """Names all that K/V computed on top of codes depends on."""
    parts = (make_codec(config).name, config.window, config.exact_layers)  # its name tells the `sink_tokens`
    return repr(parts).encode()


def live_bytes(
    config: LiveQuant,
    *,
    tokens: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes of a cache with live quantization after a prompt, room to spare included.

    While tokens are decoded one by one, it is what the cache takes at most: its buffers grow by an eighth at a time.

    Args:
        config: As it was passed as `live_quant`.
        tokens: Columns that the cache holds: padding and all.
        layers: How many layers the model has; all with full attention.
        kv_heads: Heads of keys, and of values.
        head_dim: The size of a key, and of a value.
        batch: Rows, without padding.
        dtype: The data type of the model.

    Raises:
        ValueError: for what `live_quant` refuses, and a number or data type that is none.

    Example:
        >>> config = KVQuantConfig(key_bits=4, value_bits=4)  # 4 GiB as it is
        >>> shapes = {"layers": 32, "kv_heads": 8, "head_dim": 128}
        >>> f"{live_bytes(config, tokens=32_768, **shapes) / 2**30:.2f} GiB"
        '1.55 GiB'
    """
    held = live_config(config)
    for name, size in {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch}.items():
        require_int(name, size)
    require_int("tokens", tokens, least=0)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"`dtype` must be a torch.dtype, got {dtype!r}. Pass model.dtype.")
    column = batch * kv_heads * head_dim * dtype.itemsize
    if held is None:
        return layers * 2 * column * capacity(tokens)
    codec, window = make_codec(held), held.window
    blocks = max((tokens - held.sink_tokens) // window - 1, 0)
    coded = 2 * column * (held.sink_tokens + 2 * window)
    if blocks:
        shape = (batch * block_capacity(blocks), kv_heads, window, head_dim)
        coded += codec.nbytes(shape, dtype, "keys") + codec.nbytes(shape, dtype, "values")
    exact = 2 * exact_layers(held, layers)
    return exact * 2 * column * capacity(tokens) + (layers - exact) * coded
