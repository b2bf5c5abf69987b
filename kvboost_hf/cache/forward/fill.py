"""Puts the columns of a `ReusePlan` into the layers: from stored chunks, from other rows, and computed ahead."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvboost_hf import device_link
from kvboost_hf.cache.costs import pieces
from kvboost_hf.cache.forward.ahead import Ahead, Part, StemReader, run_behind
from kvboost_hf.cache.kv import StoredChunk, StoredStates
from kvboost_hf.cache.kv.layer_kv import (
    ColumnReader,
    Groups,
    JoinedKVReader,
    LayerKV,
    LayerKVReader,
    Place,
    Zeros,
    are_alike_in_place,
)
from kvboost_hf.cache.layers.base import LayerState, Piece, ReuseLayer
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.growing_tensor import buffers_for
from kvboost_hf.cache.planning.plan import ReusePlan, Segment
from kvboost_hf.cache.prompt import ForwardInputs
from kvboost_hf.compat import KeyRotation, Shifts

_JOINED = 16  # chunks at most: while they are copied together, they are on the device twice
_TOGETHER_BYTES = 2**24  # of the buffers that are made together: larger ones are new to the process each time


@dataclass(frozen=True, slots=True)
class Span:
    """Row tokens [start, stop), which a reader has from row token `origin` on."""

    reader: ColumnReader
    origin: int
    start: int
    stop: int


Spans = Sequence[Sequence[Span]]  # of each row, in order
_Loaded = tuple[Segment, bytes, LayerKV]  # with the key and the K/V of its chunk
_KEY = itemgetter(1)


def spans_of(plan: ReusePlan, groups: Groups | None = None, *, zeros: bool = False) -> list[list[Span]]:
    """Readers for the segments of a plan whose chunks are loaded; rows with the same chunks have the same readers.

    On a GPU, consecutive chunks that the same rows have are one span: its host takes longer to launch what there is to
    do for each chunk and layer than the GPU to do it. With `zeros`, there are zeros between `plan.held` and
    `plan.filled` where no chunk serves.
    """
    readers: dict[tuple[bytes, ...], LayerKVReader | JoinedKVReader] = {}  # by the chunks that they read
    spans: list[list[Span]] = []
    for runs in _runs(plan):
        own: list[Span] = []
        for run in runs:
            keys = tuple(map(_KEY, run))
            if keys not in readers:
                one = LayerKVReader(run[0][2], groups) if len(run) == 1 else None
                readers[keys] = one or JoinedKVReader([kv for *_, kv in run], groups)
            first, last = run[0][0], run[-1][0]
            own.append(Span(readers[keys], first.start - first.offset, first.start, last.stop))
        spans.append(own)
    if not zeros:
        return spans
    nothing = Zeros(next(iter(readers.values())), plan.filled)
    return [
        _with_zeros(row, nothing, plan.held - pad, plan.filled - pad)
        for row, pad in zip(spans, plan.pads, strict=True)
    ]


def _runs(plan: ReusePlan) -> list[list[list[_Loaded]]]:
    """The loaded segments of each row, those together that one reader can have."""
    rows: list[list[_Loaded]] = []
    for row in plan.rows:
        rows.append([])
        for segment in row.segments:
            chunk = segment.chunk
            if isinstance(chunk, StoredChunk) and chunk.loaded is not None:
                rows[-1].append((segment, chunk.key, chunk.loaded))
    some = next((kv for own in rows for *_, kv in own), None)
    if some is None or not some.can_follow(some):
        return [[[each] for each in own] for own in rows]
    users: dict[bytes, list[int]] = {}  # of each chunk, the rows
    for number, own in enumerate(rows):
        for _, key, _ in own:
            users.setdefault(key, []).append(number)
    joined: list[list[list[_Loaded]]] = []
    for own in rows:
        runs: list[list[_Loaded]] = []
        for each in own:
            if runs and len(runs[-1]) < _JOINED and _can_follow(each, runs[-1][-1], users):
                runs[-1].append(each)
            else:
                runs.append([each])
        joined.append(runs)
    return joined


def _can_follow(this: _Loaded, last: _Loaded, users: Mapping[bytes, list[int]]) -> bool:
    """Whether one reader can have two segments of a row."""
    (segment, key, kv), (before, key_before, kv_before) = this, last
    return (
        before.stop == segment.start
        and segment.offset == 0
        and before.to_end
        and users[key_before] == users[key]
        and kv.can_follow(kv_before)
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


def fill_layers(
    model: PreTrainedModel, layers: Sequence[ReuseLayer], plan: ReusePlan, inputs: ForwardInputs, first: int
) -> int:
    """Append columns [plan.held, plan.filled) to every layer; what the store does not have is computed ahead.

    The ids of `inputs` begin at column `first`. Returns how many tokens had to be computed.
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

    Layers with a window are given them from `chunk_start` on, if the window does not begin before. `turning` tells
    which tensor of each layer depends on positions, and turns its new columns in place.
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

    Returns the layers that have them now: none if chunks are not alike, or have to be moved, decoded or checked.
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
    """Has K/V and states of the rows of a batch up to `plan.filled`; the layers hold `plan.held` columns.

    `spans` can be read of each row, and more may be added. The rows in `cold` were computed up to there, whatever the
    store has of them.
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
        begin, end = max(start + pad, own.first), min(held, stop + pad)
        piece = own.columns(part.row, begin, end) if begin < end else None
        return [piece, *known] if piece is not None else known


def compute(model: PreTrainedModel, of: Rows, inputs: ForwardInputs, first: int, parts: Sequence[Part]) -> Ahead:
    """Compute parts of rows, on top of what there is of these rows, in one forward (on a CPU, see `pieces`).

    Shorter parts have padding on the left. A part that begins behind other tokens is computed from a little further
    ahead where another one of the forward is longer. The layers of the rows are not changed; the ids of `inputs` begin
    at column `first`.
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
        run_behind(model, group, inputs, rows, at[:, part_of], mask[:, :stop])
    return Ahead(group, parts)


def compute_columns(
    model: PreTrainedModel, layers: Sequence[ReuseLayer], plan: ReusePlan, inputs: ForwardInputs, first: int
) -> list[list[Piece]]:
    """Compute columns [plan.held, plan.filled) of every row; returns them for each layer, for each row.

    The layers hold `plan.held` columns, and are not changed; the ids of `inputs` begin at column `first`.
    """
    parts = [Part(row, max(plan.held - pad, 0), plan.filled - pad) for row, pad in enumerate(plan.pads)]
    ahead = compute(model, Rows(layers, plan, [[] for _ in plan.rows]), inputs, first, parts)
    found: list[list[Piece]] = []
    for idx in range(len(layers)):
        pieces = [ahead.tokens(part.row, idx, part.start, part.stop) for part in parts]
        found.append([piece for piece in pieces if piece is not None])
    return found


def chunks_of(plan: ReusePlan) -> list[StoredChunk]:
    """All chunks of a plan, each once."""
    chunks = [segment.chunk for row in plan.rows for segment in row.segments]
    return list({chunk.key: chunk for chunk in chunks if isinstance(chunk, StoredChunk)}.values())
