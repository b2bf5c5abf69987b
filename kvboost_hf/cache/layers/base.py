"""Cache layers that grow in place, and what every layer of a `ChunkReuseCache` can be asked for.

`DynamicLayer.update` concatenates: every decoded token copies the whole history of every layer. A `GrowingLayer` owns
buffers with room to spare and hands out views of them, so that an append costs what is appended.

Whoever gets a view can write to it. A `GrowingTensor` counts its own writes and compares that with PyTorch's version
counter, which a buffer shares with its views; `ReuseLayer.intact` is False once somebody else has written. Readers of
`layer.keys` and `layer.values` get a view that is checksummed, for `.data` and NumPy write past the counter. The layer
leaves that buffer to them with its next write, as stock layers do.

Two things can be kept of a layer. *Columns* are per token: K/V of any token can be copied out and filled in again.
A *state* sums up all tokens so far (linear attention): it can only be put back as it was when it was saved.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvboost_hf.cache.identity.checksum import checksum

Piece = tuple[torch.Tensor, ...]  # of one row, one tensor for each that the layer keeps: [heads, length, dim]


class ColumnSpec(NamedTuple):
    """What one token of one row takes in a tensor [batch, heads, columns, dim]."""

    heads: int
    dim: int
    dtype: torch.dtype


# Room beyond what is needed at a (re)allocation: an eighth, at least this many columns.
_MIN_SLACK = 128


class LayerState:
    """What a layer without columns needs to go on from a point: one row's tensors, in host memory.

    Args:
        tensors: In an order that only the kind of layer knows; None where there is nothing.
        extra: Whatever else it needs; small.
    """

    __slots__ = ("extra", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor | None], extra: Any) -> None:
        self.tensors = tuple(tensors)
        self.extra = extra

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors if t is not None)

    @property
    def told(self) -> Any:
        """`extra` as JSON, or None if there is something in it that has no form outside of this process."""
        try:
            return _as_json(self.extra)
        except TypeError:
            return None


def _as_json(value: Any) -> Any:
    """Lists, tuples, dicts, devices and dtypes as lists that begin with what they are."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_as_json(each) for each in value)]
    if type(value) is dict:
        return ["dict", *([_as_json(key), _as_json(each)] for key, each in value.items())]
    if isinstance(value, torch.device | torch.dtype):
        return [type(value).__name__, str(value).removeprefix("torch.")]
    raise TypeError(f"{type(value).__name__} has no form outside of this process.")


class ReuseLayer:
    """What the cache asks of each of its layers. The defaults are those of a layer that keeps nothing."""

    version: int = 0  # counts changes, so that whoever keeps records beside the layer can tell if it missed one
    is_stateful = False  # has a state: can only go back to where one was saved
    is_sliding = False  # needs the last columns only
    single_row = False  # cannot be taken apart by rows
    hands_out = False  # may give the attention K/V as it is held, in place of tensors of all columns
    can_branch = False  # can be lent

    @property
    def native(self) -> Any:
        """The layer that transformers sees."""
        return self

    @property
    def intact(self) -> bool:
        """Whether the layer holds what it was given, and nobody else has changed it."""
        return True

    def seal(self) -> None:
        """Accept what the layer holds: what `open` has made room for has just been written."""

    def note_state(self) -> None:
        """The state is what it should be: a forward, or a change to its rows, has just ended."""

    def lend(self) -> Any:
        """What to run a forward over tokens on that may not stay: until `truncate` to the present length."""
        return self.native

    @property
    def length(self) -> int | None:
        """Columns seen so far; None for a layer that does not count them."""
        return None

    @property
    def first(self) -> int:
        """The first column that is still held."""
        return 0

    def fresh(self) -> "ReuseLayer":
        """An empty layer of the same kind."""
        return type(self)()

    def share(self) -> "ReuseLayer":
        """A layer that holds the same and goes its own way."""
        return self.fresh()

    def __copy__(self) -> "ReuseLayer":
        return self.share()

    def reset(self) -> None:
        """Drop everything."""

    def can_rewind(self, length: int) -> bool:
        """Whether `truncate(length)` leaves the layer as it was at `length` columns."""
        return True

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""

    def expect_padding(self, columns: int) -> None:
        """The longest padding on the left, as far as it is known before the first token of its row."""

    def needed_from(self, length: int) -> int:
        """The first column that a layer with `length` columns needs to go on."""
        return 0

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        """Views of a row's columns [start, stop), or None if the layer keeps none."""
        return None

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]]) -> None:
        """Make columns [start, stop), computed before, the last ones.

        Args:
            start: Where they begin: at `length`, or further on where the columns in between are not needed.
            stop: Where they end.
            rows: For each row its pieces, in order. A row whose pieces are shorter than `stop - start` is padding on
                its left, and is zeroed there.
        """

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        """Of each tensor that `columns` returns."""
        return ()

    @property
    def bytes_per_column(self) -> int:
        """Bytes of one row's columns for one token."""
        return sum(spec.heads * spec.dim * spec.dtype.itemsize for spec in self.column_specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, room to spare included."""
        return 0

    def release(self, before: int) -> None:
        """Columns before `before` will not be asked for again, unless the model needs them to go on."""

    def stop_recording(self) -> None:
        """Undo `activate_past_recording`, which transformers cannot: `crop` will not be called."""

    def state_bytes(self) -> int:
        """Bytes that `save_state` would take."""
        return 0

    def save_state(self, row: int) -> LayerState | None:
        """A copy of a row's state, or None if there is none."""
        return None

    def load_states(self, rows: Sequence[LayerState | None]) -> None:
        """Put back the states of all rows."""


def capacity(length: int) -> int:
    """Columns that a buffer for `length` of them is given."""
    return length + max(_MIN_SLACK, length // 8)


class GrowingTensor:
    """A tensor [batch, heads, columns, dim] that grows along its columns, in a buffer with room to spare.

    Args:
        room: How many columns a buffer for so many is given.
    """

    __slots__ = ("_seen", "_uncounted", "_version", "buffer", "first", "room", "shared", "stop", "tampered")

    def __init__(self, room: Callable[[int], int] = capacity) -> None:
        self.room = room
        self.buffer: torch.Tensor | None = None  # columns [first, first + capacity)
        self.first = 0
        self.stop = 0
        self.shared = False  # somebody else reads the same buffer: copy before the next write
        self._version = 0  # of the buffer after our last write
        self.tampered = False  # somebody else has written to it
        self._uncounted = False  # a graph has: its writes are ours, but not counted one by one
        self._seen: tuple[torch.Tensor, bytes] | None = None  # what was handed out, and its checksum

    def view(self, start: int = 0) -> torch.Tensor:
        """Columns from `start`, or from the first one held, on."""
        assert self.buffer is not None
        return self.buffer[:, :, max(start - self.first, 0) : self.stop - self.first]

    def row(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop) of a row, as far as they are held."""
        assert self.buffer is not None
        end = min(stop, self.stop) - self.first
        begin = min(max(start - self.first, 0), end)
        return self.buffer[row].narrow(1, begin, end - begin)

    def append(self, new: torch.Tensor, keep_from: int = 0) -> None:
        """Append [batch, heads, m, dim]; columns before `keep_from` may go if the buffer is full."""
        held, self.stop = self.stop, self.stop + new.shape[2]
        self.make_writable(new, held, keep_from)
        assert self.buffer is not None
        self.buffer.narrow(2, held - self.first, self.stop - held).copy_(new)
        self.seal()

    def open(self, stop: int, like: torch.Tensor) -> torch.Tensor:
        """Make room for columns up to `stop` of [batch, heads, _, dim]; returns the new ones.

        They are to be written to, and `seal` to be called then.
        """
        held, self.stop = self.stop, stop
        self.make_writable(like, held, self.first)
        assert self.buffer is not None
        return self.buffer[:, :, held - self.first : stop - self.first]

    def scatter(self, columns: torch.Tensor, new: torch.Tensor) -> None:
        """Write [batch, heads, m, dim] over `columns` [batch, m], which are held."""
        self.make_writable(new, self.stop, self.first)
        assert self.buffer is not None
        at = (columns - self.first)[:, None, :, None].expand(new.shape)
        self.buffer.scatter_(2, at, new.detach())
        self.seal()

    def append_with_graph(self, new: torch.Tensor) -> None:
        """Append out of place, as stock layers do: autograd must keep every earlier version."""
        self.note_changes()
        if self.buffer is not None and self.stop > self.first:
            new = torch.cat([self.view(), new], dim=2)
        self.stop = self.first + new.shape[2]
        self._replace(new, shared=True)  # an in-place append would corrupt the graph

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[torch.Tensor]]) -> None:
        """See `ReuseLayer.fill`; the pieces are [heads, length, dim]."""
        like = next(piece for pieces in rows for piece in pieces)
        if start > self.stop:  # what is held does not reach: begin anew
            self.buffer, self.first, self.stop = None, start, start
        held, self.stop = self.stop, stop
        self.make_writable(like.expand(len(rows), -1, -1, -1), held, self.first)
        assert self.buffer is not None
        for row, pieces in enumerate(rows):
            write_behind_padding(self.buffer[row].narrow(1, held - self.first, stop - held), pieces)
        self.seal()

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""
        self.stop = max(min(self.stop, length), self.first)

    def trim(self, keep_from: int) -> bool:
        """Give back memory if columns before `keep_from` take most of the buffer; tells whether it did."""
        if self.buffer is None or self.room(self.stop - keep_from) * 2 >= self.buffer.shape[2]:
            return False
        if self.buffer.requires_grad:  # a copy would cut the graph: a view, as stock layers keep
            self.buffer = self.buffer[:, :, keep_from - self.first : self.stop - self.first]
            self.first = keep_from
        else:
            self._reallocate(self.buffer, self.stop, keep_from)
        return True

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        if self.buffer is not None:
            self.note_changes()
            # The spare columns move too: cheaper than an append that has to grow again.
            with torch.inference_mode(False):
                self._replace(self.buffer.index_select(0, rows.to(self.buffer.device).clone()))

    def move(self, device: torch.device) -> None:
        """Move the buffer."""
        if self.buffer is not None and self.buffer.device != device:
            self.note_changes()
            self._replace(self.buffer.to(device))

    def share(self) -> "GrowingTensor":
        """One that reads the same buffer; whichever of the two writes first copies."""
        twin = GrowingTensor(self.room)
        self.note_changes()
        twin.buffer, twin.first, twin.stop = self.buffer, self.first, self.stop
        twin._version, twin.tampered = self._version, self.tampered
        if self._seen is not None and self.buffer is not None:  # somebody has a view, and what they do is not for both
            twin._reallocate(self.buffer, self.stop, self.first)
        else:
            self.shared = twin.shared = True
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, room to spare included."""
        return self.buffer.untyped_storage().nbytes() if self.buffer is not None else 0

    def make_writable(self, like: torch.Tensor, held: int, keep_from: int) -> None:
        """Make room for columns up to `stop` in a buffer that nobody else reads."""
        if not torch.compiler.is_compiling():
            self.note_changes()
        if (
            self.buffer is None
            or self.shared
            or self._seen is not None
            or self.buffer.shape[2] < self.stop - self.first
        ):
            self._reallocate(like, held, min(keep_from, held))

    # What others may do to it

    @property
    def intact(self) -> bool:
        """Whether nobody else has written to what is held, or put something else in its place."""
        self.note_changes()
        return not self.tampered

    def seal(self) -> None:
        """Everything that was written to the buffer so far is ours."""
        if torch.compiler.is_compiling():  # what is set here is set each time that the graph has run
            self._uncounted = True
        elif self.buffer is not None:
            self._version, self._uncounted = version_of(self.buffer), False

    def note_changes(self) -> None:
        """Look whether somebody else has written to the buffer, before we do."""
        if self.buffer is None:
            return
        if self._uncounted:
            self.seal()
        elif self._version != version_of(self.buffer):
            self.tampered = True
        if self._seen is not None and checksum([self._seen[0]]) != self._seen[1]:
            self.tampered = True

    def hand_out(self, start: int) -> torch.Tensor:
        """Columns from `start` on, for somebody who may do anything with them, up to our next write."""
        if self.shared:  # with others, whom it would reach
            assert self.buffer is not None
            self.note_changes()
            self._reallocate(self.buffer, self.stop, self.first)
        view = self.view(start)
        if self._seen is None or self._seen[0].shape[2] < view.shape[2]:
            whole = self.view()
            self.note_changes()
            self._seen = whole.detach(), checksum([whole])
        return view

    def adopt(self, new: torch.Tensor, stop: int) -> None:
        """Hold [batch, heads, columns, dim] that somebody else has put here, and that end at a column."""
        self.stop, self.first = stop, stop - new.shape[2]
        self._replace(new, shared=True)
        self.tampered = True

    def _replace(self, buffer: torch.Tensor, *, shared: bool = False) -> None:
        """Go on with another buffer."""
        self.buffer, self.shared, self._seen = buffer, shared, None
        self.seal()

    def _reallocate(self, like: torch.Tensor, held: int, keep_from: int) -> None:
        first = max(self.first, keep_from)
        # What is compiled cannot ask whether it is in inference mode.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            # Outside inference mode: a buffer made inside could not be appended to outside it.
            with torch.inference_mode(False), torch.no_grad():
                grown = self._grown(like, held, first)
        else:
            grown = self._grown(like, held, first)
        self.first = first
        self._replace(grown)

    def _grown(self, like: torch.Tensor, held: int, first: int) -> torch.Tensor:
        """A buffer for columns [first, stop), with a copy of those before `held`."""
        batch, heads, _, dim = like.shape
        shape = (batch, heads, self.room(self.stop - first), dim)
        grown = torch.empty(shape, dtype=like.dtype, device=like.device)
        if self.buffer is not None and held > first:
            grown[:, :, : held - first].copy_(self.buffer[:, :, first - self.first : held - self.first])
        return grown


def write_behind_padding(out: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Write pieces [heads, length, dim] to the end of [heads, columns, dim], and zeros before them."""
    padding = out.shape[1] - sum([piece.shape[1] for piece in pieces])
    if padding:
        out.narrow(1, 0, padding).zero_()
        out = out.narrow(1, padding, out.shape[1] - padding)
    if len(pieces) == 1:
        out.copy_(pieces[0])
    elif pieces:
        torch.cat(list(pieces), dim=1, out=out)


def version_of(tensor: torch.Tensor) -> int:
    """PyTorch's count of in-place writes to a tensor and its views; those made in inference mode have none."""
    return -1 if tensor.is_inference() else tensor._version


class ColumnLayer(ReuseLayer, DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """What transformers calls of a layer of full-attention K/V, whatever it keeps them as."""

    device: torch.device
    dtype: torch.dtype

    # Attributes of stock layers, which others read and set. Nothing in here does.

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, columns, head_dim], or None before the first `update`."""
        return self._hand_out_tensor(0) if self.is_initialized else None

    @keys.setter
    def keys(self, new: torch.Tensor | None) -> None:
        self._put(0, "keys", new)

    @property
    def values(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, columns, head_dim], or None before the first `update`."""
        return self._hand_out_tensor(1) if self.is_initialized else None

    @values.setter
    def values(self, new: torch.Tensor | None) -> None:
        self._put(1, "values", new)

    def _put(self, index: int, name: str, new: torch.Tensor | None) -> None:
        if "_tensors" not in self.__dict__:  # transformers' own constructors set None
            return
        if new is not None and new.ndim != 4 and new.numel():
            raise ValueError(
                f"`{name}` of a cache layer must be [batch, num_kv_heads, columns, head_dim], got a tensor of shape "
                f"{list(new.shape)}."
            )
        self.version += 1
        if new is None or not new.numel():
            self._adopt(index, None)
            return
        if not self.is_initialized:
            self.lazy_initialization(new, new)
        self._adopt(index, new)

    @abstractmethod
    def _hand_out_tensor(self, index: int) -> torch.Tensor:
        """The keys (0) or values (1), for somebody who may do anything with them."""

    @abstractmethod
    def _adopt(self, index: int, new: torch.Tensor | None) -> None:
        """Hold these keys (0) or values (1), which somebody else has set, or nothing."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note dtype and device; the buffers come with the first append."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Columns held."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns; a positive number is how many to keep.

        transformers 5.17 passes a 0-d tensor, later ones an int.
        """
        change = int(tokens_to_remove)
        self.truncate(max(0, self.length + change) if change <= 0 else change)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, numbers or a mask."""
        self._select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self.is_initialized:
            self._select(torch.arange(self._batch_size).repeat_interleave(repeats))

    def offload(self) -> None:
        """Move to host memory, as stock layers do."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move back to the layer's device."""
        if self.is_initialized:
            self._move(self.device)

    @property
    @abstractmethod
    def length(self) -> int:
        """Columns seen so far."""

    @property
    @abstractmethod
    def _batch_size(self) -> int:
        """Rows held."""

    @abstractmethod
    def _select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""

    @abstractmethod
    def _move(self, device: torch.device) -> None:
        """Move all that is held."""


class GrowingLayer(ColumnLayer):  # type: ignore[no-untyped-call]
    """Full-attention K/V of one layer."""

    can_branch = True
    _num_tensors = 2

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        self.version = 0
        self._tensors = [GrowingTensor() for _ in range(self._num_tensors)]

    # What transformers calls

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, num_kv_heads, m, head_dim] and return everything that may be attended to, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held, keep_from = self.length, self._keep_from()  # before the keys are there: the same for the values
        self._append(0, key_states, keep_from)
        self._append(1, value_states, keep_from)
        return self._visible(held)

    def reset(self) -> None:
        """Drop everything."""
        self.version += 1
        self._tensors = [GrowingTensor() for _ in self._tensors]
        self.is_initialized = False

    # What the cache calls

    @property
    def intact(self) -> bool:
        """See `ReuseLayer.intact`."""
        return all(tensor.intact for tensor in self._tensors)

    def seal(self) -> None:
        """See `ReuseLayer.seal`."""
        for tensor in self._tensors:
            tensor.seal()

    @property
    def length(self) -> int:
        """Columns seen so far."""
        return self._tensors[0].stop

    @property
    def first(self) -> int:
        """The first column that is still held."""
        return self._tensors[0].first

    def share(self) -> "GrowingLayer":
        """A layer that reads the same buffers; whichever of the two writes first copies."""
        twin = self.fresh()
        assert isinstance(twin, GrowingLayer)
        twin.__dict__.update(self.__dict__)
        twin._tensors = [tensor.share() for tensor in self._tensors]
        return twin

    def truncate(self, length: int) -> None:
        """See `ReuseLayer.truncate`."""
        if length < max(tensor.stop for tensor in self._tensors):
            self.version += 1
            for tensor in self._tensors:
                tensor.truncate(length)

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        """See `ReuseLayer.columns`."""
        if not self.is_initialized:
            return None
        return tuple([t.row(row, start, stop) for t in self._tensors if t.buffer is not None])

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]]) -> None:
        """See `ReuseLayer.fill`."""
        like = next(piece for pieces in rows for piece in pieces)
        if not self.is_initialized:
            self.lazy_initialization(like[0], like[1])
        self.version += 1
        for i, tensor in enumerate(self._tensors[: len(like)]):
            tensor.fill(start, stop, [[piece[i] for piece in pieces] for pieces in rows])

    def open(self, stop: int, like: Piece, batch: int) -> tuple[torch.Tensor, ...]:
        """Make room for columns up to `stop`, of the shapes and types of `like`; returns the new ones of each tensor.

        They are to be written to, [batch, heads, new columns, dim], not zeroed; `seal` is to be called then.
        """
        if not self.is_initialized:
            self.lazy_initialization(like[0], like[1])
        self.version += 1
        pairs = zip(self._tensors, like, strict=False)
        return tuple(tensor.open(stop, piece.expand(batch, -1, -1, -1)) for tensor, piece in pairs)

    def scatter(
        self, columns: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [batch, num_kv_heads, m, head_dim] over `columns` [batch, m]; returns views of all that are held."""
        self.version += 1
        with torch.no_grad():
            self._tensors[0].scatter(columns, key_states)
            self._tensors[1].scatter(columns, value_states)
        return self._tensors[0].view(), self._tensors[1].view()

    def gather(self, tensor: int, columns: torch.Tensor) -> torch.Tensor:
        """The keys (0) or values (1), [batch, num_kv_heads, m, head_dim], of `columns` [batch, m]."""
        held = self._tensors[tensor].view()
        at = (columns - self._tensors[tensor].first)[:, None, :, None]
        return held.gather(2, at.expand(-1, held.shape[1], -1, held.shape[3]))

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        """See `ReuseLayer.column_specs`; none for a layer that the model has no use for."""
        buffers = [t.buffer for t in self._tensors if t.buffer is not None]
        return tuple(ColumnSpec(b.shape[1], b.shape[3], b.dtype) for b in buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, room to spare included."""
        return sum(tensor.nbytes for tensor in self._tensors)

    # What kinds of layers differ in

    def _keep_from(self) -> int:
        """Columns before this one may go when a buffer is full."""
        return 0

    def _visible(self, held: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What new columns after the first `held` ones may attend to."""
        return self._tensors[0].view(), self._tensors[1].view()

    def _shown_from(self) -> int:
        """The first column of `keys` and `values`."""
        return 0

    def _end_of(self, index: int, new: torch.Tensor) -> int:
        """The column at which keys (0) or values (1) end that somebody else has set."""
        return new.shape[2]

    def _hand_out_tensor(self, index: int) -> torch.Tensor:
        return self._tensors[index].hand_out(self._shown_from())

    def _adopt(self, index: int, new: torch.Tensor | None) -> None:
        if new is None:
            self._tensors[index] = GrowingTensor()
        else:
            self._tensors[index].adopt(new, self._end_of(index, new))

    def _append(self, index: int, new: torch.Tensor, keep_from: int = 0) -> None:
        self.version += 1
        if torch.is_grad_enabled():  # something else may need a gradient through what is returned
            self._tensors[index].append_with_graph(new)
        else:
            self._tensors[index].append(new, keep_from)

    @property
    def _batch_size(self) -> int:
        return self._tensors[0].view().shape[0]

    def _select(self, rows: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        self.version += 1
        for tensor in self._tensors:
            tensor.select(rows)

    def _move(self, device: torch.device) -> None:
        for tensor in self._tensors:
            tensor.move(device)
