"""Carrying out a `ReusePlan`: stored K/V into the layers; what several rows begin with, and rows that lag behind,
through the model first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.costs.prompt_costs import pieces
from kvboost_hf.cache.kv.blocks import Groups
from kvboost_hf.cache.kv.layer_kv import JoinedKVReader, LayerKVReader
from kvboost_hf.cache.layers.base import LayerState, Piece, ReuseLayer
from kvboost_hf.cache.layers.hidden_states import private_cache
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, SavedState, Segment
from kvboost_hf.cache.planning.stems import Stem
from kvboost_hf.cache.prompt.inputs import ForwardInputs, without_router_logits
from kvboost_hf.cache.prompt.positions import take_positions
from kvboost_hf.cache.store.chunk_store import StoredChunk, StoredStates
from kvboost_hf.compat import cache_argument

_JOINED = 16  # chunks at most: while they are copied together, they are on the device twice


@dataclass(frozen=True, slots=True)
class Part:
    """Row tokens [start, stop) that are computed ahead."""

    row: int
    start: int
    stop: int


class Ahead:
    """Rows that were computed ahead, in layers of their own. All of them end at the same column.

    Args:
        layers: They hold the rows.
        parts: What was computed of each row, in order.
    """

    def __init__(self, layers: Sequence[ReuseLayer], parts: Sequence[Part]) -> None:
        self._layers = layers
        self._columns = max(part.stop for part in parts)
        self._at = {part.row: number for number, part in enumerate(parts)}
        self._stops = {part.row: part.stop for part in parts}

    def tokens(self, row: int, layer_idx: int, start: int, stop: int) -> Piece | None:
        """Tokens [start, stop) of a row, or fewer: a layer may not hold the first ones."""
        layer, padding = self._layers[layer_idx], self._columns - self._stops[row]
        return layer.columns(self._at[row], max(start + padding, layer.first), stop + padding)

    def state(self, row: int, layer_idx: int) -> LayerState | None:
        """The state of a row at its end."""
        return self._layers[layer_idx].save_state(self._at[row])


class StemReader:
    """Reads a stem where it was computed, as a `LayerKVReader` reads a chunk.

    Args:
        ahead: Where it was computed.
        stem: The stem.
    """

    def __init__(self, ahead: Ahead, stem: Stem) -> None:
        self._ahead, self._stem = ahead, stem
        self._pieces: dict[int, Piece | None] = {}  # rows that share a piece are given the same views

    def layer(self, layer_idx: int) -> Piece | None:
        """Its columns in a layer, or None if the layer keeps none."""
        if layer_idx not in self._pieces:
            stem = self._stem
            self._pieces[layer_idx] = self._ahead.tokens(stem.rows[0], layer_idx, stem.start, stem.stop)
        return self._pieces[layer_idx]

    def state(self, layer_idx: int) -> LayerState | None:
        """The state of a layer behind it."""
        return self._ahead.state(self._stem.rows[0], layer_idx)


@dataclass(frozen=True, slots=True)
class Span:
    """Row tokens [start, stop), which a reader has from row token `origin` on."""

    reader: LayerKVReader | JoinedKVReader | StemReader
    origin: int
    start: int
    stop: int


Spans = Sequence[Sequence[Span]]  # of each row, in order


def fill_layers(
    model: PreTrainedModel, layers: Sequence[ReuseLayer], plan: ReusePlan, inputs: ForwardInputs, first: int
) -> int:
    """Append columns [plan.held, plan.filled) to every layer.

    Args:
        model: Runs what the store does not have.
        layers: They hold `plan.held` columns.
        plan: What comes from where.
        inputs: The caller's arguments.
        first: The column of the first id in `inputs`.

    Returns:
        Tokens that had to be computed.
    """
    source = _Source(model, layers, plan, spans_of(plan), inputs, first)
    computed = 0
    for group in plan.stems:
        parts = [Part(stem.rows[0], stem.start, stem.stop) for stem in group]
        ahead = source.compute(parts)
        for stem in group:
            span = Span(StemReader(ahead, stem), stem.start, stem.start, stem.stop)
            for row in stem.rows:
                source.spans[row].append(span)
        computed += sum(map(len, group))
    cold: dict[int, Ahead] = {}
    for column, rows in plan.cold_groups.items():
        parts = [Part(row, max(column - plan.pads[row], 0), plan.filled - plan.pads[row]) for row in rows]
        ahead = source.compute(parts)
        cold |= dict.fromkeys(rows, ahead)
        computed += sum(part.stop - part.start for part in parts)
    # A window may be shorter than what a chunk needs. Rows that were computed ahead have no more than their window.
    chunk_start = plan.filled if cold else plan.last_border
    for idx, layer in enumerate(layers):
        start = max(plan.held, min(layer.needed_from(plan.filled), chunk_start))
        pieces: list[list[Piece]] = []
        states: list[LayerState | None] = []
        for row, pad in enumerate(plan.pads):
            if row in cold:
                found = cold[row].tokens(row, idx, max(start - pad, 0), plan.filled - pad)
                pieces.append([found] if found is not None else [])
                states.append(cold[row].state(row, idx))
            else:
                pieces.append(pieces_of(source.spans[row], idx, start - pad, plan.filled - pad))
                states.append(source.state(row, idx, plan.filled - pad))
        if any(pieces):
            layer.fill(start, plan.filled, pieces)
        if layer.is_stateful:
            layer.load_states(states)
    return computed


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


class _Source:
    """Has, or computes, K/V of the rows of a batch up to `plan.filled`.

    Args:
        model: Runs what is to be computed.
        layers: They hold `plan.held` columns, and are not changed.
        plan: What comes from where.
        spans: Of each row, what can be read; more may be added.
        inputs: The caller's arguments.
        first: The column of the first id in `inputs`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[ReuseLayer],
        plan: ReusePlan,
        spans: list[list[Span]],
        inputs: ForwardInputs,
        first: int,
    ) -> None:
        self.spans = spans
        self._model, self._layers, self._plan, self._inputs, self._first = model, layers, plan, inputs, first

    def compute(self, parts: Sequence[Part]) -> Ahead:
        """Compute parts of rows, on top of what there is of these rows, in one forward (on a CPU, see `pieces`).

        Shorter parts have padding on the left. A part that begins behind other tokens is computed from a little
        further ahead where another one of the forward is longer.
        """
        new, columns = max(part.stop - part.start for part in parts), max(part.stop for part in parts)
        group = [layer.fresh() for layer in self._layers]
        if columns > new:
            for idx, layer in enumerate(group):
                start = layer.needed_from(columns - new)
                known = [self._known(part, idx, start - (columns - part.stop), part.stop - new) for part in parts]
                if any(known):
                    layer.fill(start, columns - new, known)
                if layer.is_stateful:
                    layer.load_states([self.state(part.row, idx, part.stop - new) for part in parts])
        device = self._inputs.input_ids.device
        rows = torch.tensor([[part.row] for part in parts], device=device)
        stops = torch.tensor([[part.stop] for part in parts], device=device)
        pads = torch.tensor([[self._plan.pads[part.row]] for part in parts], device=device)
        tokens = stops - new + torch.arange(new, device=device)
        at = torch.where(tokens < 0, 0, tokens + pads - self._first)
        mask = torch.arange(columns, device=device) >= columns - stops
        cuts = pieces(columns - new, columns) if columns > new and device.type == "cpu" else []
        for start, stop in pairwise([columns - new, *cuts, columns]):
            part_of = slice(start - (columns - new), stop - (columns - new))
            _run(self._model, group, self._inputs, rows, at[:, part_of], mask[:, :stop])
        return Ahead(group, parts)

    def state(self, row: int, layer_idx: int, token: int) -> LayerState | None:
        """The state of a row at a token."""
        plan = self._plan
        states = plan.rows[row].states
        if states is None or token <= 0:
            return None
        if token + plan.pads[row] == plan.held:
            return self._layers[layer_idx].save_state(row)
        for span in self.spans[row]:
            if isinstance(span.reader, StemReader) and span.stop == token:
                return span.reader.state(layer_idx)
        saved = states[token]
        assert isinstance(saved, StoredStates)
        return saved.states.layers[layer_idx]

    def _known(self, part: Part, layer_idx: int, start: int, stop: int) -> list[Piece]:
        """Tokens [start, stop) of a row, as far as it has them."""
        pad, held, own = self._plan.pads[part.row], self._plan.held, self._layers[layer_idx]
        start = max(start, 0)
        known = pieces_of(self.spans[part.row], layer_idx, max(start, held - pad), stop)
        if start + pad < min(held, stop + pad):
            piece = own.columns(part.row, max(start + pad, own.first), min(held, stop + pad))
            return [piece, *known] if piece is not None else known
        return known


def run_ahead(
    model: PreTrainedModel, layers: Sequence[ReuseLayer], inputs: ForwardInputs, columns: slice, first: int
) -> None:
    """Compute columns of all rows, ahead of the forward that the caller asked for.

    Args:
        model: The model.
        layers: They hold what comes before.
        inputs: The caller's arguments.
        columns: Which columns.
        first: The column of the first id in `inputs`.
    """
    rows = torch.arange(len(inputs.input_ids), device=inputs.input_ids.device)[:, None]
    at = torch.arange(columns.start - first, columns.stop - first, device=rows.device).expand(len(rows), -1)
    mask = inputs.attention_mask[:, : columns.stop] if inputs.attention_mask is not None else None
    _run(model, layers, inputs, rows, at, mask)


def _run(
    model: PreTrainedModel,
    layers: Sequence[ReuseLayer],
    inputs: ForwardInputs,
    rows: torch.Tensor,
    at: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Compute the ids `at` [k, m] of `rows` [k, 1] of a call, behind what the layers hold.

    Args:
        model: The model.
        layers: They hold the same rows.
        inputs: The arguments of the call.
        rows: Which rows of it.
        at: Which of the ids of each row.
        mask: Of all columns, [k, columns], if the call has one.
    """
    part: dict[str, Any] = {"input_ids": inputs.input_ids[rows, at], **without_router_logits(model, {})}
    if inputs.attention_mask is not None and mask is not None:
        part["attention_mask"] = mask.to(inputs.attention_mask.dtype)
    if inputs.position_ids is not None:
        part["position_ids"] = take_positions(inputs.position_ids, len(inputs.input_ids), rows, at)
    model(**part, **{cache_argument(model): private_cache(layers)}, use_cache=True, logits_to_keep=1)


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
    source = _Source(model, layers, plan, [[] for _ in plan.rows], inputs, first)
    parts = [Part(row, max(plan.held - pad, 0), plan.filled - pad) for row, pad in enumerate(plan.pads)]
    ahead = source.compute(parts)
    found: list[list[Piece]] = []
    for idx in range(len(layers)):
        pieces = [ahead.tokens(part.row, idx, part.start, part.stop) for part in parts]
        found.append([piece for piece in pieces if piece is not None])
    return found


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


def stored_chunk(segment: Segment) -> StoredChunk:
    """The chunk that serves a segment of a plan made from a store."""
    assert isinstance(segment.chunk, StoredChunk)
    return segment.chunk
