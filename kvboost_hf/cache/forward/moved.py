"""Prompts with moved chunks: which columns they serve, which are computed, and getting them into the layers.

    row     [ held | exact | moved | computed | moved | … | computed ]
              0    held    hit                                      n

Planning is pure. A moved chunk has the right tokens and the wrong history, and its keys were rotated to other
positions: `place` rotates them, and what is computed again of them is chosen in `repair/`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvboost_hf.cache.forward.scatter import Columns
from kvboost_hf.cache.kv import transfer
from kvboost_hf.cache.kv.layer_kv import LayerKVReader
from kvboost_hf.cache.layers.base import Piece, ReuseLayer
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.growing_tensor import write_row
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.match import MovedIndex, MovedSegment, find_moved
from kvboost_hf.cache.planning.plan import RowPlan, Segment
from kvboost_hf.cache.planning.repair import Mask, RepairRow
from kvboost_hf.cache.store.chunk_store import StoredChunk
from kvboost_hf.compat import KeyRotation, Shifts

_LAST_TOKENS = 16  # the end of a prompt is computed even where it is stored


@dataclass(frozen=True, slots=True)
class Placed:
    """Columns [start, stop) of a row, served by a chunk from its token `offset` on."""

    start: int
    stop: int
    chunk: StoredChunk
    offset: int
    shift: int  # how far its keys are to be rotated: new position less old position


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """Where the columns [held, columns) of a batch come from."""

    held: int
    columns: int
    pads: tuple[int, ...]
    placed: tuple[tuple[Placed, ...], ...]  # per row, in order
    rows: tuple[RepairRow, ...]

    @property
    def first_computed(self) -> int:
        """The first column that is not exact in every row."""
        return min(
            int(np.flatnonzero(row.computed | row.moved)[0]) if (row.computed | row.moved).any() else self.columns
            for row in self.rows
        )

    @property
    def moved(self) -> Mask:
        """[batch, columns], those that moved chunks serve."""
        return np.stack([row.moved for row in self.rows])

    @property
    def present(self) -> Mask:
        """[batch, columns], those that are in the layers before anything is computed."""
        return ~np.stack([row.computed for row in self.rows])

    @property
    def chunks(self) -> list[StoredChunk]:
        """All that serve."""
        return [piece.chunk for row in self.placed for piece in row]

    def with_loaded(self, loaded: Mapping[bytes, StoredChunk]) -> "BlendPlan":
        """The same with chunks that are loaded, by key."""
        placed = tuple(tuple(replace(piece, chunk=loaded[piece.chunk.key]) for piece in row) for row in self.placed)
        return replace(self, placed=placed)


def plan_blend(
    ids: Tokens,
    pads: Sequence[int],
    held: int,
    logits: int,
    exact: Sequence[RowPlan],
    index: MovedIndex,
    sink_tokens: int,
) -> BlendPlan | None:
    """Find moved chunks for what the store has no exact K/V of.

    Args:
        ids: [batch, columns], all of them.
        pads: Columns of left padding of each row.
        held: Columns in the live cache.
        logits: How many of the last columns are wanted for their logits.
        exact: What the store can serve of each row as it stands.
        index: Stored chunks by content.
        sink_tokens: Tokens at the beginning of a row that are not moved.

    Returns:
        The plan, or None where nothing can be moved.
    """
    columns = ids.shape[1]
    found: dict[bytes, tuple[MovedSegment, ...]] = {}  # beams and num_return_sequences repeat rows
    placed: list[tuple[Placed, ...]] = []
    rows: list[RepairRow] = []
    for tokens, pad, plan in zip(ids, pads, exact, strict=True):
        own = tokens[pad:]
        key = own.tobytes()
        if key not in found:
            stop = len(own) - max(logits, _LAST_TOKENS)
            found[key] = find_moved(own, max(plan.hit, sink_tokens), stop, index)
        segments = found[key]
        moved, computed = np.zeros(columns, dtype=bool), np.zeros(columns, dtype=bool)
        computed[max(held, pad, plan.hit + pad) :] = True
        for segment in segments:
            moved[segment.start + pad : segment.stop + pad] = True
        seams = tuple(segment.start + pad for segment in segments if not segment.continues)
        rows.append(RepairRow(computed & ~moved, moved, seams))
        placed.append((*_exact(plan.segments, pad), *_moved(segments, pad)))
    if not any(found.values()):
        return None
    return BlendPlan(held, columns, tuple(pads), tuple(placed), tuple(rows))


def _exact(segments: Sequence[Segment], pad: int) -> Iterator[Placed]:
    for segment in segments:
        assert isinstance(segment.chunk, StoredChunk)
        yield Placed(segment.start + pad, segment.stop + pad, segment.chunk, segment.start - segment.origin, 0)


def _moved(segments: Sequence[MovedSegment], pad: int) -> Iterator[Placed]:
    for segment in segments:
        assert isinstance(segment.chunk, StoredChunk)
        yield Placed(segment.start + pad, segment.stop + pad, segment.chunk, segment.offset, segment.shift)


def choose_columns(wanted: Sequence[Mask], spare: Sequence[Mask]) -> Columns:
    """The columns to compute, [batch, m]: those `wanted` in each row, and as many as others need from `spare`.

    A forward computes the same number of columns of every row. Rows that need fewer compute some of their moved ones
    besides, which can only make them better, and then whatever there is.

    Args:
        wanted: Per row, [columns].
        spare: Per row, [columns], those that may be computed at all.
    """
    width = max(int(row.sum()) for row in wanted)
    chosen: list[Columns] = []
    for row, rest in zip(wanted, spare, strict=True):
        more = np.flatnonzero(rest & ~row)
        chosen.append(np.sort(np.concatenate([np.flatnonzero(row), more[::-1][: width - int(row.sum())]])))
    return np.stack(chosen)


@torch.no_grad()
def place(layers: Sequence[ReuseLayer], plan: BlendPlan, rotation: KeyRotation) -> None:
    """Fill the columns [held, columns) of every layer: stored K/V where there is some, zeros elsewhere.

    Pieces are put in place as they are stored, and then all keys of a layer are rotated at once: the operations on a
    device are so many for each layer, and so many for each piece, not for each piece of each layer.
    """
    with torch.inference_mode(False):
        first, shifts = _shifts_of(plan)
        turns = Shifts(rotation, shifts, _send)
        readers = {chunk.key: chunk.kv.reader() for chunk in plan.chunks}
        rows = [_parts_of(placed, plan, readers) for placed in plan.placed]
        zeros = cache(_zeros)
        for idx, layer in enumerate(layers):
            like = next(part.reader.layer(idx) for parts in rows for part in parts if part.reader is not None)
            if like is None:
                continue
            assert isinstance(layer, GrowingLayer)
            opened = layer.open(plan.columns, like, len(rows))
            forms = [(kv.shape[0], kv.shape[2], kv.dtype, kv.device) for kv in like]
            for row, parts in enumerate(rows):
                pieces = [part.stored(idx) or tuple([zeros(part.columns, *form) for form in forms]) for part in parts]
                write_row([out[row] for out in opened], pieces)
            if shifts.size:  # else they all stand where they stood, behind another text
                keys = opened[rotation.rotated(idx)][:, :, first : first + shifts.shape[1]]
                rotation.rotate(idx, keys, turns, out=keys)
            layer.seal()


def _send(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, which the host does not wait for."""
    if transfer.link.is_apart(device):
        table = transfer.link.pinned(table.shape, table.dtype).copy_(table)
    return transfer.link.send(table, device)


def _shifts_of(plan: BlendPlan) -> tuple[int, NDArray[np.int64]]:
    """The first column behind `plan.held` that moves, and by how much those from it on do, [batch, columns]."""
    shifts = np.zeros((len(plan.rows), plan.columns - plan.held), dtype=np.int64)
    for row, placed in enumerate(plan.placed):
        for piece in placed:
            shifts[row, piece.start - plan.held : piece.stop - plan.held] = piece.shift
    moving = np.flatnonzero(shifts.any(axis=0))
    first, stop = (int(moving[0]), int(moving[-1]) + 1) if len(moving) else (0, 0)
    return first, shifts[:, first:stop]


@dataclass(frozen=True, slots=True)
class _Part:
    """So many columns of a row, which a chunk has from its token `offset` on, or none has."""

    columns: int
    reader: LayerKVReader | None = None
    offset: int = 0

    def stored(self, idx: int) -> Piece | None:
        """Their K/V in a layer, [heads, columns, dim] each; None where no chunk has them."""
        if self.reader is None:
            return None
        piece = self.reader.layer(idx)
        assert piece is not None
        if piece[0].shape[1] == self.columns:
            return piece
        return tuple(kv.narrow(1, self.offset, self.columns) for kv in piece)


def _parts_of(placed: Sequence[Placed], plan: BlendPlan, readers: Mapping[bytes, LayerKVReader]) -> list[_Part]:
    """All columns of a row from `plan.held` on."""
    parts: list[_Part] = []
    done = plan.held
    for piece in placed:
        reader = readers[piece.chunk.key]
        parts += [_Part(piece.start - done), _Part(piece.stop - piece.start, reader, piece.offset)]
        done = piece.stop
    return [part for part in (*parts, _Part(plan.columns - done)) if part.columns]


def _zeros(columns: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(heads, columns, dim)
