"""Layers of a cache that are lent to forwards of somebody else, and read and extended outside of any forward.

Drafts that branch run forwards over tokens of which not all will stay: side by side in the layers, they are no text
that the cache could keep track of. It takes over those that do. A server reads the row of a cache, decodes it together
with others, and hands over what that has computed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvboost_hf.cache.forward.running import CacheParts, Forward
from kvboost_hf.cache.layers.base import LayerState, kv_layers
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.live import LiveKV
from kvboost_hf.compat import attn_implementation, rope_regime
from kvboost_hf.handles import ATTENTION

LayerPair = tuple[torch.Tensor, torch.Tensor]  # keys and values [1, num_kv_heads, tokens, head_dim]


class Lent(Forward):
    """Layers that run forwards of somebody else, who forgets what these append, or hands over a part of it."""

    def record(self, output: Any) -> Any:
        """Nothing: such a forward is not told to the cache."""

    def settle(self) -> None:
        """Nothing, as with `record`."""


def lending_reason(live: LiveKV) -> str | None:
    """Why the layers cannot be lent, nor read and extended; None if they can."""
    if live.plain_reason is not None:
        return live.plain_reason
    return _of_kinds({type(layer).__name__ for layer in live.layers if layer.is_stateful or not layer.can_branch})


def _of_kinds(rigid: set[str]) -> str | None:
    return f"its cache has layers of the kind {', '.join(sorted(rigid))}" if rigid else None


def reading_reason(live: LiveKV) -> str | None:
    """Why what the layers hold of a row cannot be read, and put back with more tokens; None if it can."""
    if live.plain_reason is not None:
        return live.plain_reason
    return _of_kinds(
        {type(each).__name__ for each in live.layers if each.single_row or not (each.can_branch or each.is_stateful)}
    )


def lend_layers(parts: CacheParts) -> list[Any]:
    """The layers, as transformers knows them, for forwards that are not told to the cache."""
    model = parts.binding.model()
    parts.live.hand_out(model is not None and attn_implementation(model) == ATTENTION)
    return [layer.lend() for layer in kv_layers(parts.live.layers)]


def read_layers(live: LiveKV, layers: Sequence[int] | None = None, row: int = 0) -> list[LayerPair | None]:
    """Of some layers, or all, K/V of the columns of a row that it holds; None for a layer that has none."""
    length, held = live.held, kv_layers(live.layers)
    chosen = held if layers is None else [held[at] for at in layers]
    found = [layer.columns(row, layer.first, length) for layer in chosen]
    return [None if not piece else (piece[0][None], piece[1][None]) for piece in found]


def read_states(live: LiveKV) -> list[LayerState | None]:
    """Of each layer, views of the only row's state; None for a layer that has none."""
    return [layer.view_state(0) for layer in kv_layers(live.layers)]


def read_hidden(live: LiveKV, layers: Sequence[int], start: int) -> dict[int, torch.Tensor] | None:
    """Views of the hidden states [1, columns, hidden_size] from column `start` on; None if they are not all kept."""
    hidden = live.hidden
    if hidden is None or not set(layers) <= set(hidden.which) or hidden.first or hidden.length != live.held:
        return None
    return {layer: hidden.view(layer, start) for layer in layers}


def extend_layers(
    parts: CacheParts,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    kv: Sequence[LayerPair | None],
    states: Sequence[LayerState | None],
    hidden: Mapping[int, torch.Tensor],
) -> None:
    """Append columns that were computed by forwards elsewhere: see `ChunkReuseCache.extend`."""
    live, model = parts.live, parts.binding.model()
    held = live.held
    stop = held + input_ids.shape[1]
    for layer, pair in zip(kv_layers(live.layers), kv, strict=True):
        if pair is not None:
            layer.fill(held, stop, [[row] for row in zip(*pair, strict=True)])
            if live.is_recording:
                layer.native.crop(0)
    for layer, state in zip(kv_layers(live.layers), states, strict=bool(states)):
        if state is not None:
            layer.load_states([state])
    live.keep_hidden(hidden.get)
    if (
        live.ledger is not None
        and model is not None
        and rope_regime(model, stop - int(live.ledger.log.pads.min())) != live.regime
    ):
        live.ledger = None
    live.appended(input_ids, position_ids, None, stop)


def take_repaired(parts: CacheParts, start: int, kv: Sequence[LayerPair | None], computed: int) -> None:
    """Take exact K/V of tainted columns: see `ChunkReuseCache.take_repaired`."""
    live, ledger = parts.live, parts.live.ledger
    if ledger is None or ledger.blended is None or ledger.blended.tainted_from(0) != start:
        return
    stop = start
    for layer, pair in zip(kv_layers(live.layers), kv, strict=True):
        if pair is not None:
            assert isinstance(layer, GrowingLayer)
            stop = start + pair[0].shape[2]
            layer.scatter(torch.arange(start, stop, device=pair[0].device)[None], *pair)
            live.rewritten(1)
    live.tally.repaired += computed
    columns = np.zeros((1, ledger.log.length), dtype=bool)
    columns[0, start:stop] = True
    live.repaired(columns)
