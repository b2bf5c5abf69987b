"""Probes whether a model computes some of its tokens rightly over keys and values that were put in place."""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.forward.fill import fill_turned
from kvboost_hf.cache.forward.scatter import Narrowing, ScatterPass, attention_of_the_end
from kvboost_hf.cache.kv.layer_kv import copy_columns
from kvboost_hf.cache.layers.choose import make_layers
from kvboost_hf.cache.planning.moved import REPAIRS, BlendPlan, Measure, Repair, RepairRow
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, Segment
from kvboost_hf.cache.store.chunk_store import StoredChunk
from kvboost_hf.compat import (
    KeyRotation,
    PrivateCache,
    attempt,
    attn_implementation,
    decoder_layers,
    difference,
    input_device,
    key_rotation,
    own_hook,
    probe_reason,
    recall,
    remember,
    run_model,
    tolerance,
)
from kvboost_hf.handles import ATTENTION

_TOKENS = 40
_MOVED = slice(5, 27)
_SHIFT = 3
_FEW_LAYERS = 8  # of which the two that `"cacheblend"` computes whole are a quarter or more
_ATTENTION_KINDS = ("sdpa", "eager", ATTENTION)


def blend_reason(model: PreTrainedModel, measure: Measure) -> str | None:
    """Why moved chunks cannot be used, or not be repaired by what `measure` says; None if they can.

    Once per model: a few forwards of a few tokens.
    """
    key = (blend_reason, model.dtype, attn_implementation(model), measure)
    return remember(model, key, lambda: _reason(model, measure))


def repair_for(model: PreTrainedModel, name: str, num_layers: int) -> Repair:
    """The repair of that name; with `"auto"`, the one that is best for a model of so many layers."""
    if name != "auto":
        return REPAIRS[name]
    few = num_layers <= _FEW_LAYERS and blend_reason(model, Measure.DEVIATION) is None
    return REPAIRS["cacheblend" if few else "query"]


def needs_no_mask(model: PreTrainedModel) -> bool:
    """Whether the model's own forward of a whole prompt gives its layers no mask: SDPA's causal one will do."""
    return bool(recall(model, (needs_no_mask, model.dtype, attn_implementation(model))))


def _reason(model: PreTrainedModel, measure: Measure) -> str | None:
    if reason := probe_reason(model):
        return reason
    rotation = key_rotation(model)
    if isinstance(rotation, str):
        return rotation
    if attn_implementation(model) not in _ATTENTION_KINDS:
        return (
            f"its attention ({attn_implementation(model)}) takes no mask of its own for each token; "
            f"use sdpa, eager or {ATTENTION}"
        )
    if len(decoder_layers(model)) != len(make_layers(model)):
        return "its decoder layers cannot be told apart"
    if measure is Measure.DEVIATION and len(rotation.layers) < 2:
        return "it has no second layer to be measured"
    return attempt(model, lambda: _probe(model, rotation, measure), "it fails on a part of its tokens")


@torch.no_grad()
def _probe(model: PreTrainedModel, rotation: KeyRotation, measure: Measure) -> str | None:
    """Move K/V that was computed a few positions further on: the logits must be those of a plain forward."""
    vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    device = input_device(model)
    ids = (torch.arange(_TOKENS, device=device)[None] * 7919 + 13) % vocab_size
    positions = torch.arange(_TOKENS, device=device)[None]
    layers = make_layers(model)
    masks: list[Any] = []
    watch = own_hook(decoder_layers(model)[0].register_forward_pre_hook(_Watch(masks).before, with_kwargs=True))
    try:
        plain = _last_logits(model, PrivateCache([layer.native for layer in make_layers(model)]), ids, positions)
    finally:
        watch.remove()
    remember(model, (needs_no_mask, model.dtype, attn_implementation(model)), lambda: masks == [None])
    _last_logits(model, PrivateCache([layer.native for layer in layers]), ids, positions + _SHIFT)
    kv = copy_columns(layers, 0, _MOVED.start, _MOVED.stop)
    chunk = StoredChunk(b"", b"", b"", _MOVED.start + _SHIFT, ids[0, _MOVED].cpu().numpy(), kv, 0)
    moved = np.zeros(_TOKENS, dtype=bool)
    moved[_MOVED] = True
    row = RepairRow(~moved, moved, (_MOVED.start,))
    segment = Segment(chunk, 0, _MOVED.start, _MOVED.stop, moved=True)
    reuse = ReusePlan(0, _TOKENS, (RowPlan(_TOKENS, (segment,), (), None),), (0,))
    plan = BlendPlan(reuse, (row,))

    layers = make_layers(model)
    fill_turned(layers, reuse, rotation)
    if measure is Measure.ATTENTION:
        attention_of_the_end(model, layers, plan, ids, 0)
    chosen = np.flatnonzero(~moved)[None]
    narrowing: Narrowing | None = None
    if measure is Measure.DEVIATION:
        narrowing = Narrowing(1, 1, lambda scores, step: chosen, 1 - rotation.rotated(1))
    columns = np.arange(_TOKENS)[None] if narrowing is not None else chosen
    cache = PrivateCache([layer.native for layer in layers])
    scatter = ScatterPass(model, cache, layers, columns, (0,), narrowing=narrowing, unmasked=needs_no_mask(model))
    cache.take = scatter.update
    try:
        found = _last_logits(model, cache, **scatter.arguments(ids, 0))
    finally:
        scatter.close()
        cache.take = None
    if any(tokens > len(chosen[0]) for tokens in scatter.layer_tokens[2:]):
        return "its layers do not take a part of their tokens"
    off = difference(found, plain)
    if not off <= tolerance(model.dtype):
        return f"a part of its tokens over moved K/V gives other logits (by {off:.2g} standard deviations)"
    return None


class _Watch:
    """Notes the mask that a layer is given."""

    leaves_kv_alone = True  # read by the fingerprint: other hooks may change what a model computes

    def __init__(self, masks: list[Any]) -> None:
        self._masks = masks

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._masks.append(kwargs.get("attention_mask", ...))


def _last_logits(
    model: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    output = run_model(model, input_ids, cache, position_ids=position_ids, attention_mask=attention_mask)
    logits: torch.Tensor = output.logits[:, -1].float()
    return logits
