"""Which stored chunks have the columns of each row of a plan, and who reads them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

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


@dataclass(frozen=True, slots=True)
class Span:
    """Row tokens [start, stop), which a reader has from row token `origin` on."""

    reader: ColumnReader
    origin: int
    start: int
    stop: int


Spans = Sequence[Sequence[Span]]  # of each row, in order


def spans_of(plan: ReusePlan, groups: Groups | None = None) -> list[list[Span]]:
    """Readers for the segments of a plan whose chunks are loaded. Rows share the readers of chunks that they share.

    On a GPU, consecutive chunks that the same rows have are one span: its host takes longer to launch what there is to
    do for each chunk and layer than the GPU to do it.

    Args:
        plan: What comes from where.
        groups: See `LayerKV.reader`.
    """
    users: dict[bytes, list[int]] = {}  # of each chunk, the rows
    for number, row in enumerate(plan.rows):
        for segment in row.segments:
            users.setdefault(stored_chunk(segment).key, []).append(number)
    readers: dict[tuple[bytes, ...], LayerKVReader | JoinedKVReader] = {}  # by the chunks that they read
    spans: list[list[Span]] = []
    for row in plan.rows:
        spans.append([])
        for run in _runs([each for each in row.segments if stored_chunk(each).loaded is not None], users):
            keys = tuple(stored_chunk(segment).key for segment in run)
            if keys not in readers:
                own = [stored_chunk(segment).kv.reader(groups) for segment in run]
                readers[keys] = own[0] if len(own) == 1 else JoinedKVReader(own)
            spans[-1].append(Span(readers[keys], run[0].origin, run[0].start, run[-1].stop))
    return spans


def _runs(segments: Sequence[Segment], users: Mapping[bytes, list[int]]) -> list[list[Segment]]:
    """Segments that one reader can have, together."""
    runs: list[list[Segment]] = []
    for segment in segments:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and len(runs[-1]) < _JOINED
            and last.stop == segment.start == segment.origin
            and last.stop - last.origin == len(stored_chunk(last).tokens)
            and users[stored_chunk(last).key] == users[stored_chunk(segment).key]
            and stored_chunk(segment).kv.can_follow(stored_chunk(last).kv)
        ):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


def needed_for(plan: ReusePlan) -> list[StoredChunk | StoredStates]:
    """The chunks and states that must be loaded to carry out a plan."""
    found: list[StoredChunk | StoredStates] = []
    for row, (row_plan, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
        reach = plan.starts(row) - pad
        found += [stored_chunk(segment) for segment in row_plan.segments if segment.start < reach]
        # Where a state comes from the store, either the row or what is computed of it begins.
        at = {reach, *(stem.start for stem in plan.path(row))}
        for saved in [saved for point, saved in (row_plan.states or {}).items() if point in at]:
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
    chunk = loaded.get(stored_chunk(segment).key)
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


def parts_of(spans: Sequence[Span], start: int, stop: int) -> Iterator[tuple[Span, int, int]]:
    """The spans that have some of a row's tokens [start, stop): where these begin in the reader, and how many."""
    for span in spans:
        begin, end = max(span.start, start), min(span.stop, stop)
        if begin < end:
            yield span, begin - span.origin, end - begin


def stored_chunk(segment: Segment) -> StoredChunk:
    """The chunk that serves a segment of a plan made from a store."""
    assert isinstance(segment.chunk, StoredChunk)
    return segment.chunk
