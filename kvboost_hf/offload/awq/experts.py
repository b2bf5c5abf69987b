"""Mixture-of-experts layers on AWQ weights, stacked from the separate experts of a checkpoint."""

from typing import Any

import torch
from torch import nn

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq.linear import AwqLinear
from kvboost_hf.offload.awq.matmul import awq_matmul

# Names of the parts of an expert in checkpoints: gate, up, down.
EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_BUFFERS = ("qweight", "qzeros", "scales")


class AwqExperts(nn.Module):
    """Replaces the experts of one layer.

    Buffers, for each part of an expert: `<part>_qweight`, `<part>_qzeros` and `<part>_scales`, as in `AwqLinear` with
    a first dimension of experts. `state_dict()` names each expert separately, as checkpoints do.

    Args:
        stacked: The experts of transformers, on the meta device; they lose their weights.
        parts: Names of gate, up and down in the checkpoint.
        group_size: Rows that share a scale and a zero.
        quant_kernel: As `StreamingConfig` has it.

    Raises:
        ValueError: the experts are not stacked in a known way.
    """

    def __init__(
        self, stacked: Any, parts: tuple[str, str, str], *, group_size: int, quant_kernel: QuantKernel
    ) -> None:
        super().__init__()
        if not are_stacked(stacked):
            raise ValueError(
                f"Experts on AWQ weights must have a gate and no biases, as those of Qwen3-MoE and Mixtral; "
                f"{type(stacked).__name__} is of another kind. Use a checkpoint that is not quantized."
            )
        self.count, hidden, inner = stacked.down_proj.shape
        sizes = ((hidden, inner), (hidden, inner), (inner, hidden))
        self.parts = dict(zip(parts, sizes, strict=True))
        self.group_size, self.quant_kernel = group_size, quant_kernel
        stacked.gate_up_proj = stacked.down_proj = None
        self.stacked = stacked
        for part in self.parts:
            linear = self._linear(part)
            for name in _BUFFERS:
                one = getattr(linear, name)
                self.register_buffer(f"{part}_{name}", one.new_empty(self.count, *one.shape))

    def expect_(self, version: str) -> None:
        """Create a linear layer for each part of each expert, on the meta device, to load a checkpoint into.

        Raises:
            ValueError: sizes that do not fit the layout, or an unknown one.
        """
        for part in self.parts:
            for name in _BUFFERS:
                del self._buffers[f"{part}_{name}"]
        for number in range(self.count):
            expert = nn.Module()
            for part in self.parts:
                linear = self._linear(part)
                linear.expect_(version)
                expert.add_module(part, linear)
            self.add_module(str(number), expert)

    def to_gemm_(self) -> None:
        """Stack the weights loaded since `expect_`."""
        for part in self.parts:
            linears = [self.get_submodule(f"{number}.{part}") for number in range(self.count)]
            for linear in linears:
                assert isinstance(linear, AwqLinear)
                linear.to_gemm_()
            for name in _BUFFERS:
                self.register_buffer(f"{part}_{name}", torch.stack([getattr(linear, name) for linear in linears]))
            for number in range(self.count):
                delattr(self.get_submodule(str(number)), part)
        for number in range(self.count):
            delattr(self, str(number))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum the outputs of the experts chosen for each token.

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
            gate, up, down = self.parts
            rows = hidden_states[tokens]
            inner = torch.cat([self._times(rows, gate, number), self._times(rows, up, number)], -1)
            found = self._times(self.stacked._apply_gate(inner), down, number)
            total.index_add_(0, tokens, (found * top_k_weights[tokens, places, None]).to(total.dtype))
        return total

    def _linear(self, part: str) -> AwqLinear:
        with torch.device("meta"):
            return AwqLinear(*self.parts[part], bias=False, group_size=self.group_size, quant_kernel=self.quant_kernel)

    def _times(self, rows: torch.Tensor, part: str, number: int) -> torch.Tensor:
        qweight, qzeros, scales = (getattr(self, f"{part}_{name}")[number] for name in _BUFFERS)
        return awq_matmul(rows, qweight, qzeros, scales, self.quant_kernel)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for number in range(self.count):
            for part in self.parts:
                for name in _BUFFERS:
                    stacked = self._buffers.get(f"{part}_{name}")
                    if stacked is not None:
                        destination[f"{prefix}{number}.{part}.{name}"] = stacked[number]


def are_stacked(stacked: Any) -> bool:
    """Whether `AwqExperts` can replace a module of experts."""
    has = [getattr(stacked, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 3 for tensor in has):
        return False
    asked = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    known = all(getattr(stacked, name, expected) == expected for name, expected in asked.items())
    return known and not getattr(stacked, "has_post_expert_norm", False) and hasattr(stacked, "_apply_gate")
