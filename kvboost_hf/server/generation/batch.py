"""`BatchKV`: K/V of rows of different lengths that are decoded in one batch; rows join and leave between steps.

    columns      0 …                         stop
    row 0        [ a a a a a a a a a a a a a ]
    row 1        [ . . . . . b b b b b b b b ]      dots are padding, hidden by a mask
    row 2        [ . . . . . . . . . c c c c ]

All rows end at the same column, so that a step appends one column to all of them. Where the model's attention can read
K/V in pieces, the columns hold the decoded tokens only: K/V of the prompts stays where it is, and rows that share a
prefix read it once. `PrefixTree` finds these.

States have no columns, and so no padding: each row has its own, which a step advances by one token.
"""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvboost_hf.cache.forward.scatter import ScatterPass
from kvboost_hf.cache.layers.base import LayerState
from kvboost_hf.cache.layers.stateful import load_states, states_of, view_states
from kvboost_hf.compat import PrivateCache, Shown, cache_layers, run_model
from kvboost_hf.handles import KVHandle, PiecedKV, PieceTable
from kvboost_hf.server.generation.prefix_tree import PrefixTree

Again = tuple[int, Sequence[int]]  # the first token of a row to compute again, and the ids from there on
KeysValues = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, num_kv_heads, tokens, head_dim]
_ROOM = 128  # columns to spare, at least, in a buffer that had to be made anew
_LEAST = 64  # tokens that are worth a call of attention of their own


class _BatchLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keys and values [rows, num_kv_heads, columns, head_dim], in buffers with rows and columns to spare."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[torch.Tensor] = []
        self.rows = self.stop = self._opened = 0
        self.table: PieceTable | None = None  # of what lies elsewhere, before these columns
        self.keep: torch.Tensor | None = None  # [rows, columns], beside a table
        self.window = 0  # columns that a token attends to, itself included; 0 for all

    first = 0  # column that is held

    @property
    def before(self) -> int:
        """Columns of the table, which are before those of the buffers."""
        return self.table.columns if self.table is not None else 0

    @property
    def length(self) -> int:
        """Columns of the buffers and of the table."""
        return self.before + self.stop

    def open(self, columns: int) -> None:
        """Make room for so many columns more; `scatter` writes to them, too."""
        self._opened = columns
        if self.stop + columns > self.buffers[0].shape[2]:
            self.move(0, len(self.buffers[0]), self.stop, self.stop + columns)

    def scatter(self, columns: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> KeysValues:
        """Write [rows, num_kv_heads, m, head_dim] over `columns` [rows, m]; returns those of all, open ones included.

        The last of `columns` are the open ones. None of them is in the table.
        """
        new, columns = self._opened, columns - self.before
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            again = states[:, :, :-new]
            buffer[: self.rows].scatter_(2, columns[:, None, :-new, None].expand(again.shape), again)
            buffer[: self.rows, :, self.stop : self.stop + new].copy_(states[:, :, -new:])  # also over the filled-up
        return self._with_table(self.stop + new, None)

    def _with_table(self, stop: int, keep: torch.Tensor | None) -> KeysValues:
        """Views of the columns up to `stop`; a `KVHandle` each where others lie elsewhere."""
        keys, values = (buffer[: self.rows, :, :stop] for buffer in self.buffers)
        if self.table is None:
            return keys, values
        kv, columns = PiecedKV(self.table, keys, values, keep), self.before + stop
        return KVHandle(kv, _not_dense, keys, columns), KVHandle(kv, _not_dense, values, columns)

    def get_seq_length(self) -> int:
        """Columns of the buffers and of the table."""
        return self.length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        """Append [rows, num_kv_heads, 1, head_dim]; returns views of all columns, or a `KVHandle` each."""
        start, self.stop = self.stop, self.stop + key_states.shape[2]
        if self.stop > self.buffers[0].shape[2]:
            self.move(0, len(self.buffers[0]), start, self.stop)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, start : self.stop].copy_(states)
        return self._with_table(self.stop, self.keep)

    def add(self, pair: KeysValues, stop: int) -> None:
        """Add a row whose last columns are `pair`; all rows end at `stop` then. If it fails, nothing has changed."""
        if not self.buffers:
            shapes = [(1, new.shape[1], stop + _room(stop), new.shape[3]) for new in pair]
            self.buffers = [new.new_zeros(shape) for new, shape in zip(pair, shapes, strict=True)]
            self.stop = stop
        rows = len(self.buffers[0])
        if self.rows == rows or stop > self.stop:
            self.move(stop - self.stop, rows if self.rows < rows else 2 * rows, self.stop, stop)
            self.stop = stop
        for buffer, new in zip(self.buffers, pair, strict=True):
            buffer[self.rows, :, : stop - new.shape[2]] = 0  # whatever is hidden must be a number
            buffer[self.rows, :, stop - new.shape[2] : stop].copy_(new[0])
        self.rows += 1

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.rows -= 1
        for buffer in self.buffers:
            buffer[row, :, : self.stop].copy_(buffer[self.rows, :, : self.stop])

    def move(self, by: int, rows: int, held: int, stop: int) -> None:
        """Make new buffers, of so many rows and room for `stop`, whose first `held` columns are `by` further on."""
        moved = []
        for buffer in self.buffers:
            made = buffer.new_zeros(rows, buffer.shape[1], stop + _room(stop), buffer.shape[3])
            made[: self.rows, :, max(by, 0) : held + by].copy_(buffer[: self.rows, :, max(-by, 0) : held])
            moved.append(made)
        self.buffers = moved

    def shrink(self, by: int, rows: int) -> None:
        """Let go of the first columns and of all but so many rows; of their memory, too, if a copy has room."""
        try:
            self.move(-by, rows, self.stop, self.stop - by)
        except RuntimeError:
            self.buffers = [buffer[:, :, by:] for buffer in self.buffers]
        self.stop -= by

    @property
    def is_cut(self) -> bool:
        """Whether the buffers are views of larger ones, because there was no memory to move them."""
        return any(buffer.untyped_storage().nbytes() > buffer.nbytes for buffer in self.buffers)


class _HybridLayer(_BatchLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """K/V and states in one layer; `_RowStates` writes the states."""

    def __init__(self, number_of_states: int) -> None:
        _BatchLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states)  # type: ignore[no-untyped-call]


class _RowStates:
    """The states of a layer, [rows, …] each, in buffers with rows to spare.

    Models write the states of a step in place, in the layer that transformers sees.
    """

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self._layer = layer
        self.buffers: list[torch.Tensor] = []
        self.rows = 0

    def add(self, state: LayerState) -> None:
        """Add a row. If it fails, nothing has changed."""
        if not self.rows:
            load_states(self._layer, [state])
            self.buffers, self.rows = states_of(self._layer), 1
            return
        if self.rows == len(self.buffers[0]):
            self._move(2 * self.rows)
        new = [tensor for tensor in state.tensors if tensor is not None]
        for buffer, tensor in zip(self.buffers, new, strict=True):
            buffer[self.rows].copy_(tensor)
        self._show(self.rows + 1)

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        for buffer in self.buffers:
            buffer[row].copy_(buffer[self.rows - 1])
        self.keep(self.rows - 1)

    def keep(self, rows: int) -> None:
        """Let go of all but the first rows; of their memory, too, if that is half of it."""
        self._show(rows)
        if 2 * rows <= len(self.buffers[0]):
            with contextlib.suppress(RuntimeError):  # where there is no memory for smaller buffers, these are kept
                self._move(rows)
                self._show(rows)

    def _show(self, rows: int) -> None:
        """Have the layer hold the first rows of the buffers."""
        self.rows, buffers = rows, iter(self.buffers)
        for states in (self._layer.conv_states, self._layer.recurrent_states):
            for i, state in states.items():
                if state is not None:
                    states[i] = next(buffers)[:rows]

    def _move(self, rows: int) -> None:
        """Make new buffers, of so many rows."""
        moved = [buffer.new_zeros(rows, *buffer.shape[1:]) for buffer in self.buffers]
        for buffer, made in zip(self.buffers, moved, strict=True):
            made[: self.rows].copy_(buffer[: self.rows])
        self.buffers = moved

    def read(self, row: int) -> LayerState | None:
        """Views of a row's states."""
        return view_states(self._layer, row)


class _RowHidden:
    """Hidden states of the tokens that a row was decoded to since it joined.

    Args:
        layers: The layers whose states are kept, by their numbers or `LAST`.
        last: The layers of `layers` that need only the states of the last tokens.
    """

    def __init__(self, layers: Sequence[int], last: Sequence[int] = ()) -> None:
        self.layers, self.shown = tuple(layers), tuple({*layers, *last})
        self._steps: list[dict[int, torch.Tensor]] = []  # by layer, [1, 1, hidden_size]

    def append(self, shown: Shown, row: int) -> None:
        """Keep what a step has shown of a row, [rows, tokens, hidden_size]."""
        states = {
            layer: found[row : row + 1].clone() for layer in self.shown if (found := shown.of(layer)) is not None
        }
        tokens = next((found.shape[1] for found in states.values()), 1) if self.shown else 0
        for at in range(tokens):
            self._steps.append({layer: found[:, at : at + 1] for layer, found in states.items()})
        if not self.layers:
            del self._steps[:-tokens]

    def __len__(self) -> int:
        return len(self._steps)

    def forget(self, tokens: int) -> None:
        """Forget the last tokens."""
        del self._steps[max(len(self._steps) - tokens, 0) :]

    def read(self, tokens: int) -> dict[int, torch.Tensor]:
        """Of each layer, the states [1, tokens, hidden_size] of the last `tokens`; none if some were not shown."""
        steps = self._steps[len(self._steps) - tokens :] if 0 < tokens <= len(self._steps) else []
        if not steps or any(len(step) < len(self.shown) for step in steps):
            return {}
        return {layer: torch.cat([step[layer] for step in steps], dim=1) for layer in self.shown}


def _room(columns: int) -> int:
    return max(_ROOM, columns // 8)


def _not_dense() -> torch.Tensor:
    raise NotImplementedError("Rows of a batch that lie in pieces are read by 'kvboost_fa2' alone.")


class BatchKV:
    """The K/V of a batch.

    Args:
        model: The model; each of its layers keeps the K/V of every token, or shares that of another layer.
        in_place: Whether K/V of prompts stays where it is; only where `sharing_reason` is None.
        least: Least number of tokens that stay where they are; fewer are copied.

    Attributes:
        lengths: Tokens of each row.
    """

    def __init__(self, model: PreTrainedModel, *, in_place: bool = False, least: int = _LEAST) -> None:
        self._model = model
        self._layers: list[_BatchLayer | None] = []  # None for a layer that has no K/V of its own
        self._states: list[_RowStates | None] = []  # None for a layer that has no states
        self._shown: list[Any] = []  # the layers that transformers sees
        self.lengths: list[int] = []
        self._own: list[int] = []  # those of its tokens that are in columns
        self._kept: list[_RowHidden] = []
        self._stop, self._rides = 0, False
        self._tree: PrefixTree[list[KeysValues]] | None = PrefixTree(least) if in_place else None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, unused ones included; without K/V that lies elsewhere."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    @property
    def _buffers(self) -> Iterator[torch.Tensor]:
        held = (each for each in (*self._layers, *self._states) if each is not None)
        return (buffer for each in held for buffer in each.buffers)

    @torch.no_grad()
    def join(
        self,
        kv: Sequence[KeysValues | None],
        tokens: Sequence[int],
        owner: Hashable = None,
        states: Sequence[LayerState | None] = (),
        hidden: Sequence[int] = (),
        last: Sequence[int] = (),
        rides: bool = False,
    ) -> None:
        """Add a row behind the others. If it fails, the others do not change.

        Args:
            kv: For each layer, keys and values [1, num_kv_heads, tokens, head_dim] of the last tokens, as many as the
                layer needs; None for a layer without K/V. They must not change while the row is here.
            tokens: Token ids of the row.
            owner: Only rows of the same owner share K/V of prefixes.
            states: For each layer, the state of the row, of which a copy is made; None for a layer without states.
                Empty if no layer has any.
            hidden: The layers whose hidden states are kept of the row's new tokens. The model needs
                `hook_hidden_states` then.
            last: The layers of `hidden` that need only the states of the last token.
            rides: Whether steps may compute tokens of the row again: its K/V is copied then, wherever it lies.
        """
        states = states or [None] * len(kv)
        if not self.lengths:
            self._make_layers(kv, states)
            self._stop = 0
        rows, stop = len(self.lengths), self._stop
        made = max((len(layer.buffers[0]) for layer in self._layers if layer is not None and layer.buffers), default=0)
        try:
            placed = 0
            pairs = [pair for pair in kv if pair is not None]
            if self._tree is not None:
                placed = self._tree.add(owner, [] if rides else tokens, pairs)
            own = len(tokens) - placed
            self._stop = max(self._stop, own)
            layers = [layer for layer in self._layers if layer is not None]
            for layer, (keys, values) in zip(layers, pairs, strict=True):
                layer.add((keys[:, :, placed:], values[:, :, placed:]), self._stop)
            holders = [held for held in self._states if held is not None]
            for held, state in zip(holders, [state for state in states if state is not None], strict=True):
                held.add(state)
            self.lengths.append(len(tokens))
            self._own.append(own)
            self._kept.append(_RowHidden(hidden, last))
            self._place()
        except BaseException:
            self._keep(rows, stop, made)
            raise

    def _keep(self, rows: int, stop: int, made: int) -> None:
        """Undo the addition of a row to `rows` others, in buffers that had `made` rows and ended at `stop`."""
        del self.lengths[rows:], self._own[rows:], self._kept[rows:]
        if self._tree is not None and len(self._tree) > rows:
            self._tree.remove(rows)
        self._stop = stop
        for layer in self._layers if rows else ():
            if layer is not None:
                layer.rows = rows
                if len(layer.buffers[0]) != made or layer.stop != stop:
                    layer.shrink(layer.stop - stop, made)
        for held in self._states if rows else ():
            if held is not None:
                held.keep(rows)
        if not rows:
            self._drop_layers()
        else:
            self._place()

    @torch.no_grad()
    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        listed: tuple[list[Any], ...] = (self.lengths, self._own, self._kept)
        for each in listed:
            last = each.pop()
            if row < len(each):
                each[row] = last
        if self._tree is not None:
            self._tree.remove(row)
        if not self.lengths:
            self._drop_layers()
            return
        for held in self._states:
            if held is not None:
                held.remove(row)
        longest = max(self._own)
        unused = self._stop - longest
        for layer in self._layers:
            if layer is not None:
                layer.remove(row)
                if unused > longest or layer.is_cut:  # most of the columns are of nobody
                    layer.shrink(unused if unused > longest else 0, len(layer.buffers[0]))
        if unused > longest:
            self._stop = longest
        self._place()

    def clear(self) -> None:
        """Remove all rows, whatever state they were left in."""
        self.lengths, self._own, self._kept = [], [], []
        self._drop_layers()
        if self._tree is not None:
            self._tree.clear()

    def _make_layers(self, kv: Sequence[KeysValues | None], states: Sequence[LayerState | None]) -> None:
        """Empty layers, for K/V and states where a row has them."""
        self._shown = cache_layers(self._model)
        windows = [layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else 0 for layer in self._shown]
        self._rides = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in self._shown)
        self._rides &= None not in kv
        for at, (pair, state) in enumerate(zip(kv, states, strict=True)):
            if pair is not None:
                self._shown[at] = _BatchLayer() if state is None else _HybridLayer(len(state.tensors) // 2)
            elif state is not None:
                self._shown[at] = LinearAttentionLayer(len(state.tensors) // 2)
        self._layers = [layer if isinstance(layer, _BatchLayer) else None for layer in self._shown]
        for held, window in zip(self._layers, windows, strict=True):
            if held is not None:
                held.window = window
        self._states = [
            _RowStates(layer) if state is not None else None for layer, state in zip(self._shown, states, strict=True)
        ]

    def _drop_layers(self) -> None:
        self._layers, self._states, self._shown = [], [], []

    def _place(self) -> None:
        """Give the layers the tables of the K/V that lies elsewhere."""
        if self._tree is None:
            return
        paths = [self._tree.path(row) for row in range(len(self.lengths))]
        parts = {id(part): part for path in paths for part in path}
        numbers = {part: number for number, part in enumerate(parts)}
        most, columns = max(map(len, paths)), max((path[-1].stop for path in paths if path), default=0)
        rows = [
            [(numbers[id(part)], part.start, -1) for part in path] + [(-1, -1, -1)] * (most - len(path))
            for path in paths
        ]
        placed = torch.tensor(rows, dtype=torch.int64)
        for i, layer in enumerate(self._layers):
            assert layer is not None
            keys, values = (
                tuple(part.held[i][at][0, :, part.start : part.stop] for part in parts.values()) for at in range(2)
            )
            layer.table = PieceTable(keys, values, placed, columns) if keys else None

    def read(self, row: int, tokens: int) -> list[KeysValues | None]:
        """For each layer, views of keys and values [1, num_kv_heads, tokens, head_dim] of a row's last `tokens`.

        Where K/V stays in place, these may only be tokens that were appended since the row joined.
        """

        def last(buffer: torch.Tensor) -> torch.Tensor:
            return buffer[row : row + 1, :, self._stop - tokens : self._stop]

        return [None if layer is None else (last(layer.buffers[0]), last(layer.buffers[1])) for layer in self._layers]

    def read_states(self, row: int) -> list[LayerState | None]:
        """For each layer, views of a row's state; None where it has none."""
        return [None if held is None else held.read(row) for held in self._states]

    def read_hidden(self, row: int, tokens: int) -> dict[int, torch.Tensor]:
        """Hidden states [1, tokens, hidden_size] of a row's last `tokens`, of each layer whose states are kept of it.

        Only those of tokens that were appended since the row joined.
        """
        return self._kept[row].read(tokens)

    def step(self, tokens: Sequence[int], again: Sequence[Again] = ()) -> torch.Tensor:
        """Append a token to each row; returns the logits [rows, vocab_size] for the next ones. See `check`."""
        return self.check([[token] for token in tokens], again)[:, -1]

    @torch.no_grad()
    def check(self, tokens: Sequence[Sequence[int]], again: Sequence[Again] = ()) -> torch.Tensor:
        """Append tokens to each row; returns the logits [rows, tokens, vocab_size] behind them.

        Args:
            tokens: For each row, as many as for the others. More than one only if `can_check`; `keep` is to follow.
            again: For each row, tokens that it holds, and whose K/V is computed again on the way; only if `can_ride`,
                and of rows that joined with `rides`.
        """
        if any(ids for _, ids in again):
            return self._ride(tokens, again)
        device, count = next(self._buffers).device, len(tokens[0])
        lengths, own = torch.tensor([self.lengths, self._own], device=device)
        keep = torch.arange(self._stop + count, device=device) >= self._stop - own[:, None]
        even = min(self._own) == self._stop
        in_pieces = False
        for layer in self._layers:
            if layer is not None and layer.table is not None:
                layer.keep, in_pieces = None if even else keep, True
        cache, found = self._cache(count)
        try:
            output = run_model(
                self._model,
                torch.tensor(tokens, device=device),
                cache,
                logits=count,
                attention_mask=keep.long() if not (even or in_pieces) else None,
                position_ids=lengths[:, None] + torch.arange(count, device=device),
            )
        except BaseException:
            for layer in self._layers:
                if layer is not None:
                    layer.stop = self._stop
            raise
        self._appended(count, found)
        logits: torch.Tensor = output.logits[:, -count:]
        return logits

    def _cache(self, count: int) -> tuple[PrivateCache, list[Shown]]:
        """The cache of a forward, and where the hidden states of its last `count` tokens will be, if rows keep any."""
        cache, found = PrivateCache(self._shown), list[Shown]()
        if kept := {layer for row in self._kept for layer in row.shown}:

            def take(shown: Shown) -> Shown:
                last = (None if layer is None else layer[:, -count:] for layer in shown.layers)
                found.append(Shown(shown.last[:, -count:], tuple(last)))
                return shown

            cache.hidden_layers, cache.take_hidden_states = sorted(kept), take
        return cache, found

    def _appended(self, count: int, found: Sequence[Shown]) -> None:
        self._stop += count
        self.lengths = [length + count for length in self.lengths]
        self._own = [own + count for own in self._own]
        for shown in found:
            for row, held in enumerate(self._kept):
                held.append(shown, row)

    def _ride(self, tokens: Sequence[Sequence[int]], again: Sequence[Again]) -> torch.Tensor:
        """Append tokens to each row, and compute others again. Rows with fewer of these compute a new token again."""
        device, count, width = next(self._buffers).device, len(tokens[0]), max(len(ids) for _, ids in again)
        layers = [layer for layer in self._layers if layer is not None]
        before = layers[0].before
        pads = [before + self._stop - own for own in self._own]
        given, columns = list[list[int]](), list[list[int]]()
        for row, pad, (start, ids) in zip(tokens, pads, again, strict=True):
            filled, end = width - len(ids), before + self._stop
            given.append([*ids, *[row[0]] * filled, *row])
            at = range(pad + start, pad + start + len(ids))
            columns.append([*at, *[end] * filled, *range(end, end + count)])
        for layer in layers:
            layer.open(count)
        cache, found = self._cache(count)
        scatter = ScatterPass(self._model, cache, layers, np.array(columns), pads, new=count)
        cache.take = scatter.update
        try:
            arguments = scatter.arguments_of(torch.tensor(given, device=device))
            elsewhere = [length - own for length, own in zip(self.lengths, self._own, strict=True)]
            arguments["position_ids"] += torch.tensor(elsewhere, device=device)[:, None]
            output = run_model(self._model, cache=cache, logits=count, **arguments)
        finally:
            scatter.close()
            cache.take = None
        for layer in layers:
            layer.stop += count
        self._appended(count, found)
        logits: torch.Tensor = output.logits[:, -count:]
        return logits

    @property
    def can_ride(self) -> bool:
        """Whether a step may compute tokens again: each layer has K/V of its own, and nothing but K/V."""
        return bool(self.lengths) and self._rides

    @property
    def can_check(self) -> bool:
        """Whether a step may have several tokens of a row, of which it keeps some: states cannot go back."""
        return bool(self.lengths) and not any(self._states)

    @property
    def can_read(self) -> bool:
        """Whether `read` can read all tokens of a row: none lie elsewhere."""
        return all(layer.table is None for layer in self._layers if layer is not None)

    @torch.no_grad()
    def keep(self, counts: Sequence[int], columns: int) -> None:
        """Keep the first `counts` tokens that the last step, of `columns`, has appended to each row."""
        start, most = self._stop - columns, max(counts)
        for row, count in enumerate(counts):
            by, first = most - count, self._stop - self._own[row]
            for layer in self._layers if by else ():
                for buffer in layer.buffers if layer is not None else ():
                    buffer[row, :, first + by : start + most].copy_(buffer[row, :, first : start + count].clone())
            self.lengths[row] -= columns - count
            self._own[row] -= columns - count
            self._kept[row].forget(columns - count)
        self._stop = start + most
        for layer in self._layers:
            if layer is not None:
                layer.stop = self._stop
