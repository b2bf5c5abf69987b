"""K/V of several texts that are decoded together, each of its own length: rows come and go between steps.

    columns      0 …                         stop
    row 0        [ a a a a a a a a a a a a a ]
    row 1        [ . . . . . b b b b b b b b ]      dots are padding, hidden by a mask
    row 2        [ . . . . . . . . . c c c c ]

All rows end at the same column, so that a step appends one column to all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvboost_hf.compat import cache_argument

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, num_kv_heads, tokens, head_dim]

_ROOM = 128  # columns to spare, at least, in a buffer that had to be made anew


class _BatchLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keys and values [rows, num_kv_heads, columns, head_dim], in buffers with rows and columns to spare."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[torch.Tensor] = []
        self.rows = self.stop = 0

    def get_seq_length(self) -> int:
        """Columns held."""
        return self.stop

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Append [rows, num_kv_heads, 1, head_dim]; returns views of all columns."""
        start, self.stop = self.stop, self.stop + key_states.shape[2]
        if self.stop > self.buffers[0].shape[2]:
            self.move(0, len(self.buffers[0]), start)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, start : self.stop].copy_(states)
        self.keys, self.values = (buffer[: self.rows, :, : self.stop] for buffer in self.buffers)
        return self.keys, self.values

    def add(self, pair: Pair, stop: int) -> None:
        """Add a row whose last columns are `pair`; all rows end at `stop` then."""
        if not self.buffers:
            shapes = [(1, new.shape[1], stop + _room(stop), new.shape[3]) for new in pair]
            self.buffers = [new.new_zeros(shape) for new, shape in zip(pair, shapes, strict=True)]
            self.stop = stop
        rows = len(self.buffers[0])
        if self.rows == rows or stop > self.stop:
            by, held, self.stop = stop - self.stop, self.stop, stop
            self.move(by, rows if self.rows < rows else 2 * rows, held)
        for buffer, new in zip(self.buffers, pair, strict=True):
            buffer[self.rows, :, : stop - new.shape[2]] = 0  # whatever is hidden must be a number
            buffer[self.rows, :, stop - new.shape[2] : stop].copy_(new[0])
        self.rows += 1

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.rows -= 1
        for buffer in self.buffers:
            buffer[row, :, : self.stop].copy_(buffer[self.rows, :, : self.stop])

    def move(self, by: int, rows: int, held: int) -> None:
        """Make new buffers, of so many rows, in which the first `held` columns are `by` further on."""
        for i, buffer in enumerate(self.buffers):
            made = buffer.new_zeros(rows, buffer.shape[1], self.stop + _room(self.stop), buffer.shape[3])
            made[: self.rows, :, max(by, 0) : held + by].copy_(buffer[: self.rows, :, max(-by, 0) : held])
            self.buffers[i] = made


def _room(columns: int) -> int:
    return max(_ROOM, columns // 8)


class _BatchCache(Cache):
    """What the model is given: a type that no hook takes for a user's."""


class BatchKV:
    """The rows of a batch.

    Args:
        model: Whose K/V it is; all its layers keep keys and values of every token, or share those of others.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers: list[_BatchLayer | None] = []  # None for a layer that has no K/V of its own
        self._lengths: list[int] = []  # of each row
        self._stop = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, row: int) -> int:
        """Tokens of a row."""
        return self._lengths[row]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, room to spare included."""
        return sum(buffer.nbytes for layer in self._layers if layer is not None for buffer in layer.buffers)

    @torch.no_grad()
    def join(self, kv: Sequence[Pair | None], length: int) -> None:
        """Add a row behind the others.

        Args:
            kv: Of each layer, keys and values [1, num_kv_heads, tokens, head_dim] of the last tokens, as many as the
                layer needs; None where it has none.
            length: Tokens of the row.
        """
        if not self._lengths:
            self._layers = [None if pair is None else _BatchLayer() for pair in kv]
            self._stop = 0
        self._stop = max(self._stop, length)
        for layer, pair in zip(self._layers, kv, strict=True):
            if layer is not None and pair is not None:
                layer.add(pair, self._stop)
        self._lengths.append(length)

    @torch.no_grad()
    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last = self._lengths.pop()
        if row < len(self):
            self._lengths[row] = last
        if not self._lengths:
            self._layers = []
            return
        longest = max(self._lengths)
        unused = self._stop - longest
        for layer in self._layers:
            if layer is not None:
                layer.remove(row)
                if unused > longest:  # most of the columns are of nobody
                    held, layer.stop = layer.stop, longest
                    layer.move(-unused, len(layer.buffers[0]), held)
        if unused > longest:
            self._stop = longest

    def read(self, row: int, tokens: int) -> list[Pair | None]:
        """Of each layer, keys and values [1, num_kv_heads, tokens, head_dim] of a row's last `tokens`, as views."""

        def last(buffer: torch.Tensor) -> torch.Tensor:
            return buffer[row : row + 1, :, self._stop - tokens : self._stop]

        return [None if layer is None else (last(layer.buffers[0]), last(layer.buffers[1])) for layer in self._layers]

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each row; returns the logits [rows, vocab_size] behind them."""
        model: Any = self._model
        device = next(layer.buffers[0].device for layer in self._layers if layer is not None)
        lengths = torch.tensor(self._lengths, device=device)
        columns = torch.arange(self._stop + 1, device=device)
        even = min(self._lengths) == self._stop
        cache = _BatchCache(layers=[_Nothing() if layer is None else layer for layer in self._layers])
        try:
            output = model(
                input_ids=torch.tensor(tokens, device=device)[:, None],
                attention_mask=None if even else (columns >= self._stop - lengths[:, None]).long(),
                position_ids=lengths[:, None],
                use_cache=True,
                return_dict=True,
                logits_to_keep=1,
                **{cache_argument(model): cache},
            )
        except BaseException:
            for layer in self._layers:
                if layer is not None:
                    layer.stop = self._stop
            raise
        self._stop += 1
        self._lengths = [length + 1 for length in self._lengths]
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class _Nothing(_BatchLayer):  # type: ignore[no-untyped-call]
    """Stands for a layer that shares the K/V of another."""
