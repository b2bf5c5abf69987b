"""Reads the arguments of a forward: its tokens, and whether its K/V depends on these alone."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.prompt.media import MEDIA_ARGUMENTS, TYPES, takes_media
from kvboost_hf.cache.prompt.positions import computed_positions, keeps_positions

# Arguments that leave K/V as it is, or that are read below. Any other one, if given, may change K/V.
_KNOWN = frozenset(
    "input_ids attention_mask position_ids past_key_values cache_params use_cache logits_to_keep return_dict labels "
    "output_attentions output_hidden_states output_router_logits cache_position".split()
)
# Arguments of generate() that it also passes to forwards. A test compares them with each release.
OF_GENERATE = frozenset("assistant_model assistant_tokenizer streamer synced_gpus tokenizer".split())
_HARMLESS = _KNOWN | OF_GENERATE
ALL_LOGITS = (
    "the logits of all tokens are wanted (pass logits_to_keep=1, as generate() does, or "
    "ReusePolicy(keep_logprobs=True))"
)
GRADIENTS = "gradients are enabled (call it under torch.no_grad())"
# Arguments of multimodal models: they are part of the column ids.
_OF_MEDIA = MEDIA_ARGUMENTS | frozenset(TYPES)


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The arguments of one forward, as far as reuse is concerned."""

    input_ids: torch.Tensor  # [batch, m]
    attention_mask: torch.Tensor | None  # [batch, columns]
    position_ids: torch.Tensor | None  # [batch or 1, m], or [planes, batch, m]
    logits: int  # how many of the last m tokens must be computed, for their logits or anything else
    verifies: bool  # several logits were asked for: candidates are being checked, crop() will follow
    computes_all: str | None  # why all tokens of the prompt must be computed, or None
    logits_of_all: bool = False  # those of reused tokens are wanted, too, and can be had


def read_inputs(
    model: PreTrainedModel, kwargs: dict[str, Any], all_logits_reason: str | None = ALL_LOGITS
) -> ForwardInputs | str:
    """The arguments, or the reason why the K/V of this forward may depend on more than its tokens.

    Args:
        model: The model.
        kwargs: The arguments by name.
        all_logits_reason: Why the logits of reused tokens cannot be had, or None.
    """
    ids, mask, positions = kwargs.get("input_ids"), kwargs.get("attention_mask"), kwargs.get("position_ids")
    if model.training:
        return "the model is in training mode"
    if not isinstance(ids, torch.Tensor):
        return "no input_ids were passed"
    if ids.ndim != 2 or ids.shape[1] == 0:
        return f"input_ids have the shape {list(ids.shape)}"
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        return "the attention mask is not 2-D"
    media = takes_media(model)
    if positions is not None and not _are_positions_of(ids, positions, 3 if media else 2):
        return "position_ids are not one for each of the input_ids"
    if kwargs.get("use_cache") is False:
        return "use_cache is False"
    for name, value in kwargs.items():
        if name not in _HARMLESS and not (media and name in _OF_MEDIA) and not _says_nothing(value):
            return f"`{name}` was passed, which K/V may depend on"
    if _adapters_by_row(model):
        return "PEFT was told which adapter each row, or which tokens, of this batch use"
    wants_all = wants_all_logits(kwargs)
    computes_all = _computes_all(model, kwargs, all_logits_reason if wants_all else None)
    if computes_all:
        return ForwardInputs(ids, mask, positions, ids.shape[1], False, computes_all)
    if wants_all:
        return ForwardInputs(ids, mask, positions, 1, False, None, logits_of_all=True)
    logits = min(int(kwargs["logits_to_keep"]), ids.shape[1])
    return ForwardInputs(ids, mask, positions, logits, logits > 1, None)


def wants_all_logits(kwargs: dict[str, Any]) -> bool:
    """Whether a forward may want the logits of all its tokens, or a loss over them."""
    keep = kwargs.get("logits_to_keep")
    return keep is None or isinstance(keep, torch.Tensor) or keep <= 0 or kwargs.get("labels") is not None


def _are_positions_of(ids: torch.Tensor, positions: torch.Tensor, max_ndim: int) -> bool:
    batch, columns = ids.shape
    return 2 <= positions.ndim <= max_ndim and positions.shape[-1] == columns and positions.shape[-2] in (1, batch)


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, dict) and not value)


def with_positions(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with the positions that the model's forward would compute from the whole ids."""
    ids = kwargs.get("input_ids")
    if kwargs.get("position_ids") is not None or not isinstance(ids, torch.Tensor) or not keeps_positions(model):
        return kwargs
    positions = computed_positions(model, kwargs)
    if positions is None:
        cache = kwargs.get("past_key_values")
        held = cache.get_seq_length() if isinstance(cache, Cache) else 0
        positions = torch.arange(held, held + ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    return {**kwargs, "position_ids": positions}


def _computes_all(model: PreTrainedModel, kwargs: dict[str, Any], all_logits_reason: str | None) -> str | None:
    if all_logits_reason is not None:
        return all_logits_reason
    losses = ("output_router_logits",) if wants_all_logits(kwargs) else ()
    for name in ("output_hidden_states", "output_attentions", *losses):
        wanted = kwargs.get(name)
        if wanted or (wanted is None and getattr(model.config, name, False)):
            return f"`{name}` of all tokens are wanted"
    return GRADIENTS if gradients_enabled(model) else None


def gradients_enabled(model: PreTrainedModel) -> bool:
    """Whether somebody may want gradients of a forward."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())


def _adapters_by_row(model: PreTrainedModel) -> bool:
    """Whether PEFT has hooked the adapted layers for the length of a call with `adapter_names` or an aLoRA."""
    if getattr(model, "peft_config", None) is None:
        return False
    layer = next((module for module in model.modules() if "_active_adapter" in module.__dict__), None)
    hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, partial)] if layer else []
    return any({"adapter_names", "alora_offsets"} & hook.keywords.keys() for hook in hooks)


@cache
def accepts_position_ids(forward: Callable[..., object]) -> bool:
    """Whether a model's forward takes position_ids."""
    return "position_ids" in inspect.signature(forward).parameters


def positions_follow_padding(model: PreTrainedModel, inputs: ForwardInputs) -> bool:
    """Whether the model counts positions from the first real token of each row, should there be padding."""
    return inputs.position_ids is not None or not accepts_position_ids(type(model).forward)


def read_pads(mask: torch.Tensor | None, batch: int, columns: int) -> NDArray[np.int64] | None:
    """Columns of left padding of each row, or None where the mask is not of the form 0…01…1 over all `columns`.

    A row may be all padding, as far as it goes: its first real tokens may come with the next piece of the prompt.
    """
    if mask is None:
        return np.zeros(batch, dtype=np.int64)
    seen = mask.cpu().numpy() != 0
    if seen.shape != (batch, columns):
        return None
    count = seen.sum(axis=1)
    first = np.where(count > 0, seen.argmax(axis=1), columns)
    return first.astype(np.int64) if bool((first + count == columns).all()) else None


def positions_count_up(position_ids: torch.Tensor | None, pads: NDArray[np.int64], start: int) -> bool:
    """Whether every real token from column `start` on has its column, less the padding, as its position."""
    if position_ids is None or position_ids.ndim > 2:
        return True  # column ids contain those of several dimensions
    found = position_ids.cpu().numpy()
    expected = np.arange(start, start + found.shape[1])[None, :] - pads[:, None]
    return bool(((found == expected) | (expected < 0)).all())


def common_columns(held: Tokens, ids: Tokens) -> int:
    """Leading columns in which all rows of `held` and `ids` agree."""
    n = min(held.shape[1], ids.shape[1])
    differ = np.flatnonzero((held[:, :n] != ids[:, :n]).any(axis=0))
    return int(differ[0]) if differ.size else n
