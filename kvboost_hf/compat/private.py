"""The cache of forwards that this package runs for itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values [batch, num_kv_heads, columns, head_dim]


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
