"""A cache layer that grows in place.

`DynamicLayer.update` concatenates: every decoded token copies the whole history of every layer. `GrowingLayer` owns a
buffer with room to spare and hands out views of it, so that an append costs what is appended.
"""

from collections.abc import Sequence

import torch
from transformers.cache_utils import DynamicLayer

Piece = tuple[torch.Tensor, torch.Tensor]  # keys and values [num_kv_heads, length, head_dim] of one row

# Room beyond what is needed at a (re)allocation: an eighth, at least this many columns.
_MIN_SLACK = 128


def _capacity(length: int) -> int:
    return length + max(_MIN_SLACK, length // 8)


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Full-attention K/V of one layer: `keys` and `values` are [batch, num_kv_heads, length, head_dim] views."""

    keys: torch.Tensor
    values: torch.Tensor
    device: torch.device
    dtype: torch.dtype

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0
        self._key_buffer: torch.Tensor | None = None  # [batch, num_kv_heads, capacity, head_dim]
        self._value_buffer: torch.Tensor | None = None
        self._shared = False  # another layer reads the same buffer: copy before the next write
        self.version = 0  # counts changes, so that whoever keeps records beside the layer can tell if it missed one

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note dtype and device; the buffer comes with the first append."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, num_kv_heads, m, head_dim] and return everything held, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled():  # something else may need a gradient through what this returns
            return self._update_with_graph(key_states, value_states)
        self.version += 1
        start, self.length = self.length, self.length + key_states.shape[-2]
        self._key_buffer = self._writable(self._key_buffer, start, key_states)
        self._value_buffer = self._writable(self._value_buffer, start, value_states)
        self._shared = False
        self._key_buffer[:, :, start : self.length].copy_(key_states)
        self._value_buffer[:, :, start : self.length].copy_(value_states)
        self._view()
        return self.keys, self.values

    def fill(self, columns: int, rows: Sequence[Sequence[Piece]]) -> None:
        """Append `columns` columns of K/V that were computed before.

        Args:
            columns: How many columns to append.
            rows: For each row the pieces, in order, as (keys, values) of shape [num_kv_heads, length, head_dim]. A
                row whose pieces are shorter than `columns` is padding on its left, and is zeroed there.
        """
        like_keys, like_values = next(piece for pieces in rows for piece in pieces)
        if not self.is_initialized:
            self.lazy_initialization(like_keys, like_values)
        self.version += 1
        start, self.length = self.length, self.length + columns
        batch = len(rows)
        self._key_buffer = self._writable(self._key_buffer, start, like_keys.expand(batch, -1, -1, -1))
        self._value_buffer = self._writable(self._value_buffer, start, like_values.expand(batch, -1, -1, -1))
        self._shared = False
        for row, pieces in enumerate(rows):
            self._fill_row(self._key_buffer[row, :, start : self.length], [keys for keys, _ in pieces])
            self._fill_row(self._value_buffer[row, :, start : self.length], [values for _, values in pieces])
        self._view()

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""
        if length < self.length:
            self.version += 1
            self.length = length
            self._view()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns. transformers 5.17 passes a 0-d tensor, later ones an int."""
        remove = int(tokens_to_remove)
        if remove > 0:
            raise ValueError(f"`crop` takes the number of tokens to remove as a negative int, got {remove}.")
        self.truncate(max(0, self.length + remove))

    def reset(self) -> None:
        """Drop everything."""
        self.version += 1
        self.length = 0
        self._key_buffer = self._value_buffer = None
        self.keys = self.values = None  # type: ignore[assignment]  # as stock layers do before their first update
        self.is_initialized = self._shared = False

    def get_seq_length(self) -> int:
        """Columns held."""
        return self.length

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self._key_buffer is not None:
            self._select(torch.arange(self._key_buffer.shape[0]).repeat_interleave(repeats))

    def share(self) -> "GrowingLayer":
        """A layer that reads the same buffer; whichever of the two writes first copies."""
        twin = GrowingLayer()
        twin.__dict__.update(self.__dict__)
        self._shared = twin._shared = True
        return twin

    def piece(self, row: int, start: int) -> Piece:
        """Views of a row's K/V from column `start` on."""
        return self.keys[row, :, start:], self.values[row, :, start:]

    @property
    def bytes_per_column(self) -> int:
        """Bytes of one row's K/V for one token; 0 for a layer that the model has no use for."""
        if not self.is_initialized:
            return 0
        return sum(kv.shape[1] * kv.shape[3] * kv.element_size() for kv in (self.keys, self.values))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, room to spare included."""
        buffers = (self._key_buffer, self._value_buffer)
        return sum(b.untyped_storage().nbytes() for b in buffers if b is not None)

    def offload(self) -> None:
        """Move to host memory, as stock layers do."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move back to the layer's device."""
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self._key_buffer is not None and self._value_buffer is not None:
            self._key_buffer = self._key_buffer.to(device)
            self._value_buffer = self._value_buffer.to(device)
            self._view()

    def _select(self, rows: torch.Tensor) -> None:
        if self._key_buffer is None or self._value_buffer is None:
            return
        self.version += 1
        # The spare columns move too: cheaper than an append that has to grow again.
        with torch.inference_mode(False):
            rows = rows.to(self._key_buffer.device).clone()
            self._key_buffer = self._key_buffer.index_select(0, rows)
            self._value_buffer = self._value_buffer.index_select(0, rows)
        self._shared = False
        self._view()

    def _writable(self, buffer: torch.Tensor | None, held: int, like: torch.Tensor) -> torch.Tensor:
        """`buffer` if `self.length` columns fit and nobody else reads it, else a larger copy."""
        if buffer is not None and buffer.shape[2] >= self.length and not self._shared:
            return buffer
        batch, heads, _, head_dim = like.shape
        # Outside inference mode: a buffer made inside could not be appended to outside it.
        with torch.inference_mode(False), torch.no_grad():
            shape = (batch, heads, _capacity(self.length), head_dim)
            grown = torch.empty(shape, dtype=self.dtype, device=self.device)
            if buffer is not None:
                grown[:, :, :held].copy_(buffer[:, :, :held])
        return grown

    @staticmethod
    def _fill_row(out: torch.Tensor, pieces: list[torch.Tensor]) -> None:
        covered = sum(piece.shape[1] for piece in pieces)
        padding = out.shape[1] - covered
        out[:, :padding].zero_()
        if pieces:
            torch.cat(pieces, dim=1, out=out[:, padding:])

    def _update_with_graph(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Out of place, as stock does: autograd must keep every earlier version."""
        self.version += 1
        if self.length:
            keys = torch.cat([self.keys, keys], dim=-2)
            values = torch.cat([self.values, values], dim=-2)
        self._key_buffer, self._value_buffer, self.length = keys, values, keys.shape[-2]
        self._shared = True  # an in-place append would corrupt the graph
        self._view()
        return self.keys, self.values

    def _view(self) -> None:
        assert self._key_buffer is not None
        assert self._value_buffer is not None
        self.keys = self._key_buffer[:, :, : self.length]
        self.values = self._value_buffer[:, :, : self.length]
