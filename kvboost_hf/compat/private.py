"""Forwards that this package runs for itself: the function, their cache, and masks for each of their layers."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.compat.forwards import cache_argument, forward_arguments
from kvboost_hf.compat.hooks import Shown
from kvboost_hf.compat.models import attn_implementation, mask_form, needs_positions
from kvboost_hf.handles import ATTENTION
from kvboost_hf.visibility import Visibility

See = Callable[[int, int, int, torch.device], Visibility | None]
KV = tuple[torch.Tensor, torch.Tensor]  # keys and values [batch, num_kv_heads, columns, head_dim]

# What a configuration may turn on for each token, and nobody reads of a forward of ours. Router logits also fail it:
# models make a loss of them, for which the mask must have a column for each token of the forward and no other.
OF_EACH_TOKEN = ("output_attentions", "output_hidden_states", "output_router_logits")


def run_model(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache | None,
    *,
    logits: int = 1,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_hooks: bool = False,
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
        past_hooks: Whether the arguments are those of a caller's forward, which hooks of others in front of this
            package's have seen: they must not change them a second time. For a `PrivateCache`.
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
    if position_ids is None and attention_mask is None and needs_positions(model):
        held = cache.get_seq_length() if cache is not None else 0
        position_ids = torch.arange(held, held + input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if position_ids is not None and "position_ids" in accepted:
        given["position_ids"] = position_ids
    given = {"input_ids": input_ids, **_turned_off(model), **given, **more}
    if past_hooks and isinstance(cache, PrivateCache) and len(model._forward_pre_hooks) > 1:
        cache.given = {n: each.clone() if isinstance(each, torch.Tensor) else each for n, each in given.items()}
    with torch.no_grad():
        return model(**given)


def _turned_off(model: PreTrainedModel) -> dict[str, bool]:
    """The arguments that turn off what a configuration of the model has turned on."""
    config = model.config
    configs = (config, config.get_text_config(decoder=True)) if config.sub_configs else (config,)
    return {name: False for name in OF_EACH_TOKEN if any(getattr(each, name, None) for each in configs)}


class PrivateCache(Cache):
    """A cache of a type that no hook takes for a user's.

    Args:
        layers: The layers that transformers sees.

    Attributes:
        given: The arguments to run its next forward with, whatever hooks of others have made of them; or None.
        take: Takes the new K/V of a layer, and returns the K/V to attend to; None appends to the layer.
        hidden_layers: The layers whose hidden states it takes; see `ShowsHidden`.
        take_hidden_states: Takes the hidden states of the new columns, and returns those to show, and to compute
            logits of; None leaves them alone. It needs `hook_hidden_states`.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers=list(layers))
        self.given: dict[str, Any] | None = None
        self.take: Callable[[int, torch.Tensor, torch.Tensor], KV] | None = None
        self.hidden_layers: Sequence[int] = ()
        self.take_hidden_states: Callable[[Shown], Shown] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        if self.take is not None:
            return self.take(layer_idx, key_states, value_states)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values


TAKE_MASKS = ("sdpa", "eager", ATTENTION)  # attentions that any mask [batch, 1, m, columns] can be passed to


def masks_reason(model: PreTrainedModel) -> str | None:
    """Why the attention of a model cannot be given a mask for each layer and token, as `LayerMasks` does; or None."""
    if (attention := attn_implementation(model)) in TAKE_MASKS:
        return None
    return f"its attention ({attention}) takes no mask of its own for each token; use sdpa, eager or {ATTENTION}"


class LayerMasks:
    """Gives each decoder layer of one forward a mask of its own, in the form that its attention takes.

    transformers gives one mask to all layers of a kind, cut for a prompt without holes and without branches. The model
    is given a `stand_in` instead, and a hook on its layers (`hook_layers`) puts the right one in its place.

    Args:
        model: The model.
        cache: The cache that the forward is given, which tells its layers' calls from those of other threads.
        kinds: For each layer, the window, or 0, and the columns that it attends to.
        compact: Whether an attention that can be told the columns of its queries is given no matrix of both.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache, kinds: Sequence[tuple[int, int]], *, compact: bool = True
    ) -> None:
        self._cache, self._kinds = cache, kinds
        attention, form = attn_implementation(model), mask_form(model.config.get_text_config(decoder=True))
        self._dtype = None if attention in ("sdpa", ATTENTION) else model.dtype
        self._compact = compact and attention == ATTENTION and form == "compact"
        self._masks: dict[Hashable, torch.Tensor | None] = {}

    def stand_in(self, batch: int, device: torch.device) -> torch.Tensor:
        """The mask to run the model with: models pass one of four dimensions on as it is."""
        return torch.zeros(batch, 1, 1, 1, device=device, dtype=self._dtype or torch.bool)

    def concern(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a layer that is called with these arguments runs in this forward."""
        return id(self._cache) in map(id, (*args, *kwargs.values()))

    def put(self, idx: int, args: Any, kwargs: dict[str, Any], queries: int, see: See) -> tuple[Any, dict[str, Any]]:
        """Put the mask of layer `idx` for its last `queries` tokens in place of the stand-in.

        Args:
            idx: The layer.
            args: The arguments of the layer, by position.
            kwargs: The arguments of the layer, by name.
            queries: How many tokens it computes.
            see: Called with the window, the columns, the queries and the device, once for all layers where these are
                the same; returns what the queries see, or None where the layer needs no mask.

        Raises:
            ValueError: the layer is given no mask at all.
        """
        hidden: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        (window, columns), device = self._kinds[idx], hidden.device
        key = window, columns, queries, device
        if key not in self._masks:
            seen = see(window, columns, queries, device)
            self._masks[key] = self._make(seen, queries, columns, device) if seen is not None else None
        mask = self._masks[key]
        if "attention_mask" in kwargs:
            return args, {**kwargs, "attention_mask": mask}
        if not any(map(_is_stand_in, args)):
            raise ValueError("its decoder layers are given no attention_mask")
        return tuple(mask if _is_stand_in(value) else value for value in args), kwargs

    def forget(self) -> None:
        """Make the masks anew: other tokens go on."""
        self._masks.clear()

    def _make(self, seen: Visibility, queries: int, columns: int, device: torch.device) -> torch.Tensor | None:
        if self._compact and seen.is_compact:
            return seen.compact(device)
        found = seen.dense(queries, columns, device)
        if seen.tree is None and seen.mask is None:
            # Padding sees itself: the attention of a row that sees nothing is not a number.
            own = seen.columns_of(queries, columns, device)[:, None, :, None]
            found = found | (torch.arange(columns, device=device) == own)
        if self._dtype is None:
            return found
        return torch.where(found, 0.0, torch.finfo(self._dtype).min).to(self._dtype)


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1:] == (1, 1, 1)
