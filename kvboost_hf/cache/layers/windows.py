"""Growing layers that keep less, or more, than all keys and values; and the layer of hidden states.

The head of a model computes logits from the last hidden states, and the heads of drafts candidates from these and
those of other layers. Their layer stands behind the layers of K/V, so that its columns are stored, loaded and cut with
theirs. transformers does not see it: a hook behind the decoder layers (`compat.hook_hidden_states`) gives it what it
keeps.
"""

from collections.abc import Callable, Sequence

import torch

from kvboost_hf.cache.layers.base import ColumnSpec, Piece, ReuseLayer, Turn
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor
from kvboost_hf.compat import LAST

_REWIND = 256  # columns kept behind the window, so that a cache can go back a little without asking the store


class SlidingLayer(GrowingLayer):  # type: ignore[no-untyped-call]
    """K/V of sliding-window or chunked attention: the next token attends to the last `window - 1` columns.

    Columns that have left the window are let go of, once the store has had them and while assisted decoding does not
    ask for them to be kept.

    Args:
        window: Columns that a token can attend to, itself included.
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
        """An empty layer of the same kind."""
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
        if not self._reaches_back_to(max(0, self.length + int(tokens_to_remove))):
            raise RuntimeError(
                f"`crop({int(tokens_to_remove)})` goes back further than this sliding-window layer remembers. Call "
                "`activate_past_recording()` on the cache before what is to be removed."
            )
        super().crop(tokens_to_remove)
        self._cropped = self.length

    def reset(self) -> None:
        """Drop everything."""
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


class IndexedLayer(GrowingLayer):  # type: ignore[no-untyped-call]
    """Full-attention K/V with the keys of an indexer that picks what is attended to (dynamic sparse attention).

    `indexer_keys` are [batch, length, index_head_dim]; `indexer_position_ids`, for models that keep them,
    [kinds, batch, length].
    """

    can_branch = False
    _num_tensors = 4  # keys, values, indexer keys, indexer positions

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether there are indexer keys."""
        return self._tensors[2].buffer is not None

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """All indexer keys, or None."""
        return self._tensors[2].view()[:, 0] if self.is_indexer_initialized else None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append [batch, m, index_head_dim] and return all indexer keys."""
        self._append(2, indexer_key_states[:, None])
        return self._tensors[2].view()[:, 0]

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """All indexer positions, or None."""
        positions = self._tensors[3]
        return positions.view()[..., 0].transpose(0, 1) if positions.buffer is not None else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: torch.Tensor | None) -> None:
        if value is not None:  # the old ones with the new ones behind them
            new = value[..., self._tensors[3].stop :]
            self._append(3, new.transpose(0, 1)[..., None])


class SparseLayer(GrowingLayer):  # type: ignore[no-untyped-call]
    """Full-attention K/V with the keys [batch, heads, length, dim] that choose blocks to attend to (MiniMax-M3)."""

    can_branch = False
    _num_tensors = 3

    @property
    def idx_keys(self) -> torch.Tensor | None:
        """All index keys, or None."""
        return self._tensors[2].view() if self._tensors[2].buffer is not None else None

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Append [batch, heads, m, dim] and return all index keys."""
        self._append(2, idx_k)
        return self._tensors[2].view()


class HiddenStates(ReuseLayer):
    """The hidden states of all columns, as one tensor [batch, 1, columns, hidden_size] for each layer that is kept.

    Args:
        which: The layers, by their numbers in what transformers returns, or `LAST`.
    """

    can_branch = True  # nothing of it is lent

    def __init__(self, which: tuple[int, ...] = (LAST,)) -> None:
        self.which = which
        self._states = [GrowingTensor() for _ in which]

    def fresh(self) -> "HiddenStates":
        """An empty layer of the same kind."""
        return HiddenStates(self.which)

    @property
    def native(self) -> None:
        """None: transformers sees no such layer."""

    def append(self, of: Callable[[int], torch.Tensor | None]) -> None:
        """Append [batch, m, hidden_size] `of` each layer; nothing, if one of them is not known."""
        new = [states for layer in self.which if (states := of(layer)) is not None]
        self.version += 1
        if len(new) == len(self.which):
            with torch.no_grad():
                for kept, states in zip(self._states, new, strict=True):
                    kept.append(states.detach()[:, None])

    def view(self, layer: int, start: int) -> torch.Tensor:
        """[batch, columns, hidden_size] of a layer from column `start` on."""
        return self._states[self.which.index(layer)].view(start)[:, 0]

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self.version += 1
        for kept in self._states:
            kept.select(rows)

    @property
    def intact(self) -> bool:
        return all([kept.intact for kept in self._states])

    def seal(self) -> None:
        for kept in self._states:
            kept.seal()

    @property
    def length(self) -> int:
        """Columns seen so far."""
        return self._states[0].stop

    @property
    def first(self) -> int:
        """The first column that is still held."""
        return self._states[0].first

    def share(self) -> "HiddenStates":
        """A layer that reads the same buffer; whichever of the two writes first copies."""
        twin = self.fresh()
        twin.version, twin._states = self.version, [kept.share() for kept in self._states]
        return twin

    def reset(self) -> None:
        """Drop everything."""
        self.version += 1
        self._states = [GrowingTensor() for _ in self.which]

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.version += 1
            for kept in self._states:
                kept.truncate(length)

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        if self._states[0].buffer is None:
            return None
        return tuple([kept.row(row, start, stop) for kept in self._states])

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]], turn: Turn | None = None) -> None:
        self.version += 1
        for at, kept in enumerate(self._states):
            kept.fill(start, stop, [[piece[at] for piece in pieces] for pieces in rows])

    def open(self, stop: int, like: Piece, batch: int) -> tuple[torch.Tensor, ...]:
        self.version += 1
        pairs = zip(self._states, like, strict=True)
        return tuple([kept.open(stop, each.expand(batch, -1, -1, -1)) for kept, each in pairs])

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        return tuple([ColumnSpec(buffer.shape[1], buffer.shape[3], buffer.dtype) for buffer in self.buffers])

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [kept.buffer for kept in self._states if kept.buffer is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, room to spare included."""
        return sum([kept.nbytes for kept in self._states])
