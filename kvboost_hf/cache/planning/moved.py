"""Columns of a batch that moved chunks serve: planned before a forward, and tracked after it.

    row     [ held | exact | moved | computed | moved | … | computed ]
              0    held    hit                                      n

A moved chunk has the right tokens and the wrong history. Its keys are rotated to their new positions when they are put
into the layers, and what is computed again of it is chosen by a repair.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.match import MovedIndex, find_moved
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, Segment
from kvboost_hf.cache.planning.repair import Mask, RepairRow

_LAST_TOKENS = 16  # the end of a prompt is computed even where it is stored


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """A plan in which moved chunks serve some of the columns.

    Args:
        reuse: What is put into the layers, up to the last column; zeros where no chunk serves.
        rows: Per row, the columns that are computed in any case, and those that moved chunks serve.
    """

    reuse: ReusePlan
    rows: tuple[RepairRow, ...]

    @property
    def first_computed(self) -> int:
        """The first column that is not exact in every row."""
        found = [np.flatnonzero(row.computed | row.moved) for row in self.rows]
        return min(int(each[0]) if len(each) else self.reuse.filled for each in found)

    @property
    def moved(self) -> Mask:
        """[batch, columns], those that moved chunks serve."""
        return np.stack([row.moved for row in self.rows])

    @property
    def present(self) -> Mask:
        """[batch, columns], those that are in the layers before anything is computed."""
        return ~np.stack([row.computed for row in self.rows])


def plan_blend(ids: Tokens, exact: ReusePlan, logits: int, index: MovedIndex, sink_tokens: int) -> BlendPlan | None:
    """Find moved chunks for what the store has no exact K/V of.

    Args:
        ids: [batch, columns], all of them.
        exact: What the store can serve of each row as it stands.
        logits: How many of the last columns are wanted for their logits.
        index: Stored chunks by content.
        sink_tokens: Tokens at the beginning of a row that are not moved.

    Returns:
        The plan, or None where nothing can be moved.
    """
    columns = ids.shape[1]
    found: dict[bytes, tuple[Segment, ...]] = {}  # beams and num_return_sequences repeat rows
    rows: list[RowPlan] = []
    repairs: list[RepairRow] = []
    for tokens, pad, plan in zip(ids, exact.pads, exact.rows, strict=True):
        own = tokens[pad:]
        key = own.tobytes()
        if key not in found:
            stop = len(own) - max(logits, _LAST_TOKENS)
            found[key] = find_moved(own, max(plan.hit, sink_tokens), stop, index)
        segments = found[key]
        moved, computed = np.zeros(columns, dtype=bool), np.zeros(columns, dtype=bool)
        computed[max(exact.held, pad, plan.hit + pad) :] = True
        for segment in segments:
            moved[segment.start + pad : segment.stop + pad] = True
        seams = tuple(segment.start + pad for segment in segments if not segment.continues)
        repairs.append(RepairRow(computed & ~moved, moved, seams))
        rows.append(RowPlan(len(own), (*plan.segments, *segments), (), plan.miss))
    if not any(found.values()):
        return None
    return BlendPlan(ReusePlan(exact.held, columns, tuple(rows), exact.pads), tuple(repairs))


def choose_columns(wanted: Sequence[Mask], spare: Sequence[Mask]) -> NDArray[np.int64]:
    """The columns to compute, [batch, m]: those `wanted` in each row, and as many as others need from `spare`.

    A forward computes the same number of columns of every row. Rows that need fewer compute some of their moved ones
    besides, which can only make them better, and then whatever there is.

    Args:
        wanted: Per row, [columns].
        spare: Per row, [columns], those that may be computed at all.
    """
    width = max(int(row.sum()) for row in wanted)
    chosen: list[NDArray[np.int64]] = []
    for row, rest in zip(wanted, spare, strict=True):
        more = np.flatnonzero(rest & ~row)
        chosen.append(np.sort(np.concatenate([np.flatnonzero(row), more[::-1][: width - int(row.sum())]])))
    return np.stack(chosen)


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

    moved: Mask
    stale: Mask

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

    def next_tainted(self, held: int, most: int) -> Mask:
        """The first tainted columns of each row, at most `most` of them, of `held` ones: [batch, held]."""
        found = np.zeros((len(self.stale), held), dtype=bool)
        for row in range(len(self.stale)):
            if self.is_tainted(row):
                start = self.tainted_from(row)
                found[row, start : start + most] = True
        return found

    def repaired(self, columns: Mask) -> "MovedColumns | None":
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

    def extend(self, moved: Mask, stale: Mask) -> "MovedColumns":
        """Add columns: `moved` and `stale` cover all columns, the known ones included."""
        known = self.moved.shape[1]
        moved, stale = moved.copy(), stale.copy()
        moved[:, :known] |= self.moved
        stale[:, :known] |= self.stale
        return MovedColumns(moved, stale)
