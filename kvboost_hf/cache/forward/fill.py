"""Puts the columns of a `ReusePlan` into the layers: from stored chunks, from other rows, and computed ahead."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvboost_hf import device_link
from kvboost_hf.cache.costs import pieces
from kvboost_hf.cache.forward.loading import Span, parts_of, pieces_of, spans_of
from kvboost_hf.cache.kv.layer_kv import LayerKVReader, Place, are_alike_in_place
from kvboost_hf.cache.kv.model_form import private_cache
from kvboost_hf.cache.layers.base import LayerState, Piece, ReuseLayer
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.growing_tensor import buffers_for
from kvboost_hf.cache.planning.chunks import Stem
from kvboost_hf.cache.planning.plan import ReusePlan
from kvboost_hf.cache.prompt.forward_call import ForwardInputs
from kvboost_hf.cache.prompt.token_log import take_positions
from kvboost_hf.cache.store.chunk_store import StoredStates
from kvboost_hf.compat import KeyRotation, Shifts, run_model

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
    """Append columns [plan.held, plan.filled) to every layer; what the store does not have is computed ahead.

    Args:
        model: Runs what the store does not have.
        layers: They hold `plan.held` columns.
        plan: What comes from where.
        inputs: The caller's arguments.
        first: The column of the first id in `inputs`.

    Returns:
        Tokens that had to be computed.
    """
    rows = Rows(layers, plan, spans_of(plan))
    computed = 0
    for group in plan.stems:
        parts = [Part(stem.rows[0], stem.start, stem.stop) for stem in group]
        ahead = compute(model, rows, inputs, first, parts)
        for stem in group:
            span = Span(StemReader(ahead, stem), stem.start, stem.start, stem.stop)
            for row in stem.rows:
                rows.spans[row].append(span)
        computed += sum(map(len, group))
    for column, group_rows in plan.cold_groups.items():
        parts = [Part(row, max(column - plan.pads[row], 0), plan.filled - plan.pads[row]) for row in group_rows]
        rows.cold |= dict.fromkeys(group_rows, compute(model, rows, inputs, first, parts))
        computed += sum(part.stop - part.start for part in parts)
    # A window may be shorter than what a chunk needs. Rows that were computed ahead have no more than their window.
    fill(rows, plan.filled if rows.cold else plan.last_border)
    return computed


@torch.no_grad()
def fill_turned(layers: Sequence[ReuseLayer], plan: ReusePlan, rotation: KeyRotation) -> None:
    """Append columns [plan.held, plan.filled) to every layer: zeros where no chunk serves, keys where they are now.

    Pieces are put in place as they are stored, and then all keys of a layer are turned at once: the operations on a
    device are so many for each layer, and so many for each piece, not for each piece of each layer.
    """
    with torch.inference_mode(False):
        first, shifts = _shifts_of(plan)
        turns = Shifts(rotation, shifts, _send)

        def turn(idx: int, keys: torch.Tensor) -> None:
            moved = keys[:, :, first : first + shifts.shape[1]]
            rotation.rotate(idx, moved, turns, out=moved)

        # Without shifts, they all stand where they stood, behind another text.
        fill(Rows(layers, plan, spans_of(plan, zeros=True)), plan.held, (rotation, turn) if shifts.size else None)


def fill(
    rows: "Rows", chunk_start: int, turning: tuple[KeyRotation, Callable[[int, torch.Tensor], None]] | None = None
) -> None:
    """Append columns [plan.held, plan.filled) to every layer, from what there is of each row.

    Args:
        rows: Have these columns.
        chunk_start: The column from which layers with a window are given them, if the window does not begin before.
        turning: Which tensor of each layer depends on positions, and what turns its new columns in place.
    """
    plan, layers = rows.plan, rows.layers
    done = _fill_together(rows) if not (turning or rows.cold or plan.held) else ()
    for idx, layer in enumerate(layers):
        if idx in done:
            continue
        start = max(plan.held, min(layer.needed_from(plan.filled), chunk_start)) if layer.is_sliding else plan.held
        pieces = [rows.pieces(row, idx, start - pad, plan.filled - pad) for row, pad in enumerate(plan.pads)]
        if any(pieces):
            turn = (turning[0].rotated(idx), partial(turning[1], idx)) if turning is not None else None
            layer.fill(start, plan.filled, pieces, turn)
        if layer.is_stateful:
            layer.load_states([rows.state(row, idx, plan.filled - pad) for row, pad in enumerate(plan.pads)])


def _send(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, which the host does not wait for."""
    if device_link.link.is_apart(device):
        table = device_link.link.pinned(table.shape, table.dtype).copy_(table)
    return device_link.link.send(table, device)


def _shifts_of(plan: ReusePlan) -> tuple[int, NDArray[np.int64]]:
    """The first column behind `plan.held` that moves, and by how much those from it on do, [batch, columns]."""
    shifts = np.zeros((len(plan.rows), plan.filled - plan.held), dtype=np.int64)
    for row, (own, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
        for segment in own.segments:
            if segment.moved:
                begin = segment.start + pad - plan.held
                shifts[row, begin : begin + segment.stop - segment.start] = segment.shift
    moving = np.flatnonzero(shifts.any(axis=0))
    first, stop = (int(moving[0]), int(moving[-1]) + 1) if len(moving) else (0, 0)
    return first, shifts[:, first:stop]


def _fill_together(rows: "Rows") -> set[int]:
    """Give layers that hold nothing their columns, many layers at once: a chunk has them in one tensor.

    Returns:
        The layers that have them now. There are none if chunks are not alike, or have to be moved, decoded or checked.
    """
    layers, plan, spans = rows.layers, rows.plan, rows.spans
    readers = {id(span.reader): span.reader for row in spans for span in row}.values()
    chunks = [reader.kv for reader in readers if isinstance(reader, LayerKVReader)]
    if not chunks or len(chunks) < len(readers) or not are_alike_in_place(chunks):
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
    for span, at, length in reversed(parts_of(spans, 0, stop - pad)):
        assert isinstance(span.reader, LayerKVReader)
        column -= length
        out.narrow(2, column, length).copy_(span.reader.kv.blocks[number].viewed(run).narrow(2, at, length))
    out.narrow(2, 0, column).zero_()


class Rows:
    """Has K/V and states of the rows of a batch up to `plan.filled`.

    Args:
        layers: They hold `plan.held` columns.
        plan: What comes from where.
        spans: What can be read of each row; more may be added.

    Attributes:
        cold: The rows that were computed up to there, whatever the store has of them.
    """

    def __init__(self, layers: Sequence[ReuseLayer], plan: ReusePlan, spans: list[list[Span]]) -> None:
        self.layers, self.plan, self.spans = layers, plan, spans
        self.cold: dict[int, Ahead] = {}

    def pieces(self, row: int, layer_idx: int, start: int, stop: int) -> list[Piece]:
        """Tokens [start, stop) of a row, without those that the layers hold."""
        if row not in self.cold:
            return pieces_of(self.spans[row], layer_idx, start, stop)
        found = self.cold[row].tokens(row, layer_idx, max(start, 0), stop)
        return [found] if found is not None else []

    def state(self, row: int, layer_idx: int, token: int) -> LayerState | None:
        """The state of a row at a token; where it was computed ahead, at the end of that."""
        if row in self.cold:
            return self.cold[row].state(row, layer_idx)
        plan = self.plan
        states = plan.rows[row].states
        if states is None:
            return None
        # Behind padding alone, a row has the state that it had at the last column that is held.
        if plan.held and (token <= 0 or token + plan.pads[row] == plan.held):
            return self.layers[layer_idx].save_state(row)
        if token <= 0:
            return None
        for span in self.spans[row]:
            if isinstance(span.reader, StemReader) and span.stop == token:
                return span.reader.state(layer_idx)
        saved = states[token]
        assert isinstance(saved, StoredStates)
        return saved.states.layer(layer_idx)

    def known(self, part: Part, layer_idx: int, start: int, stop: int) -> list[Piece]:
        """Tokens [start, stop) of a row, as far as it has them, those that the layers hold included."""
        pad, held, own = self.plan.pads[part.row], self.plan.held, self.layers[layer_idx]
        start = max(start, 0)
        known = pieces_of(self.spans[part.row], layer_idx, max(start, held - pad), stop)
        if start + pad < min(held, stop + pad):
            piece = own.columns(part.row, max(start + pad, own.first), min(held, stop + pad))
            return [piece, *known] if piece is not None else known
        return known


def compute(model: PreTrainedModel, of: Rows, inputs: ForwardInputs, first: int, parts: Sequence[Part]) -> Ahead:
    """Compute parts of rows, on top of what there is of these rows, in one forward (on a CPU, see `pieces`).

    Shorter parts have padding on the left. A part that begins behind other tokens is computed from a little further
    ahead where another one of the forward is longer.

    Args:
        model: The model.
        of: The rows; their layers are not changed.
        inputs: The caller's arguments.
        first: The column of the first id in `inputs`.
        parts: What to compute.
    """
    new, columns = max(part.stop - part.start for part in parts), max(part.stop for part in parts)
    group = [layer.fresh() for layer in of.layers]
    if columns > new:
        for idx, layer in enumerate(group):
            start = layer.needed_from(columns - new)
            known = [of.known(part, idx, start - (columns - part.stop), part.stop - new) for part in parts]
            if any(known):
                layer.fill(start, columns - new, known)
            if layer.is_stateful:
                layer.load_states([of.state(part.row, idx, part.stop - new) for part in parts])
    device = inputs.input_ids.device
    rows = torch.tensor([[part.row] for part in parts], device=device)
    stops = torch.tensor([[part.stop] for part in parts], device=device)
    pads = torch.tensor([[of.plan.pads[part.row]] for part in parts], device=device)
    tokens = stops - new + torch.arange(new, device=device)
    at = torch.where(tokens < 0, 0, tokens + pads - first)
    mask = torch.arange(columns, device=device) >= columns - stops
    cuts = pieces(columns - new, columns) if columns > new and device.type == "cpu" else []
    for start, stop in pairwise([columns - new, *cuts, columns]):
        part_of = slice(start - (columns - new), stop - (columns - new))
        _run(model, group, inputs, rows, at[:, part_of], mask[:, :stop])
    return Ahead(group, parts)


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
        mask: The mask over all columns, [k, columns], if the call has one.
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
        plan: What was to be served.
        inputs: The caller's arguments.
        first: The column of the first id in `inputs`.
    """
    parts = [Part(row, max(plan.held - pad, 0), plan.filled - pad) for row, pad in enumerate(plan.pads)]
    ahead = compute(model, Rows(layers, plan, [[] for _ in plan.rows]), inputs, first, parts)
    found: list[list[Piece]] = []
    for idx in range(len(layers)):
        pieces = [ahead.tokens(part.row, idx, part.start, part.stop) for part in parts]
        found.append([piece for piece in pieces if piece is not None])
    return found
