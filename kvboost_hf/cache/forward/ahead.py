"""Runs columns of a prompt through the model ahead of the caller's forward, and reads them where they are then."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.layers import private_cache
from kvboost_hf.cache.layers.base import LayerState, Piece, ReuseLayer
from kvboost_hf.cache.planning.stems import Stem
from kvboost_hf.cache.prompt.forward_call import ForwardInputs
from kvboost_hf.cache.prompt.token_log import take_positions
from kvboost_hf.compat import run_model


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
    run_behind(model, layers, inputs, rows, at, mask)


def run_behind(
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
