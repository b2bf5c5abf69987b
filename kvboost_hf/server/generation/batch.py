"""`BatchKV`: K/V of rows of different lengths that are decoded in one batch; rows join and leave between steps.

    columns      0 …                         stop
    row 0        [ a a a a a a a a a a a a a ]
    row 1        [ . . . . . b b b b b b b b ]      dots are padding, hidden by a mask
    row 2        [ . . . . . . . . . c c c c ]

All rows end at the same column, so that a step appends one column to all of them. Where the model's attention can read
K/V in pieces, the columns hold the decoded tokens only: K/V of the prompts stays where it is, and rows that share a
prefix read it once. `PrefixTree` finds these, as parts that one or several rows have:

    [ system prompt ─┬─ question a ]        text 0: parts 0, 1
                     ├─ question b ]        text 1: parts 0, 2
                     └─ document ─┬─ c ]    text 2: parts 0, 3, 4
                                  └─ d ]    text 3: parts 0, 3, 5
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvboost_hf.compat import PrivateCache, run_model
from kvboost_hf.handles import KVHandle, PiecedKV, PieceTable
from kvboost_hf.ngrams import common_prefix

KeysValues = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, num_kv_heads, tokens, head_dim]
_ROOM = 128  # columns to spare, at least, in a buffer that had to be made anew
_LEAST = 64  # tokens that are worth a call of attention of their own
Held = TypeVar("Held")


class _BatchLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keys and values [rows, num_kv_heads, columns, head_dim], in buffers with rows and columns to spare."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[torch.Tensor] = []
        self.rows = self.stop = 0
        self.table: PieceTable | None = None  # of what lies elsewhere, before these columns
        self.keep: torch.Tensor | None = None  # [rows, columns], beside a table

    def get_seq_length(self) -> int:
        """Columns of the buffers and of the table."""
        return self.stop + (self.table.columns if self.table is not None else 0)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        """Append [rows, num_kv_heads, 1, head_dim]; returns views of all columns, or a `KVHandle` each."""
        start, self.stop = self.stop, self.stop + key_states.shape[2]
        if self.stop > self.buffers[0].shape[2]:
            self.move(0, len(self.buffers[0]), start, self.stop)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, start : self.stop].copy_(states)
        keys, values = (buffer[: self.rows, :, : self.stop] for buffer in self.buffers)
        if self.table is None:
            return keys, values
        kv, columns = PiecedKV(self.table, keys, values, self.keep), self.get_seq_length()
        return KVHandle(kv, _not_dense, keys, columns), KVHandle(kv, _not_dense, values, columns)

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
    """

    def __init__(self, model: PreTrainedModel, *, in_place: bool = False, least: int = _LEAST) -> None:
        self._model = model
        self._layers: list[_BatchLayer | None] = []  # None for a layer that has no K/V of its own
        self._lengths: list[int] = []  # of each row
        self._own: list[int] = []  # those of its tokens that are in columns
        self._stop = 0
        self._tree: PrefixTree[list[KeysValues]] | None = PrefixTree(least) if in_place else None

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, row: int) -> int:
        """Tokens of a row."""
        return self._lengths[row]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, unused ones included; without K/V that lies elsewhere."""
        held = (buffer for layer in self._layers if layer is not None for buffer in layer.buffers)
        return sum(buffer.untyped_storage().nbytes() for buffer in held)

    @torch.no_grad()
    def join(self, kv: Sequence[KeysValues | None], tokens: Sequence[int], owner: Hashable = None) -> None:
        """Add a row behind the others. If it fails, the others do not change.

        Args:
            kv: For each layer, keys and values [1, num_kv_heads, tokens, head_dim] of the last tokens, as many as the
                layer needs; None for a layer without K/V. They must not change while the row is here.
            tokens: Token ids of the row.
            owner: Only rows of the same owner share K/V of prefixes.
        """
        if not self._lengths:
            self._layers = [None if pair is None else _BatchLayer() for pair in kv]
            self._stop = 0
        rows, stop = len(self), self._stop
        made = max((len(layer.buffers[0]) for layer in self._layers if layer is not None and layer.buffers), default=0)
        try:
            placed = 0
            if self._tree is not None:
                placed = self._tree.add(owner, tokens, [pair for pair in kv if pair is not None])
            own = len(tokens) - placed
            self._stop = max(self._stop, own)
            for layer, pair in zip(self._layers, kv, strict=True):
                if layer is not None and pair is not None:
                    layer.add((pair[0][:, :, placed:], pair[1][:, :, placed:]), self._stop)
            self._lengths.append(len(tokens))
            self._own.append(own)
            self._place()
        except BaseException:
            self._keep(rows, stop, made)
            raise

    def _keep(self, rows: int, stop: int, made: int) -> None:
        """Undo the addition of a row to `rows` others, in buffers that had `made` rows and ended at `stop`."""
        del self._lengths[rows:], self._own[rows:]
        if self._tree is not None and len(self._tree) > rows:
            self._tree.remove(rows)
        self._stop = stop
        for layer in self._layers if rows else ():
            if layer is not None:
                layer.rows = rows
                if len(layer.buffers[0]) != made or layer.stop != stop:
                    layer.shrink(layer.stop - stop, made)
        if not rows:
            self._layers = []
        else:
            self._place()

    @torch.no_grad()
    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        for numbers in (self._lengths, self._own):
            last = numbers.pop()
            if row < len(numbers):
                numbers[row] = last
        if self._tree is not None:
            self._tree.remove(row)
        if not self._lengths:
            self._layers = []
            return
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
        self._layers, self._lengths, self._own = [], [], []
        if self._tree is not None:
            self._tree.clear()

    def _place(self) -> None:
        """Give the layers the tables of the K/V that lies elsewhere."""
        if self._tree is None:
            return
        paths = [self._tree.path(row) for row in range(len(self))]
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

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each row; returns the logits [rows, vocab_size] for the next ones."""
        device = next(layer.buffers[0].device for layer in self._layers if layer is not None)
        lengths, own = torch.tensor([self._lengths, self._own], device=device)
        keep = torch.arange(self._stop + 1, device=device) >= self._stop - own[:, None]
        even = min(self._own) == self._stop
        in_pieces = False
        for layer in self._layers:
            if layer is not None and layer.table is not None:
                layer.keep, in_pieces = None if even else keep, True
        cache = PrivateCache([_Nothing() if layer is None else layer for layer in self._layers])
        try:
            output = run_model(
                self._model,
                torch.tensor(tokens, device=device)[:, None],
                cache,
                attention_mask=keep.long() if not (even or in_pieces) else None,
                position_ids=lengths[:, None],
            )
        except BaseException:
            for layer in self._layers:
                if layer is not None:
                    layer.stop = self._stop
            raise
        self._stop += 1
        self._lengths = [length + 1 for length in self._lengths]
        self._own = [own + 1 for own in self._own]
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class _Nothing(_BatchLayer):  # type: ignore[no-untyped-call]
    """Stands for a layer that shares the K/V of another."""


@dataclass(slots=True, eq=False)
class _Text(Generic[Held]):
    owner: Hashable
    held: Held
    last: "SharedPart[Held] | None" = None


@dataclass(slots=True, eq=False)
class SharedPart(Generic[Held]):
    """Tokens that one or more texts have at the same place."""

    start: int
    tokens: list[int]
    texts: list[_Text[Held]]  # that go through it
    above: "SharedPart[Held] | None"
    below: "list[SharedPart[Held]]" = field(default_factory=list)

    @property
    def stop(self) -> int:
        """Where the next part of a text begins."""
        return self.start + len(self.tokens)

    @property
    def held(self) -> Held:
        """The K/V of one of the texts that go through the part; it covers all tokens of that text."""
        return self.texts[0].held


class PrefixTree(Generic[Held]):
    """Texts in an order of their own, in which the last one takes the place of one that leaves.

    Args:
        least: Tokens that texts share at least, if they share any.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._roots: dict[Hashable, list[SharedPart[Held]]] = {}  # by owner
        self._texts: list[_Text[Held]] = []

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, owner: Hashable, tokens: Sequence[int], held: Held) -> int:
        """Add a text behind the others.

        Args:
            owner: Only texts of the same owner share anything.
            tokens: The token ids of the text.
            held: What is held of all of them.

        Returns:
            How many first tokens are in parts: all but a rest of fewer than `least`.
        """
        text, beside, stop = _Text(owner, held), self._roots.setdefault(owner, []), 0
        while (found := self._shared(beside, [*tokens[stop:]])) is not None:
            found.texts.append(text)
            beside, text.last, stop = found.below, found, found.stop
        if len(tokens) - stop >= self._least:
            text.last = SharedPart(stop, [*tokens[stop:]], [text], text.last)
            beside.append(text.last)
            stop = len(tokens)
        self._texts.append(text)
        return stop

    def remove(self, text: int) -> None:
        """Remove a text; the last one takes its place."""
        left, last = self._texts[text], self._texts.pop()
        if text < len(self._texts):
            self._texts[text] = last
        part = left.last
        while part is not None:
            part.texts.remove(left)
            if not part.texts:
                (self._roots[left.owner] if part.above is None else part.above.below).remove(part)
            elif len(part.below) == 1 and len(part.below[0].texts) == len(part.texts):
                _join(part, part.below[0])
            part = part.above
        if all(each.owner != left.owner for each in self._texts):
            del self._roots[left.owner]

    def clear(self) -> None:
        """Remove all texts, one by one: parts refer to each other, and would be freed much later."""
        while self._texts:
            self.remove(0)

    def path(self, text: int) -> list[SharedPart[Held]]:
        """The parts of a text, in order."""
        part, found = self._texts[text].last, []
        while part is not None:
            found.append(part)
            part = part.above
        return found[::-1]

    def _shared(self, beside: list[SharedPart[Held]], tokens: list[int]) -> SharedPart[Held] | None:
        """The part of `beside` that the tokens begin with, split off from its rest if need be."""
        shared = [common_prefix(part.tokens, tokens) for part in beside]
        most = max(shared, default=0)
        part = beside[shared.index(most)] if most else None
        if part is None or most == len(part.tokens):
            return part
        if most < self._least:
            return None
        upper = SharedPart(part.start, part.tokens[:most], [*part.texts], part.above, [part])
        beside[beside.index(part)] = upper
        part.start, part.tokens, part.above = upper.stop, part.tokens[most:], upper
        return upper


def _join(part: SharedPart[Held], lower: SharedPart[Held]) -> None:
    """Make one part of two that all of their texts go through."""
    part.tokens, part.below = part.tokens + lower.tokens, lower.below
    for each in lower.below:
        each.above = part
    for text in lower.texts:
        if text.last is lower:
            text.last = part
