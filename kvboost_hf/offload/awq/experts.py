"""Experts on AWQ weights: transformers stacks those of a layer in one tensor, AWQ checkpoints have each on its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# What checkpoints call the parts of an expert: gate, up, down.
EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class AwqExperts(nn.Module):
    """In place of the experts of one layer.

    Args:
        stacked: The experts of transformers, on the meta device; they lose their weights.
        parts: Names of gate, up and down in the checkpoint.
        make: Makes a linear layer of so many input and output features.

    Raises:
        ValueError: they are not stacked in a way that is known.
    """

    def __init__(self, stacked: Any, parts: tuple[str, str, str], make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        if not are_stacked(stacked):
            raise ValueError(
                f"Experts on AWQ weights must have a gate and no biases, as those of Qwen3-MoE and Mixtral; "
                f"{type(stacked).__name__} is of another kind. Use a checkpoint that is not quantized."
            )
        count, hidden, inner = stacked.down_proj.shape
        for number in range(count):
            expert = nn.Module()
            for name, sizes in zip(parts, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
                expert.add_module(name, make(*sizes))
            self.add_module(str(number), expert)
        stacked.gate_up_proj = stacked.down_proj = None
        self.stacked, self.count, self.parts = stacked, count, parts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Add up what the experts chosen for each token say.

        Args:
            hidden_states: [tokens, hidden_size].
            top_k_index: Experts of each token, [tokens, k]; `count` stands for none.
            top_k_weights: Their shares, [tokens, k].

        Returns:
            [tokens, hidden_size].
        """
        total = torch.zeros_like(hidden_states)
        for number in torch.unique(top_k_index).tolist():
            if number == self.count:
                continue
            tokens, places = torch.where(top_k_index == number)
            gate, up, down = (getattr(self.get_submodule(str(number)), name) for name in self.parts)
            rows = hidden_states[tokens]
            inner = self.stacked._apply_gate(torch.cat([gate(rows), up(rows)], -1))
            found = down(inner) * top_k_weights[tokens, places, None]
            total.index_add_(0, tokens, found.to(total.dtype))
        return total


def are_stacked(stacked: Any) -> bool:
    """Whether a module holds the experts of a layer in the way that `AwqExperts` knows."""
    has = [getattr(stacked, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 3 for tensor in has):
        return False
    asked = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    told = all(getattr(stacked, name, expected) == expected for name, expected in asked.items())
    return told and not getattr(stacked, "has_post_expert_norm", False) and hasattr(stacked, "_apply_gate")
