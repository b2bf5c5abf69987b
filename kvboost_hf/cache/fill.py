"""Carrying out a `ReusePlan`: stored K/V into the layers, and rows that lag behind through the model first."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.inputs import ForwardInputs
from kvboost_hf.cache.layers import GrowingLayer, Piece
from kvboost_hf.cache.plan import ReusePlan, Segment
from kvboost_hf.cache.positions import take_positions
from kvboost_hf.cache.store import StoredChunk

Loaded = dict[bytes, list[Piece | None]]  # by prefix key: K/V of every layer, where the model computes


class _PlainCache(Cache):
    """Holds the rows of a batch that are prefilled ahead of the others; no hook takes it for a user's."""


def fill_layers(
    model: PreTrainedModel, layers: Sequence[GrowingLayer], plan: ReusePlan, inputs: ForwardInputs, first: int
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
    loaded = {segment.chunk.prefix_key: _load(segment) for row in plan.rows for segment in row.segments}
    computed = 0
    ahead: dict[int, tuple[list[GrowingLayer], int]] = {}  # row -> where it was prefilled, and as which row
    for column, rows in plan.cold_groups.items():
        group = _prefill(model, layers, plan, loaded, inputs, first, column, rows)
        ahead |= {row: (group, at) for at, row in enumerate(rows)}
        computed += sum(plan.filled - max(column, plan.pads[row]) for row in rows)
    for idx, layer in enumerate(layers):
        pieces: list[list[Piece]] = []
        for row, pad in enumerate(plan.pads):
            if row in ahead:
                group, at = ahead[row]
                if not group[idx].is_initialized:
                    continue  # the model has no use for this layer
                pieces.append([group[idx].piece(at, plan.held)])  # padding in front may be missing
            else:
                pieces.append(_pieces(plan.rows[row].segments, loaded, idx, plan.filled - pad))
        if any(pieces):
            layer.fill(plan.filled - plan.held, pieces)
    return computed


def _prefill(
    model: PreTrainedModel,
    layers: Sequence[GrowingLayer],
    plan: ReusePlan,
    loaded: Loaded,
    inputs: ForwardInputs,
    first: int,
    column: int,
    rows: list[int],
) -> list[GrowingLayer]:
    """Compute columns [column, filled) of `rows` on top of what the layers and the store have of them."""
    group = [GrowingLayer() for _ in layers]
    starts_empty = plan.held == 0 and not any(plan.rows[row].segments for row in rows)
    if not starts_empty:
        for idx, (layer, own) in enumerate(zip(group, layers, strict=True)):
            pieces = [_pieces(plan.rows[row].segments, loaded, idx, column - plan.pads[row]) for row in rows]
            if plan.held and own.is_initialized:
                pieces = [[own.piece(row, 0), *found] for row, found in zip(rows, pieces, strict=True)]
            if any(pieces):
                layer.fill(column, pieces)
    at = torch.tensor(rows, device=inputs.input_ids.device)
    new = slice(column - first, plan.filled - first)
    part: dict[str, Any] = {"input_ids": inputs.input_ids[at, new]}
    if inputs.attention_mask is not None:
        # Where the group starts empty, its first columns are padding in all of its rows, and are left out.
        part["attention_mask"] = inputs.attention_mask[at, column if starts_empty else 0 : plan.filled]
    if inputs.position_ids is not None:
        part["position_ids"] = take_positions(inputs.position_ids, at, len(plan.rows), new)
    model(**part, past_key_values=_PlainCache(layers=list(group)), use_cache=True, logits_to_keep=1)
    return group


def _pieces(segments: Sequence[Segment], loaded: Loaded, layer_idx: int, stop: int) -> list[Piece]:
    """K/V of a row's tokens up to `stop`, as pieces of stored chunks."""
    pieces: list[Piece] = []
    for segment in segments:
        if segment.start < stop:
            piece = loaded[segment.chunk.prefix_key][layer_idx]
            if piece is None:
                continue
            keys, values = piece
            start, length = segment.start - segment.origin, min(segment.stop, stop) - segment.start
            if length < keys.shape[1]:
                keys, values = keys.narrow(1, start, length), values.narrow(1, start, length)
            pieces.append((keys, values))
    return pieces


def _load(segment: Segment) -> list[Piece | None]:
    assert isinstance(segment.chunk, StoredChunk)
    return segment.chunk.kv.load()
