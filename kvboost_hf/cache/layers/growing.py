"""Layers of full and sliding attention that grow in place.

`DynamicLayer.update` concatenates: every decoded token copies the whole history of every layer. A `GrowingLayer` owns
buffers with room to spare and hands out views of them, so that an append costs what is appended.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvboost_hf.cache.layers.base import ColumnSpec, Piece, ReuseLayer, Turn, whole_columns
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor

_REWIND = 256  # columns kept behind the window, so that a cache can go back a little without asking the store


class ColumnsInTensors(ReuseLayer):
    """Base of layers whose columns are in tensors of one kind, each of which counts them."""

    is_initialized: bool = False
    _tensors: list[Any]

    @abstractmethod
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note what a layer has to know of its first columns."""

    @property
    def intact(self) -> bool:
        for tensor in self._tensors:
            if not tensor.intact:
                return False
        return True

    def seal(self) -> None:
        for tensor in self._tensors:
            tensor.seal()

    @property
    def length(self) -> int:
        """Columns seen so far."""
        stop: int = self._tensors[0].stop
        return stop

    @property
    def first(self) -> int:
        first: int = self._tensors[0].first
        return first

    def share(self) -> Self:
        """A layer that reads the same buffers; whichever of the two writes first copies."""
        twin = cast(Self, self.fresh())
        twin.__dict__.update(self.__dict__)
        twin._tensors = [tensor.share() for tensor in self._tensors]
        return twin

    def truncate(self, length: int) -> None:
        cut = False
        for tensor in self._tensors:
            if length < tensor.stop:
                tensor.truncate(length)
                cut = True
        self.version += cut

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        if not self.is_initialized:
            return None
        return tuple([t.row(row, start, stop) for t in self._tensors if t.buffer is not None])

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]], turn: Turn | None = None) -> None:
        like = next(piece for pieces in rows for piece in pieces)
        if not self.is_initialized:
            self.lazy_initialization(like[0], like[-1])
        self.version += 1
        for i, tensor in enumerate(self._tensors[: len(like)]):
            turned = turn[1] if turn is not None and turn[0] == i else None
            tensor.fill(start, stop, [[piece[i] for piece in pieces] for pieces in rows], turned)

    def open(self, stop: int, like: Piece, batch: int) -> tuple[torch.Tensor, ...]:
        """Make room for columns up to `stop`, of the shapes and types of `like`; returns the new ones of each tensor.

        They are to be written to, [batch, heads, new columns, dim], not zeroed; `seal` is to be called then.
        """
        if not self.is_initialized:
            self.lazy_initialization(like[0], like[-1])
        self.version += 1
        pairs = zip(self._tensors, like, strict=False)
        return tuple(tensor.open(stop, piece.expand(batch, -1, -1, -1)) for tensor, piece in pairs)

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        """None for a layer that the model has no use for."""
        return tuple([ColumnSpec(b.shape[1], b.shape[3], b.dtype) for b in self.buffers])

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of all tensors, with room to spare."""
        found: list[torch.Tensor] = []
        for tensor in self._tensors:
            if tensor.buffer is not None:
                found.append(tensor.buffer)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, room to spare included."""
        return sum(tensor.nbytes for tensor in self._tensors)


class ColumnLayer(ColumnsInTensors, DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Base of layers of K/V, with the attributes and methods that transformers uses."""

    device: torch.device
    dtype: torch.dtype

    # Attributes of stock layers, which others read and set. Nothing in here does.

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, columns, head_dim], or None before the first `update`."""
        return self._hand_out_tensor(0) if self.is_initialized else None

    @keys.setter
    def keys(self, new: torch.Tensor | None) -> None:
        if "_tensors" in self.__dict__:  # transformers' own constructors set None
            self._put(0, "keys", new)

    @property
    def values(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, columns, head_dim], or None before the first `update`."""
        return self._hand_out_tensor(1) if self.is_initialized else None

    @values.setter
    def values(self, new: torch.Tensor | None) -> None:
        if "_tensors" in self.__dict__:
            self._put(1, "values", new)

    def _put(self, index: int, name: str, new: torch.Tensor | None) -> None:
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
    def _hand_out_tensor(self, index: int) -> torch.Tensor | None:
        """The keys (0) or values (1), for somebody who may do anything with them."""

    @property
    def _public(self) -> list[str]:
        """The attributes of transformers' layer, to which the first update adds two."""
        return [*super()._public, *(["device", "dtype"] if self.is_initialized else [])]

    def _read(self, name: str) -> Any:
        if name in ("keys", "values"):
            return self._peek(int(name == "values")) if self.is_initialized else None
        return self.length if name == "cumulative_length" else super()._read(name)

    def _peek(self, index: int) -> torch.Tensor | None:
        """The keys (0) or values (1), for somebody who only reads them, at once."""
        return self._hand_out_tensor(index)

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
        change = whole_columns(tokens_to_remove)
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
            self._select(torch.arange(self._batch_size, device="cpu").repeat_interleave(repeats))

    def offload(self) -> None:
        """Move to host memory, as stock layers do."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move back to the layer's device."""
        if self.is_initialized:
            self._move(self.device)

    # What the cache calls

    @property
    @abstractmethod
    def _batch_size(self) -> int:
        """Rows held."""

    def _select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        if self.is_initialized:
            self.version += 1
            for tensor in self._tensors:
                tensor.select(rows)

    def _move(self, device: torch.device) -> None:
        """Move all that is held."""
        for tensor in self._tensors:
            tensor.move(device)


class GrowingLayer(ColumnLayer):  # type: ignore[no-untyped-call]
    """Full-attention K/V of one layer."""

    can_branch = True
    _num_tensors = 2
    _tensors: list[GrowingTensor]

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
        elif key_states.dtype is not self.dtype:  # the model was cast in the middle of a text
            self.dtype = key_states.dtype
            for tensor in self._tensors:
                tensor.cast(self.dtype)
        keys, values = self._tensors[:2]
        keep_from, start = self._bounds(keys.stop) if self.is_sliding else (0, 0)
        self.version += 2
        return keys.append_and_view(key_states, keep_from, start), values.append_and_view(
            value_states, keep_from, start
        )

    def reset(self) -> None:
        for tensor in self._tensors:
            if tensor.buffer is not None or tensor.stop or self.is_initialized:
                self.version += 1
                self._tensors = [GrowingTensor() for _ in self._tensors]
                self.is_initialized = False
                return

    # What the cache calls

    def can_take(self, device: torch.device) -> bool:
        """Whether it holds nothing, and may be given all columns in buffers on a device that were made for it."""
        return type(self) is GrowingLayer and self.length == 0

    def take(self, buffers: Sequence[torch.Tensor], stop: int) -> None:
        """Hold columns [0, stop) of buffers [batch, heads, `stop` or more, dim], each as `buffers_for` makes them."""
        self.lazy_initialization(buffers[0], buffers[1])
        self.version += 1
        for tensor, buffer in zip(self._tensors, buffers, strict=True):
            tensor.take(buffer, stop)

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

    # What kinds of layers differ in

    def _bounds(self, held: int) -> tuple[int, int]:
        """Columns before which an append behind `held` ones may drop from a full buffer, and from which new ones
        attend.

        Asked of layers that are sliding.
        """
        return 0, 0

    def _shown_from(self) -> int:
        """The first column of `keys` and `values`."""
        return 0

    def _end_of(self, index: int, new: torch.Tensor) -> int:
        """The column at which keys (0) or values (1) end that somebody else has set."""
        return new.shape[2]

    def _hand_out_tensor(self, index: int) -> torch.Tensor | None:
        held = self._tensors[index]
        return held.hand_out(self._shown_from()) if held.buffer is not None else None  # somebody has set None

    def _peek(self, index: int) -> torch.Tensor | None:
        held = self._tensors[index]
        return held.view(self._shown_from()) if held.buffer is not None else None

    def _adopt(self, index: int, new: torch.Tensor | None) -> None:
        if new is None:
            self._tensors[index] = GrowingTensor()
        else:
            self._tensors[index].adopt(new, self._end_of(index, new))

    def _append(self, index: int, new: torch.Tensor) -> None:
        """Append to what the layer keeps beside keys and values."""
        self.version += 1
        if torch.is_grad_enabled():
            self._tensors[index].append_with_graph(new)
        else:
            self._tensors[index].append(new)

    @property
    def _batch_size(self) -> int:
        return self._tensors[0].view().shape[0]


class SlidingLayer(GrowingLayer):  # type: ignore[no-untyped-call]
    """K/V of sliding-window or chunked attention: the next token attends to the last `window - 1` columns.

    Columns that have left the window are let go of, once the store has had them and while assisted decoding does not
    ask for them to be kept.
    """

    is_sliding = True

    def __init__(self, window: int) -> None:
        GrowingLayer.__init__(self)
        self._window = window
        self.record_past = False
        self._stored = 0  # columns before it are of no more use to the store
        self._cropped = 0  # columns at the last crop()

    @property
    def sliding_window(self) -> int:
        """Columns that a token can attend to, itself included. What is held was computed with it: it stays."""
        return self._window

    @property
    def _sliding_window_tensor(self) -> torch.Tensor:
        return torch.tensor(self._window)  # by which `DynamicCache(cache)` knows a window

    def fresh(self) -> "SlidingLayer":
        return SlidingLayer(self.sliding_window)

    def activate_past_recording(self) -> None:
        """Keep everything from the last `crop` on until the next, as stock layers do."""
        self.record_past = True
        self._cropped = self.length

    def stop_recording(self) -> None:
        self.record_past = False

    def lend(self) -> "SlidingLayer":
        """transformers has been told to record."""
        self._cropped = self.length
        return self

    def crop(self, tokens_to_remove: int) -> None:
        change = whole_columns(tokens_to_remove)
        if not self._reaches_back_to(max(0, self.length + change)):
            raise RuntimeError(
                f"`crop({change})` goes back further than this sliding-window layer remembers. Call "
                "`activate_past_recording()` on the cache before what is to be removed."
            )
        super().crop(change)
        self._cropped = self.length

    def reset(self) -> None:
        super().reset()
        self._stored = self._cropped = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a mask must cover, and the column of the first."""
        offset = max(self.length - self.sliding_window + 1, 0)
        return self.length - offset + query_length, offset

    def get_max_length(self) -> int:
        """Columns that a token can attend to."""
        return self.sliding_window

    def can_rewind(self, length: int) -> bool:
        return self._reaches_back_to(length)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._stored, self._cropped = min(self._stored, length), min(self._cropped, length)

    def needed_from(self, length: int) -> int:
        return max(0, length - self.sliding_window + 1)

    def release(self, before: int) -> None:
        self._stored = before
        keep_from = self._keep_from()
        for tensor in self._tensors:
            tensor.trim(keep_from)

    def _reaches_back_to(self, length: int) -> bool:
        """Whether the window before column `length` is held; layers with states beside their K/V need more."""
        return length <= self.length and self.first <= self.needed_from(length)

    def _keep_from(self) -> int:
        last = self._cropped if self.record_past else self.length
        return max(0, min(self.needed_from(last) - _REWIND, self._stored))

    def _bounds(self, held: int) -> tuple[int, int]:
        return self._keep_from(), self.needed_from(held)

    def _shown_from(self) -> int:
        return self.needed_from(self.length)

    def _end_of(self, index: int, new: torch.Tensor) -> int:
        return max(self._tensors[index].stop, new.shape[2])
