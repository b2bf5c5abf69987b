"""Finds out whether rows of a batch can share the K/V of a prefix, and chooses an attention that allows it."""

import logging
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvboost_hf.compat import (
    PrivateCache,
    attempt,
    attn_implementation,
    cache_layers,
    difference,
    input_device,
    mask_form,
    probe_ids,
    probe_logits,
    remember,
    tolerance,
)
from kvboost_hf.handles import ATTENTION
from kvboost_hf.server.generation.batch import BatchKV

_log = logging.getLogger("kvboost_hf.server")


def choose_attention(model: PreTrainedModel, asked: str | None = None) -> str:
    """Set the attention of a model: the one that is asked for; else, on a CPU, one that lets rows share K/V.

    On a GPU it keeps its own: `kvboost_fa2` has not been measured there.

    Args:
        model: Which is changed.
        asked: As transformers names it.

    Returns:
        Why the model has this attention.

    Raises:
        ValueError: for one that the model does not take, or whose package is not there.
    """
    if asked is not None:
        try:
            model.set_attn_implementation(asked)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"`attn_implementation` must be one that the model takes, got {asked!r}: {error} Pass 'sdpa', 'eager' "
                f"or {ATTENTION!r}."
            ) from error
        return "as `--attn-implementation` says"
    own = attn_implementation(model)
    if own == ATTENTION:
        return "the model was loaded with it"
    if input_device(model).type != "cpu":
        return f"the model's own; {ATTENTION} is only chosen on a CPU"
    if _is_taken(model):
        model.set_attn_implementation(ATTENTION)
    if (reason := sharing_reason(model)) is not None:
        _log.info("Each request has a copy of its K/V: %s.", reason)
        model.set_attn_implementation(own)
        return f"each request has a copy of its K/V: {reason}"
    return "requests read K/V that they share in place"


def sharing_reason(model: PreTrainedModel) -> str | None:
    """Why rows must have copies of all their K/V, or None. Runs the model on a few tokens, once per dtype."""
    if (kind := attn_implementation(model)) != ATTENTION:
        return f"its attention is {kind!r}, and {ATTENTION!r} alone reads K/V that lies anywhere"
    if not _is_taken(model):
        return "it does not leave all of attention to what is registered"
    others = {type(layer).__name__ for layer in cache_layers(model) if type(layer) is not DynamicLayer}
    if others:
        return f"its cache has layers of the kind {', '.join(sorted(others))}"
    return remember(
        model,
        (sharing_reason, model.dtype),
        lambda: attempt(model, lambda: _probe(model), "it fails on rows in pieces"),
    )


def _is_taken(model: PreTrainedModel) -> bool:
    return mask_form(model.config.get_text_config(decoder=True)) == "compact"


@torch.no_grad()
def _probe(model: PreTrainedModel) -> str | None:
    """Three rows, two of which begin alike, and the same texts alone."""
    ids = probe_ids(model)
    texts = [ids, torch.cat([ids[:, :4], ids[:, 4:].flip(1)], 1), ids[:, 2:7]]
    batch, expected = BatchKV(model, in_place=True, least=2), []
    for text in texts:
        cache: Any = PrivateCache(cache_layers(model))
        expected.append(probe_logits(model, text)[:, -1])
        probe_logits(model, text[:, :-1], cache)
        batch.join([(layer.keys, layer.values) for layer in cache.layers], text[0, :-1].tolist())
    found = batch.step([int(text[0, -1]) for text in texts])
    off = difference(found.float(), torch.cat(expected))
    if not off <= tolerance(model.dtype):
        return f"rows in pieces get other logits than alone (by {off:.2g} standard deviations)"
    return None
