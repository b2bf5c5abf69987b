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
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvboost_hf.compat import cache_argument

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, num_kv_heads, tokens, head_dim]

_ROOM = 128  # columns to spare, at least, in a buffer that had to be made anew


class _BatchLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keys and values [rows, num_kv_heads, columns, head_dim] in buffers with room to spare."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[torch.Tensor] = []
        self.stop = 0

    def get_seq_length(self) -> int:
        """Columns held."""
        return self.stop

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Append [rows, num_kv_heads, 1, head_dim]; returns views of all columns."""
        new = key_states.shape[2]
        if self.stop + new > self.buffers[0].shape[2]:
            room = max(_ROOM, self.stop // 8) + new
            self.buffers = [F.pad(buffer[:, :, : self.stop], (0, 0, 0, room)) for buffer in self.buffers]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.stop : self.stop + new].copy_(states)
        self.stop += new
        self.keys, self.values = (buffer[:, :, : self.stop] for buffer in self.buffers)
        return self.keys, self.values


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
        stop = max(self._stop, length)
        for layer, pair in zip(self._layers, kv, strict=True):
            if layer is None or pair is None:
                continue
            made = []
            for i, new in enumerate(pair):
                buffer = new.new_zeros(len(self) + 1, new.shape[1], stop + _ROOM, new.shape[3])
                if layer.buffers:
                    buffer[:-1, :, stop - self._stop : stop].copy_(layer.buffers[i][:, :, : self._stop])
                buffer[-1:, :, stop - new.shape[2] : stop].copy_(new)
                made.append(buffer)
            layer.buffers, layer.stop = made, stop
        self._lengths.append(length)
        self._stop = stop

    @torch.no_grad()
    def leave(self, row: int) -> None:
        """Remove a row; those behind it move up, and columns that nobody needs any more go."""
        del self._lengths[row]
        rest = [i for i in range(len(self) + 1) if i != row]
        first = self._stop - max(self._lengths, default=0)
        for layer in self._layers:
            if layer is not None:
                layer.buffers = [buffer[rest, :, first:] for buffer in layer.buffers] if rest else []
                layer.stop -= first
        self._stop -= first

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
