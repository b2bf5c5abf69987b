"""Readers of the K/V that a plan takes from stored chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvboost_hf.cache.kv.blocks import Groups
from kvboost_hf.cache.kv.layer_kv import JoinedKVReader, LayerKVReader
from kvboost_hf.cache.layers.base import Piece
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, SavedState, Segment
from kvboost_hf.cache.store.chunk_store import StoredChunk, StoredStates

_JOINED = 16  # chunks at most: while they are copied together, they are on the device twice


class ColumnReader(Protocol):
    """Has K/V of consecutive tokens."""

    def layer(self, layer_idx: int, /) -> Piece | None:
        """The tensors of a layer, [heads, tokens, dim] each, or None if it keeps no columns."""


class Zeros:
    """Reads zeros, for columns that are computed when all others are in place.

    Args:
        like: Has tensors of the same shapes and types.
        tokens: How many there are at most.
    """

    def __init__(self, like: ColumnReader, tokens: int) -> None:
        self._like, self._tokens = like, tokens
        self._made: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._last: tuple[int, Piece | None] | None = None  # a layer is read for all rows before the next one

    def layer(self, layer_idx: int) -> Piece | None:
        """Zeros for each tensor of a layer, [heads, tokens, dim], or None if it keeps no columns."""
        if self._last is None or self._last[0] != layer_idx:
            like = self._like.layer(layer_idx)
            self._last = layer_idx, None if like is None else tuple([self._zeros(each) for each in like])
        return self._last[1]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        kind = like.dtype, like.device
        if kind not in self._made:
            self._made[kind] = torch.zeros((), dtype=like.dtype, device=like.device)
        return self._made[kind].expand(like.shape[0], self._tokens, like.shape[2])


@dataclass(frozen=True, slots=True)
class Span:
    """Row tokens [start, stop), which a reader has from row token `origin` on."""

    reader: ColumnReader
    origin: int
    start: int
    stop: int


Spans = Sequence[Sequence[Span]]  # of each row, in order


def spans_of(plan: ReusePlan, groups: Groups | None = None, *, zeros: bool = False) -> list[list[Span]]:
    """Readers for the segments of a plan whose chunks are loaded. Rows share the readers of chunks that they share.

    On a GPU, consecutive chunks that the same rows have are one span: its host takes longer to launch what there is to
    do for each chunk and layer than the GPU to do it.

    Args:
        plan: What comes from where.
        groups: How many tensors to move together: see `LayerKV.reader`.
        zeros: Have zeros between `plan.held` and `plan.filled` where no chunk serves.
    """
    readers: dict[tuple[bytes, ...], LayerKVReader | JoinedKVReader] = {}  # by the chunks that they read
    spans: list[list[Span]] = []
    for runs in _runs(plan):
        spans.append([])
        for run in runs:
            chunks = [each.chunk for each in run if isinstance(each.chunk, StoredChunk)]
            keys = tuple([chunk.prefix_key for chunk in chunks])
            if keys not in readers:
                own = [LayerKVReader(chunk.kv, groups) for chunk in chunks]
                readers[keys] = own[0] if len(own) == 1 else JoinedKVReader(own)
            spans[-1].append(Span(readers[keys], run[0].start - run[0].offset, run[0].start, run[-1].stop))
    if not zeros:
        return spans
    nothing = Zeros(next(iter(readers.values())), plan.filled)
    return [
        _with_zeros(row, nothing, plan.held - pad, plan.filled - pad)
        for row, pad in zip(spans, plan.pads, strict=True)
    ]


def _runs(plan: ReusePlan) -> list[list[list[Segment]]]:
    """The loaded segments of each row, those together that one reader can have."""
    rows = [
        [each for each in row.segments if isinstance(each.chunk, StoredChunk) and each.chunk.loaded is not None]
        for row in plan.rows
    ]
    first = next((each.chunk for row in rows for each in row), None)
    if not isinstance(first, StoredChunk) or not first.kv.can_follow(first.kv):
        return [[[each] for each in row] for row in rows]
    users: dict[bytes, list[int]] = {}  # of each chunk, the rows
    for number, row in enumerate(rows):
        for each in row:
            users.setdefault(each.chunk.prefix_key, []).append(number)
    joined: list[list[list[Segment]]] = []
    for row in rows:
        runs: list[list[Segment]] = []
        for each in row:
            if runs and len(runs[-1]) < _JOINED and _can_follow(each, runs[-1][-1], users):
                runs[-1].append(each)
            else:
                runs.append([each])
        joined.append(runs)
    return joined


def _can_follow(segment: Segment, last: Segment, users: Mapping[bytes, list[int]]) -> bool:
    """Whether one reader can have two segments of a row."""
    chunk, before = segment.chunk, last.chunk
    assert isinstance(chunk, StoredChunk)
    assert isinstance(before, StoredChunk)
    return (
        last.stop == segment.start
        and segment.offset == 0
        and last.to_end
        and users[before.prefix_key] == users[chunk.prefix_key]
        and chunk.kv.can_follow(before.kv)
    )


def _with_zeros(spans: Sequence[Span], zeros: Zeros, start: int, stop: int) -> list[Span]:
    """The spans of a row with zeros between them, from row token `start` to `stop`, padding left out."""
    found: list[Span] = []
    at = max(start, 0)
    for span in (*spans, Span(zeros, stop, stop, stop)):
        if at < span.start:
            found.append(Span(zeros, at, at, span.start))
        if span.start < span.stop:
            found.append(span)
        at = span.stop
    return found


def needed_for(plan: ReusePlan) -> list[StoredChunk | StoredStates]:
    """The chunks and states that must be loaded to carry out a plan."""
    found: list[StoredChunk | StoredStates] = []
    for row, (row_plan, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
        reach = plan.starts(row) - pad
        for segment in row_plan.segments:
            if segment.start < reach:
                assert isinstance(segment.chunk, StoredChunk)
                found.append(segment.chunk)
        if row_plan.states is None:
            continue
        # Where a state comes from the store, either the row or what is computed of it begins.
        at = {reach, *[stem.start for stem in plan.path(row)]}
        for point, saved in row_plan.states.items():
            if point in at:
                assert isinstance(saved, StoredStates)
                found.append(saved)
    return found


def with_loaded(plan: ReusePlan, loaded: Mapping[bytes, StoredChunk | StoredStates]) -> ReusePlan:
    """The plan with what is loaded, by key, in place of what was not."""
    rows: list[RowPlan] = []
    for row in plan.rows:
        segments = tuple(_with_chunk(segment, loaded) for segment in row.segments)
        states = row.states
        if states is not None:
            states = {at: _loaded_states(saved, loaded) for at, saved in states.items()}
        rows.append(replace(row, segments=segments, states=states))
    return replace(plan, rows=tuple(rows))


def _with_chunk(segment: Segment, loaded: Mapping[bytes, StoredChunk | StoredStates]) -> Segment:
    chunk = loaded.get(segment.chunk.prefix_key)
    return replace(segment, chunk=chunk) if isinstance(chunk, StoredChunk) else segment


def _loaded_states(saved: SavedState, loaded: Mapping[bytes, StoredChunk | StoredStates]) -> SavedState:
    assert isinstance(saved, StoredStates)
    found = loaded.get(saved.key)
    return found if isinstance(found, StoredStates) else saved


def pieces_of(spans: Sequence[Span], layer_idx: int, start: int, stop: int) -> list[Piece]:
    """K/V of a row's tokens [start, stop), as far as it has them, as pieces of what is stored."""
    pieces: list[Piece] = []
    for span, at, length in parts_of(spans, start, stop):
        piece = span.reader.layer(layer_idx)
        if piece is not None:
            whole = piece[0].shape[1] == length  # all of them have as many tokens
            pieces.append(piece if whole else tuple([kv.narrow(1, at, length) for kv in piece]))
    return pieces


def parts_of(spans: Sequence[Span], start: int, stop: int) -> list[tuple[Span, int, int]]:
    """The spans that have some of a row's tokens [start, stop): where these begin in the reader, and how many."""
    found: list[tuple[Span, int, int]] = []
    for span in spans:
        begin, end = max(span.start, start), min(span.stop, stop)
        if begin < end:
            found.append((span, begin - span.origin, end - begin))
    return found
