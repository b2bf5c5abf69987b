"""Carrying out a `ReusePlan`: stored K/V into the layers; what several rows begin with, and rows that lag behind,
through the model first.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.costs import pieces
from kvboost_hf.cache.forward.spans import Span, Spans, parts_of, pieces_of, spans_of
from kvboost_hf.cache.kv.layer_kv import LayerKVReader, Place
from kvboost_hf.cache.layers.base import LayerState, Piece, ReuseLayer
from kvboost_hf.cache.layers.choose import private_cache
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.growing_tensor import buffers_for
from kvboost_hf.cache.planning.plan import ReusePlan
from kvboost_hf.cache.planning.stems import Stem
from kvboost_hf.cache.prompt.inputs import ForwardInputs
from kvboost_hf.cache.prompt.positions import take_positions
from kvboost_hf.cache.store.chunk_store import StoredStates
from kvboost_hf.compat import run_model

_TOGETHER_BYTES = 2**24  # of the buffers that are made together: larger ones are new to the process each time


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
    done = _fill_together(layers, plan, source.spans) if not (cold or plan.held) else set()
    for idx, layer in enumerate(layers):
        if idx in done:
            continue
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


def _fill_together(layers: Sequence[ReuseLayer], plan: ReusePlan, spans: Spans) -> set[int]:
    """Give layers that hold nothing their columns, many layers at once: a chunk has them in one tensor.

    Returns:
        The layers that have them now. There are none if chunks are not alike, or have to be moved, decoded or checked.
    """
    readers = {id(span.reader): span.reader for row in spans for span in row}.values()
    chunks = [reader.kv for reader in readers if isinstance(reader, LayerKVReader) and reader.kv.is_read_in_place]
    if not chunks or len(chunks) < len(readers) or not all(kv.is_like(chunks[0]) for kv in chunks[1:]):
        return set()
    blocks, places = chunks[0].blocks, chunks[0].places
    taking: dict[int, GrowingLayer] = {}
    for idx, layer in enumerate(layers):
        if isinstance(layer, GrowingLayer) and places[idx] and layer.can_take(blocks[0].device):
            taking[idx] = layer
    tensors = Counter(number for idx in taking for number, _ in places[idx] or ())
    buffers: dict[Place, torch.Tensor] = {}
    for number, block in enumerate(blocks):
        if tensors[number] == len(block.rotations):  # else other layers have a part of it
            heads, _, dim = block.shape
            shape = (len(spans), heads, plan.filled, dim)
            for run, made in buffers_for(len(block.rotations), shape, block.dtype, block.device, _TOGETHER_BYTES):
                for row, (own, pad) in enumerate(zip(spans, plan.pads, strict=True)):
                    _copy(made[:, row], own, number, run, pad, plan.filled)
                # Each counts its own writes.
                buffers |= {(number, at): buffer.data for at, buffer in zip(run, made.unbind(0), strict=True)}
    for idx in list(taking):
        own_buffers = [buffers[place] for place in places[idx] or () if place in buffers]
        if len(own_buffers) == len(places[idx] or ()):
            taking[idx].take(own_buffers, plan.filled)
        else:
            del taking[idx]
    return set(taking)


def _copy(out: torch.Tensor, spans: Sequence[Span], number: int, run: range, pad: int, stop: int) -> None:
    """Copy a row's columns up to `stop` of some tensors of a block to [tensors, heads, columns, dim]; zeros before."""
    column = stop
    for span, at, length in reversed(list(parts_of(spans, 0, stop - pad))):
        assert isinstance(span.reader, LayerKVReader)
        column -= length
        out.narrow(2, column, length).copy_(span.reader.kv.blocks[number].move(run).narrow(2, at, length))
    out.narrow(2, 0, column).zero_()


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
        if states is None:
            return None
        # Behind padding alone, a row has the state that it had at the last column that is held.
        if plan.held and (token <= 0 or token + plan.pads[row] == plan.held):
            return self._layers[layer_idx].save_state(row)
        if token <= 0:
            return None
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
    positions = inputs.position_ids
    if mask is not None:
        mask = mask.to(inputs.attention_mask.dtype) if inputs.attention_mask is not None else None
    run_model(
        model,
        inputs.input_ids[rows, at],
        private_cache(layers),
        attention_mask=mask,
        position_ids=take_positions(positions, len(inputs.input_ids), rows, at) if positions is not None else None,
    )


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
