"""Forwards that this package runs for itself: `run_model`, and the cache that no hook takes for a user's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.compat.forwards import cache_argument, forward_arguments
from kvboost_hf.compat.models import keeps_positions

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values [batch, num_kv_heads, columns, head_dim]

# What a configuration may turn on for each token, and nobody reads of a forward of ours. Router logits also fail it:
# models make a loss of them, for which the mask must have a column for each token of the forward and no other.
_OF_EACH_TOKEN = ("output_attentions", "output_hidden_states", "output_router_logits")


def run_model(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache | None,
    *,
    logits: int = 1,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **more: Any,
) -> Any:
    """Run a model for this package itself, without gradients and in the mode that it is in.

    Args:
        model: A model, or the part of it below its head.
        input_ids: [batch, m], on the device of the model's inputs.
        cache: Takes the K/V: a `PrivateCache`, to stay out of sight of the hooks of caches and of `attach`; any other
            to be served as a user is. None computes without one.
        logits: How many of the last tokens to compute logits of, 0 for all. A model that takes no `logits_to_keep`
            computes all.
        attention_mask: [batch, columns], or what stands in for the masks that hooks give each layer; None if nothing
            is masked.
        position_ids: [batch, m] or [planes, batch, m], left out for a model that takes none. None for those that the
            model counts itself; a model that would count on from its last prompt is told those behind `cache`.
        more: Further arguments of the forward. They replace those of this function.

    Returns:
        What the model returns, with names.
    """
    accepted = forward_arguments(model)
    given: dict[str, Any] = {"use_cache": cache is not None, "return_dict": True}
    if cache is not None:
        given[cache_argument(model)] = cache
    if "logits_to_keep" in accepted:
        given["logits_to_keep"] = logits
    if attention_mask is not None:
        given["attention_mask"] = attention_mask
    if position_ids is None and attention_mask is None and keeps_positions(model):
        held = cache.get_seq_length() if cache is not None else 0
        position_ids = torch.arange(held, held + input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if position_ids is not None and "position_ids" in accepted:
        given["position_ids"] = position_ids
    with torch.no_grad():
        return model(input_ids=input_ids, **{**_turned_off(model), **given, **more})


def _turned_off(model: PreTrainedModel) -> dict[str, bool]:
    """The arguments that turn off what a configuration of the model has turned on."""
    config = model.config
    configs = (config, config.get_text_config(decoder=True)) if config.sub_configs else (config,)
    return {name: False for name in _OF_EACH_TOKEN if any(getattr(each, name, None) for each in configs)}


class PrivateCache(Cache):
    """A cache of a type that no hook takes for a user's.

    Args:
        layers: The layers that transformers sees.

    Attributes:
        take: Takes the new K/V of a layer, and returns the K/V to attend to; None appends to the layer.
        take_hidden_states: Takes the last hidden states of the new columns, [batch, m, hidden_size], and returns those
            to compute logits of; None leaves them alone. It needs `hook_hidden_states`.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers=list(layers))
        self.take: Callable[[int, torch.Tensor, torch.Tensor], KV] | None = None
        self.take_hidden_states: Callable[[torch.Tensor], torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        """See `Cache.update`."""
        if self.take is not None:
            return self.take(layer_idx, key_states, value_states)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values
