"""Lending layers to forwards over tokens of which not all will stay, and taking over those that do.

Drafts that branch are such tokens: side by side in the layers, they are no text that the cache could keep track of.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvboost_hf.cache.forward.running import CacheParts
from kvboost_hf.cache.layers.choose import kv_layers
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.live.live_kv import LiveKV
from kvboost_hf.cache.planning.chunks import whole_pieces
from kvboost_hf.compat import attn_implementation, rope_regime
from kvboost_hf.handles import ATTENTION

LayerPair = tuple[torch.Tensor, torch.Tensor]  # keys and values [1, num_kv_heads, tokens, head_dim]


def lending_reason(live: LiveKV) -> str | None:
    """Why the layers cannot be lent, nor read and extended; None if they can."""
    if live.plain_reason is not None:
        return live.plain_reason
    rigid = {type(layer).__name__ for layer in live.layers if layer.is_stateful or not layer.can_branch}
    return f"its cache has layers of the kind {', '.join(sorted(rigid))}" if rigid else None


def lend(parts: CacheParts) -> list[Any]:
    """The layers, as transformers knows them, for forwards that are not told to the cache."""
    model = parts.binding.model
    parts.live.hand_out(model is not None and attn_implementation(model) == ATTENTION)
    return [layer.lend() for layer in kv_layers(parts.live.layers)]


def read(live: LiveKV) -> list[LayerPair | None]:
    """Of each layer, K/V of the only row's tokens that it holds; None for a layer that has none."""
    length = live.held
    found = [layer.columns(0, layer.first, length) for layer in kv_layers(live.layers)]
    return [None if not piece else (piece[0][None], piece[1][None]) for piece in found]


def extend(
    parts: CacheParts, input_ids: torch.Tensor, position_ids: torch.Tensor, kv: Sequence[LayerPair | None]
) -> None:
    """Append columns that were computed by forwards over lent layers: see `ChunkReuseCache.extend`."""
    live, model = parts.live, parts.binding.model
    held = live.held
    stop = held + input_ids.shape[1]
    for layer, pair in zip(kv_layers(live.layers), kv, strict=True):
        if pair is not None:
            layer.fill(held, stop, [[(pair[0][0], pair[1][0])]])
            layer.native.crop(0)
    if (
        live.ledger is not None
        and model is not None
        and rope_regime(model, stop - int(live.ledger.log.pads.min())) != live.regime
    ):
        live.ledger = None
    live.appended(input_ids, position_ids, None, stop)


def root_of(parts: CacheParts, tokens: int) -> bytes | None:
    """The root of a prompt of one row with so many tokens; None if nothing of it can be stored."""
    live, model = parts.live, parts.binding.model
    regime = rope_regime(model, tokens) if model is not None and live.unsupported is None else None
    return parts.binding.root(regime) if regime is not None else None


def stored_tokens(parts: CacheParts, ids: torch.Tensor) -> int:
    """How many first tokens of a prompt [1, tokens], whose last one is left to compute, the store holds now."""
    binding, live, root = parts.binding, parts.live, root_of(parts, ids.shape[1])
    if root is None:
        return 0
    ledger = Ledger.empty(np.zeros(1, dtype=np.int64), root)
    tokens = ids.cpu().numpy().astype(np.int64, copy=False)
    filled = ledger.plan(tokens, 0, ids.shape[1] - 1, binding.store, 0, stateful=live.stateful).filled
    return whole_pieces(filled) if binding.policy.reproducible else filled
