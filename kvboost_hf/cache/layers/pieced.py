"""A layer whose first columns stay where they are: in the chunks that a store has given.

    columns   [0, n)                              [n, length)
    held as   pieces, shared with the store       a growing buffer

Where an attention can read pieces, rows that share a prefix share its memory; outside of a GPU a hit copies nothing,
either. On a GPU a hit of one row is copied into the buffer: its host launches more for each piece than a copy costs.
Whatever else is done with the layer makes it a `GrowingLayer` first.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvboost_hf.cache.layers import base
from kvboost_hf.cache.layers.base import ColumnSpec, Piece, Turn
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor
from kvboost_hf.handles import KVHandle, PiecedKV, PieceTable, read_in_place


class _Placed(NamedTuple):
    start: int  # the column of its first token
    piece: Piece  # keys and values, [num_kv_heads, tokens, head_dim]

    @property
    def stop(self) -> int:
        return self.start + self.piece[0].shape[1]


_Row = tuple[_Placed, ...]


class PiecedLayer(GrowingLayer):  # type: ignore[no-untyped-call]
    """Full-attention K/V of one layer."""

    _rows: tuple[_Row, ...] = ()  # of each row, its pieces in order; nothing if all columns are in the buffers
    _table: PieceTable | None = None
    _held: tuple[KVHandle, KVHandle] | None = None  # what stands for all columns while there are pieces

    # What transformers calls

    # A compiled model breaks its graph here, as at a `QuantizedLayer`.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is returned may be a `KVHandle` each."""
        # Who has asked for all columns once will do so at each step.
        if not self._may_hand_out(key_states.device) or (self._held is not None and self._held[0].is_dense):
            self._settle()
        found = super().update(key_states, value_states)
        self._view()
        return self._held if self._held is not None else found

    def reset(self) -> None:
        self._rows, self._table, self._held = (), None, None
        super().reset()

    def __getstate__(self) -> dict[str, object]:
        self._settle()  # a table of pieces has their addresses, which are not those of copies
        return self.__dict__

    # What the cache calls

    @property
    def intact(self) -> bool:
        """Writes to a `KVHandle` reach nothing but the tensor that it has made."""
        written = self._held is not None and any(held.is_written for held in self._held)
        return not written and super().intact

    @property
    def first(self) -> int:
        return 0 if self._rows else super().first

    def truncate(self, length: int) -> None:
        if self._table is None or length >= self._table.columns:
            super().truncate(length)
            self._view()
            return
        if length == 0:
            self.reset()
            return
        rows = [[_up_to(placed, length) for placed in row if placed.start < length] for row in self._rows]
        if not any(rows):  # there is nothing but padding left
            self._settle()
            super().truncate(length)
            return
        self.version += 1
        self._empty_from(length)
        self._place(rows, length)

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        if self._table is None:
            return super().columns(row, start, stop)
        behind = self._table.columns
        parts = [_between(placed, start, stop) for placed in self._rows[row] if start < placed.stop]
        if stop > behind:
            parts.append(super().columns(row, max(start, behind), stop) or ())
        parts = [part for part in parts if part and part[0].shape[1]]
        return parts[0] if len(parts) == 1 else tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]], turn: Turn | None = None) -> None:
        if turn is not None:  # pieces stay as they are stored
            self._settle()
            super().fill(start, stop, rows, turn)
            return
        like = next(piece for pieces in rows for piece in pieces)
        behind = self._table.columns if self._table is not None else 0
        if start != behind or start != self.length or not self._can_keep(rows, like):
            super().fill(start, stop, rows)
            self._view()
            return
        if not self.is_initialized:
            self.lazy_initialization(like[0], like[1])
        self.version += 1
        placed = [list(row) for row in self._rows] or [[] for _ in rows]
        for own, pieces in zip(placed, rows, strict=True):
            column = stop - sum(piece[0].shape[1] for piece in pieces)
            for piece in pieces:
                own.append(_Placed(column, piece))
                column = own[-1].stop
        self._empty_from(stop)
        self._place(placed, stop)

    def can_take(self, device: torch.device) -> bool:
        return self.length == 0 and not self._may_hand_out(device)

    def open(self, stop: int, like: Piece, batch: int) -> tuple[torch.Tensor, ...]:
        self._settle()
        return super().open(stop, like, batch)

    def scatter(
        self, columns: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._settle()
        return super().scatter(columns, key_states, value_states)

    def gather(self, tensor: int, columns: torch.Tensor) -> torch.Tensor:
        self._settle()
        return super().gather(tensor, columns)

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        if self._table is None:
            return super().column_specs
        pieces = self._table.keys[0], self._table.values[0]
        return tuple(ColumnSpec(piece.shape[0], piece.shape[2], piece.dtype) for piece in pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, and of the pieces, whoever else holds them."""
        table = self._table  # which another thread may drop
        pieces = (*table.keys, *table.values) if table is not None else ()
        return super().nbytes + sum(piece.nbytes for piece in pieces)

    # Pieces

    def _may_hand_out(self, device: torch.device) -> bool:
        return self.hands_out and not torch.is_grad_enabled() and read_in_place(PiecedKV, device)

    def _can_keep(self, rows: Sequence[Sequence[Piece]], like: Piece) -> bool:
        """Whether pieces can stay where they are."""
        pieces = [each for row in rows for piece in row for each in piece]
        if len(rows) == 1 and like[0].device.type in base.JOINED_ON:  # already copied, and read sooner as one tensor
            return False
        return (
            len(like) == 2
            and like[0].shape[2] == like[1].shape[2]
            and self._may_hand_out(like[0].device)
            and all(each.device == like[0].device and each.dtype == like[0].dtype for each in pieces)
            and all(each.data_ptr() % 16 == each.stride(1) * each.itemsize % 16 == 0 for each in pieces)
        )

    def _empty_from(self, column: int) -> None:
        """Have buffers behind the pieces that hold nothing yet."""
        tampered = not self.intact
        self._tensors = [GrowingTensor() for _ in self._tensors]
        for tensor in self._tensors:
            tensor.first = tensor.stop = column
            tensor.tampered = tampered

    def _place(self, rows: Sequence[Sequence[_Placed]], columns: int) -> None:
        """Hold these, which end at a column."""
        self._rows = tuple(tuple(row) for row in rows)
        self._table = _table(self._rows, columns)
        self._view()

    def _settle(self) -> None:
        """Copy all pieces into the buffers."""
        if self._table is None or self._held is None:
            return
        tampered = not self.intact
        if self._held[0].shape[2] != self.length or len(self._rows) != len(self._held[0]):
            self._view()  # it stood for what was held before
        whole = self._held
        self._rows, self._table, self._held = (), None, None
        self._tensors = [GrowingTensor() for _ in self._tensors]
        for tensor, columns in zip(self._tensors, whole, strict=True):
            tensor.append(columns)
            tensor.tampered |= tampered

    def _view(self) -> None:
        """Have `_held` stand for what is held now."""
        if self._table is None:
            return
        if self._held is not None and not self.intact:
            self._tensors[0].tampered = True
        like = self._table.keys[0]
        none = like.new_empty(len(self._rows), like.shape[0], 0, like.shape[2])
        behind = [tensor.view() if tensor.buffer is not None else none for tensor in self._tensors]
        kv = PiecedKV(self._table, behind[0], behind[1])
        keys, values = (KVHandle(kv, partial(_whole, kv, at), none, self.length) for at in range(2))
        self._held = keys, values

    def _hand_out_tensor(self, index: int) -> torch.Tensor | None:
        self._settle()
        return super()._hand_out_tensor(index)

    def _peek(self, index: int) -> torch.Tensor | None:
        self._settle()
        return super()._peek(index)

    def _adopt(self, index: int, new: torch.Tensor | None) -> None:
        self._settle()
        super()._adopt(index, new)

    def _select(self, rows: torch.Tensor) -> None:
        if self._table is not None:
            alike = bool((self._table.rows == self._table.rows[:1]).all())  # then a GPU need not be waited for
            if not alike or len(rows) != len(self._rows):
                self._rows = tuple(self._rows[row] for row in ([0] * len(rows) if alike else rows.tolist()))
                self._table = _table(self._rows, self._table.columns)
        super()._select(rows)
        self._view()

    def _move(self, device: torch.device) -> None:
        self._settle()
        super()._move(device)


def _whole(kv: PiecedKV, tensor: int) -> torch.Tensor:
    """The keys (0) or values (1) of all columns, in a new tensor [batch, num_kv_heads, columns, head_dim]."""
    table = kv.table
    pieces, behind = ((table.keys, kv.keys), (table.values, kv.values))[tensor]
    whole = F.pad(behind, (0, 0, table.columns, 0))
    for out, row in zip(whole, table.rows.tolist(), strict=True):
        for piece, column, _ in row:
            if piece >= 0:
                out[:, column : column + pieces[piece].shape[1]] = pieces[piece]
    return whole


def _up_to(placed: _Placed, length: int) -> _Placed:
    tokens = min(placed.stop, length) - placed.start
    return _Placed(placed.start, tuple(each[:, :tokens] for each in placed.piece))


def _between(placed: _Placed, start: int, stop: int) -> Piece:
    """The part of a piece in the columns [start, stop)."""
    begin = max(start - placed.start, 0)
    return tuple(each[:, begin : max(stop - placed.start, begin)] for each in placed.piece)


def _table(rows: Sequence[_Row], columns: int) -> PieceTable:
    """Where all pieces are; those that are the same for several rows once."""
    pieces: list[Piece] = []
    numbers: dict[tuple[int, ...], int] = {}  # of pieces, by where they are
    found: list[list[tuple[int, int, int]]] = []
    for row in rows:
        found.append([])
        for placed in row:
            key = (*(each.data_ptr() for each in placed.piece), placed.stop - placed.start)
            number = numbers.setdefault(key, len(pieces))
            if number == len(pieces):
                pieces.append(placed.piece)
            found[-1].append((number, placed.start, -1))
    most = max(map(len, found))
    filled = [row + [(-1, -1, -1)] * (most - len(row)) for row in found]
    keys, values = zip(*pieces, strict=True)
    return PieceTable(
        keys, values, torch.tensor(filled, dtype=torch.int64, device="cpu").view(len(rows), most, 3), columns
    )
