"""Carrying out a `ReusePlan`: stored K/V into the layers, and rows that lag behind through the model first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.kv.blocks import Groups
from kvboost_hf.cache.kv.layer_kv import JoinedKVReader, LayerKVReader
from kvboost_hf.cache.layers.base import LayerState, Piece, ReuseLayer
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, SavedState, Segment
from kvboost_hf.cache.prompt.inputs import ForwardInputs
from kvboost_hf.cache.prompt.positions import take_positions
from kvboost_hf.cache.store.chunk_store import StoredChunk, StoredStates
from kvboost_hf.compat import PrivateCache, cache_argument

_JOINED = 16  # chunks at most: while they are copied together, they are on the device twice


@dataclass(frozen=True, slots=True)
class Span:
    """Row tokens [start, stop), which a reader has from row token `origin` on."""

    reader: LayerKVReader | JoinedKVReader
    origin: int
    start: int
    stop: int


Spans = Sequence[Sequence[Span]]  # of each row, in order


def fill_layers(
    model: PreTrainedModel, layers: Sequence[ReuseLayer], plan: ReusePlan, inputs: ForwardInputs, first: int
) -> int:
    """Append columns [plan.held, plan.filled) to every layer.

    Args:
        model: Runs the rows whose stored prefix is shorter.
        layers: They hold `plan.held` columns.
        plan: What comes from where.
        inputs: The caller's arguments.
        first: The column of the first id in `inputs`.

    Returns:
        Tokens that had to be computed.
    """
    spans = spans_of(plan)
    computed = 0
    ahead: dict[int, _Ahead] = {}
    for column, rows in plan.cold_groups.items():
        group, base = _prefill(model, layers, plan, spans, inputs, first, column, rows)
        ahead |= {row: _Ahead(group, at, base) for at, row in enumerate(rows)}
        computed += sum(plan.filled - max(column, plan.pads[row]) for row in rows)
    # A window may be shorter than what a chunk needs. Rows that were computed ahead have no more than their window.
    chunk_start = plan.filled if ahead else plan.last_border
    for idx, layer in enumerate(layers):
        start = max(plan.held, min(layer.needed_from(plan.filled), chunk_start))
        pieces: list[list[Piece]] = []
        states: list[LayerState | None] = []
        for row, (row_plan, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
            if row in ahead:
                found = ahead[row].columns(idx, start, plan.filled)
                pieces.append([found] if found is not None else [])
                states.append(ahead[row].state(idx))
            else:
                pieces.append(pieces_of(spans[row], idx, start - pad, plan.filled - pad))
                states.append(_state(row_plan, idx, plan.filled - pad))
        if any(pieces):
            layer.fill(start, plan.filled, pieces)
        if layer.is_stateful:
            layer.load_states(states)
    return computed


def spans_of(plan: ReusePlan, groups: Groups | None = None) -> Spans:
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
        saved = (row_plan.states or {}).get(reach)
        if saved is not None:
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


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A row that was computed ahead: in which layers, as which row of them, and the column that they begin at."""

    layers: Sequence[ReuseLayer]
    row: int
    base: int

    def columns(self, layer_idx: int, start: int, stop: int) -> Piece | None:
        """Columns [start, stop), or fewer: padding in front may be missing."""
        layer = self.layers[layer_idx]
        return layer.columns(self.row, max(start - self.base, layer.first), stop - self.base)

    def state(self, layer_idx: int) -> LayerState | None:
        """The state at the end."""
        return self.layers[layer_idx].save_state(self.row)


def run_ahead(
    model: PreTrainedModel,
    layers: Sequence[ReuseLayer],
    inputs: ForwardInputs,
    rows: Sequence[int],
    columns: slice,
    first: int,
    mask_from: int = 0,
) -> None:
    """Compute columns of some rows, ahead of the forward that the caller asked for.

    Args:
        model: The model.
        layers: They hold what comes before, of exactly these rows.
        inputs: The caller's arguments.
        rows: Which rows of them.
        columns: Which columns.
        first: The column of the first id in `inputs`.
        mask_from: The column of the first one in `layers`.
    """
    at = torch.tensor(rows, device=inputs.input_ids.device)
    new = slice(columns.start - first, columns.stop - first)
    part: dict[str, Any] = {"input_ids": inputs.input_ids[at, new]}
    if inputs.attention_mask is not None:
        part["attention_mask"] = inputs.attention_mask[at, mask_from : columns.stop]
    if inputs.position_ids is not None:
        part["position_ids"] = take_positions(inputs.position_ids, at, len(inputs.input_ids), new)
    cache = PrivateCache([layer.native for layer in layers])
    model(**part, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)


def compute_columns(
    model: PreTrainedModel, layers: Sequence[ReuseLayer], plan: ReusePlan, inputs: ForwardInputs, first: int
) -> list[list[Piece]]:
    """Compute columns [plan.held, plan.filled) of every row; returns them for each layer, for each row.

    Args:
        model: The model.
        layers: They hold `plan.held` columns, and are not changed.
        plan: Of what was to be served.
        inputs: The caller's arguments.
        first: The column of the first id in `inputs`.
    """
    rows = list(range(len(plan.rows)))
    group, base = _prefill(model, layers, plan, [[]] * len(rows), inputs, first, plan.held, rows)
    found: list[list[Piece]] = []
    for idx in range(len(layers)):
        ahead = [_Ahead(group, at, base).columns(idx, plan.held, plan.filled) for at in rows]
        found.append([piece for piece in ahead if piece is not None])
    return found


def _prefill(
    model: PreTrainedModel,
    layers: Sequence[ReuseLayer],
    plan: ReusePlan,
    spans: Spans,
    inputs: ForwardInputs,
    first: int,
    column: int,
    rows: list[int],
) -> tuple[list[ReuseLayer], int]:
    """Compute columns [column, filled) of `rows` on top of what the layers and the store have of them.

    Returns:
        Layers that hold the rows, and the column that they begin at.
    """
    group = [layer.fresh() for layer in layers]
    starts_empty = all(plan.pads[row] >= column for row in rows)  # all that is before is padding
    if not starts_empty:
        for idx, (layer, own) in enumerate(zip(group, layers, strict=True)):
            start = layer.needed_from(column)
            pieces: list[list[Piece]] = []
            for row in rows:
                pad = plan.pads[row]
                found = pieces_of(spans[row], idx, max(start, plan.held) - pad, column - pad)
                held = own.columns(row, max(start, own.first), plan.held) if plan.held > start else None
                pieces.append([held, *found] if held is not None else found)
            if any(pieces):
                layer.fill(start, column, pieces)
            if layer.is_stateful:
                layer.load_states(
                    [
                        own.save_state(row)
                        if column == plan.held
                        else _state(plan.rows[row], idx, column - plan.pads[row])
                        for row in rows
                    ]
                )
    base = column if starts_empty else 0
    run_ahead(model, group, inputs, rows, slice(column, plan.filled), first, base)
    return group, base


def pieces_of(spans: Sequence[Span], layer_idx: int, start: int, stop: int) -> list[Piece]:
    """K/V of a row's tokens [start, stop), as far as it has them, as pieces of what is stored."""
    pieces: list[Piece] = []
    for span in spans:
        begin, end = max(span.start, start), min(span.stop, stop)
        if begin < end:
            piece = span.reader.layer(layer_idx)
            if piece is not None:
                at, length = begin - span.origin, end - begin
                whole = piece[0].shape[1] == length  # all of them have as many tokens
                pieces.append(piece if whole else tuple([kv.narrow(1, at, length) for kv in piece]))
    return pieces


def _state(plan: RowPlan, layer_idx: int, at: int) -> LayerState | None:
    if plan.states is None:
        return None
    saved = plan.states[at]
    assert isinstance(saved, StoredStates)
    return saved.states.layers[layer_idx]


def stored_chunk(segment: Segment) -> StoredChunk:
    """The chunk that serves a segment of a plan made from a store."""
    assert isinstance(segment.chunk, StoredChunk)
    return segment.chunk
