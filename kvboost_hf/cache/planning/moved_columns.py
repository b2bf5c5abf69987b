"""Tracks which columns of each row hold K/V that a plain forward would not produce."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Columns = NDArray[np.bool_]  # [batch, columns]


@dataclass(frozen=True, slots=True)
class MovedColumns:
    """The columns of a batch that moved chunks served, and those of them that were not computed again.

    K/V of a token equals that of a plain forward only if that of every token before it does. So from the first stale
    column on, the row is tainted: its K/V must not be found by prefix key. Columns that are computed again in order,
    from the first stale one on, are those of a plain forward again.

    Args:
        moved: [batch, columns], those that moved chunks served, computed again or not. Later ones were computed.
        stale: [batch, columns], those that were not computed again in every layer.
    """

    moved: Columns
    stale: Columns

    def is_tainted(self, row: int) -> bool:
        """Whether a row has stale columns."""
        return bool(self.stale[row].any())

    def tainted_from(self, row: int) -> int:
        """The first stale column of a row that has some."""
        return int(self.stale[row].argmax())

    @property
    def exact_columns(self) -> int:
        """How many first columns are those of a plain forward in every row."""
        return min(self.tainted_from(row) for row in range(len(self.stale)) if self.is_tainted(row))

    def tainted_columns(self, held: int) -> int:
        """How many of the first `held` columns are tainted, over all rows."""
        return sum(max(0, held - self.tainted_from(row)) for row in range(len(self.stale)) if self.is_tainted(row))

    def next_tainted(self, held: int, most: int) -> Columns:
        """The first tainted columns of each row, at most `most` of them, of `held` ones: [batch, held]."""
        found = np.zeros((len(self.stale), held), dtype=bool)
        for row in range(len(self.stale)):
            if self.is_tainted(row):
                start = self.tainted_from(row)
                found[row, start : start + most] = True
        return found

    def repaired(self, columns: Columns) -> "MovedColumns | None":
        """What is left once the `columns` that `next_tainted` gave were computed again; None if nothing is."""
        stale = np.zeros_like(columns)
        for row in range(len(stale)):
            if self.is_tainted(row):
                stale[row, self.tainted_from(row) :] = True
        stale &= ~columns
        moved = np.zeros_like(stale)
        moved[:, : self.moved.shape[1]] = self.moved
        return MovedColumns(moved, stale) if stale.any() else None

    def run_at(self, row: int, column: int) -> "tuple[bool, int | None]":
        """Whether a moved chunk served a column, and the column at which that changes next; None if it never does."""
        moved = self.moved[row, column:]
        if not len(moved):
            return False, None
        changes = np.flatnonzero(moved != moved[0])
        if len(changes):
            return bool(moved[0]), column + int(changes[0])
        return bool(moved[0]), self.moved.shape[1] if moved[0] else None

    def run_ends(self, row: int, column: int) -> bool:
        """Whether the run of `run_at` ends, in a row that has stale columns."""
        return self.is_tainted(row) and bool(self.moved[row, column:].any())

    def crop(self, length: int) -> "MovedColumns | None":
        """The first `length` columns; None if none of them is stale."""
        stale = self.stale[:, :length]
        return MovedColumns(self.moved[:, :length], stale) if stale.any() else None

    def select(self, rows: NDArray[np.int64]) -> "MovedColumns | None":
        """Row i becomes what row `rows[i]` was."""
        stale = self.stale[rows]
        return MovedColumns(self.moved[rows], stale) if stale.any() else None

    def extend(self, moved: Columns, stale: Columns) -> "MovedColumns":
        """Add columns: `moved` and `stale` cover all columns, the known ones included."""
        known = self.moved.shape[1]
        moved, stale = moved.copy(), stale.copy()
        moved[:, :known] |= self.moved
        stale[:, :known] |= self.stale
        return MovedColumns(moved, stale)
