"""Probes whether a model computes branching tokens correctly, by a few short forwards."""

from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.assisted.branches import BRANCHING_LAYERS, Branches
from kvboost_hf.compat import (
    PrivateCache,
    attempt,
    attn_implementation,
    cache_layers,
    decoder_layers,
    difference,
    forward_arguments,
    frequencies_vary,
    probe_ids,
    probe_logits,
    remember,
    tolerance,
)
from kvboost_hf.handles import ATTENTION

_ATTENTION_KINDS = ("sdpa", "eager", ATTENTION)
_TEXT = 3  # tokens of the probe before the branches


def branch_reason(model: PreTrainedModel) -> str | None:
    """Why tokens that branch cannot be computed in one forward; None if they can.

    Once per model, dtype and attention: three forwards of a few tokens.
    """
    return remember(model, (branch_reason, model.dtype, attn_implementation(model)), lambda: _reason(model))


def _reason(model: PreTrainedModel) -> str | None:
    config: Any = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if attn_implementation(model) not in _ATTENTION_KINDS:
        return (
            f"its attention ({attn_implementation(model)}) takes no mask of its own for each token; "
            f"use sdpa, eager or {ATTENTION}"
        )
    if "position_ids" not in forward_arguments(model):
        return "its forward takes no position_ids"
    if any(map(frequencies_vary, model.modules())):
        return "its rotary frequencies depend on the length"
    if getattr(config, "cross_attention_layers", None):
        return "it has layers that attend to images only"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its attention is chunked"
    return attempt(model, lambda: _layers_reason(model) or _probe(model), "it fails on tokens that branch")


def _layers_reason(model: PreTrainedModel) -> str | None:
    layers = cache_layers(model)
    if unknown := {type(layer).__name__ for layer in layers} - BRANCHING_LAYERS:
        return f"its cache has layers that cannot hold branches ({', '.join(sorted(unknown))})"
    if len(decoder_layers(model)) != len(layers):
        return "its decoder layers cannot be told apart"
    return None


@torch.no_grad()
def _probe(model: PreTrainedModel) -> str | None:
    """Interleave two continuations token by token: the logits must be those of each continuation alone."""
    ids = probe_ids(model)
    text, first = ids[:, :_TEXT], ids[:, _TEXT:]
    ways = torch.cat([first, first.flip(1)])
    plain = probe_logits(model, torch.cat([text.expand(2, -1), ways], dim=1))[:, _TEXT:]
    cache = PrivateCache(cache_layers(model))
    probe_logits(model, text, cache)
    cache.activate_past_recording()  # type: ignore[no-untyped-call]
    branches = Branches(model, cache, torch.tensor([[_TEXT]], device=ids.device))
    tokens = ways.T.flatten().tolist()  # a b a b …
    found = branches.forward(tokens, [node - 2 if node > 1 else -1 for node in range(len(tokens))])
    off = max(difference(found[way::2].float(), plain[way]) for way in range(2))
    if not off <= tolerance(model.dtype):
        return f"tokens that branch have other logits than alone (by {off:.2g} standard deviations)"
    return None
