"""Counts the tokens that go through the decoder layers of a model."""

from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import decoder_layers


class ForwardCount:
    """Counts tokens that go through a model: the mean over its decoder layers.

    A repair sends fewer tokens through later layers than through the first ones.

    Args:
        model: Gets a forward hook on each decoder layer.

    Raises:
        ValueError: the decoder layers cannot be told.
    """

    leaves_kv_alone = True  # so that K/V of the model is good for other processes

    def __init__(self, model: PreTrainedModel) -> None:
        layers = decoder_layers(model)
        if not layers:
            raise ValueError(
                f"`model` must have decoder layers that can be told, got {type(model).__name__}: none is counted."
            )
        self._rows, self._layers = 0, len(layers)
        for layer in layers:
            layer.register_forward_hook(self._add)

    @property
    def tokens(self) -> int:
        """Tokens counted so far, rounded up."""
        return -(-self._rows // self._layers)

    def _add(self, _layer: torch.nn.Module, _args: Any, out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        hidden_BTH = out if isinstance(out, torch.Tensor) else out[0]
        self._rows += hidden_BTH.shape[:-1].numel()
