"""Mixture-of-experts layers on 4-bit weights, stacked from the separate experts of a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq.int4pack import load_operator, order_name
from kvboost_hf.offload.awq.layout import StoredWeight
from kvboost_hf.offload.awq.linear import WEIGHT, AwqLinear, keeping_dtypes
from kvboost_hf.offload.awq.matmul import awq_matmul, wants_int4pack

# Names of the parts of an expert in checkpoints: gate, up, down.
EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_BUFFERS = (*WEIGHT, "order")


class AwqExperts(nn.Module):
    """Replaces the experts of one layer.

    Buffers, for each part of an expert: `<part>_qweight`, `<part>_qzeros`, `<part>_scales` and, if its weights have
    them, `<part>_scales_and_zeros` and `<part>_order`, as in `AwqLinear` with a first dimension of experts.
    `state_dict()` names each expert separately, as checkpoints do.

    Args:
        stacked: The experts of transformers, on the meta device; they lose their weights.
        stored: How the checkpoint holds gate, up and down, in this order, by their names there.
        quant_kernel: As `StreamingConfig` has it.

    Raises:
        ValueError: the experts are not stacked in a known way.
    """

    code_order: str | None = None  # as in `AwqLinear`
    _kvboost_hf_saves_converted = True  # as in `AwqLinear`

    def __init__(self, stacked: Any, stored: Mapping[str, StoredWeight], *, quant_kernel: QuantKernel) -> None:
        super().__init__()
        hidden, _, inner = expert_rows(stacked)
        self.count = len(stacked.down_proj)
        self.parts = dict(zip(stored, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True))
        self.stored, self.quant_kernel = dict(stored), quant_kernel
        stacked.gate_up_proj = stacked.down_proj = None
        self.stacked = stacked
        for part in self.parts:
            self._stack(part, [self._linear(part)] * self.count)

    def expect_(self) -> None:
        """Create a linear layer for each part of each expert, on the meta device, to load a checkpoint into.

        Raises:
            ValueError: sizes that do not fit the layout, or an unknown one.
        """
        self._buffers.clear()
        for number in range(self.count):
            expert = nn.Module()
            for part in self.parts:
                linear = self._linear(part)
                linear.expect_()
                expert.add_module(part, linear)
            self.add_module(str(number), expert)

    def to_gemm_(self) -> int:
        """Stack the weights loaded since `expect_`.

        Returns:
            The number of scales that were rounded to float16.

        Raises:
            ValueError: as `AwqLinear.to_gemm_` does.
        """
        rounded = 0
        if "0" not in self._modules:  # they are stacked
            return rounded
        for part in self.parts:
            linears: list[Any] = [self.get_submodule(f"{number}.{part}") for number in range(self.count)]
            for linear in linears:
                rounded += linear.to_gemm_()
            self._stack(part, linears)
            for number in range(self.count):
                delattr(self.get_submodule(str(number)), part)
        for number in range(self.count):
            delattr(self, str(number))
        return rounded

    def save_converted_(self, converted: bool) -> None:
        """Choose whether `state_dict()` has weights as checkpoints have them, or the buffers as they are."""
        self._kvboost_hf_saves_converted = converted

    def lay_out_(self, device: torch.device) -> None:
        """Convert the stacked weights to the layout in which a device multiplies by them, as `AwqLinear.lay_out_`."""
        for part, (_, out_features) in self.parts.items():
            wanted = wants_int4pack(self.quant_kernel, device, out_features)
            if f"{part}_qweight" not in self._buffers or wanted == (f"{part}_scales_and_zeros" in self._buffers):
                continue
            linears = [self._expert(number, part) for number in range(self.count)]
            for linear in linears:
                linear.lay_out_(device)
            self._stack(part, linears)
        self.code_order = order_name() if any(name.endswith("scales_and_zeros") for name in self._buffers) else None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum the outputs of the experts chosen for each token.

        Args:
            hidden_states: [tokens, hidden_size].
            top_k_index: Experts of each token, [tokens, k]; `count` stands for none.
            top_k_weights: The shares of the experts, [tokens, k].

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
        stored = self.stored[part]
        given: Any = {"group_size": stored.gemm_group_size, "stored": stored, "quant_kernel": self.quant_kernel}
        with torch.device("meta"):
            return AwqLinear(*self.parts[part], bias=False, **given)

    def _expert(self, number: int, part: str) -> AwqLinear:
        """A linear layer on the weights of one expert, which are views."""
        linear = self._linear(part)
        linear.code_order = self.code_order
        found = {name: self._buffers.get(f"{part}_{name}") for name in _BUFFERS}
        held = {name: stacked[number] for name, stacked in found.items() if stacked is not None}
        linear.order = held.pop("order", None)
        linear.hold_("int4pack" if "scales_and_zeros" in held else "gemm", held)
        return linear

    def _stack(self, part: str, linears: Sequence[AwqLinear]) -> None:
        for name in _BUFFERS:
            self._buffers.pop(f"{part}_{name}", None)
        for name, _ in linears[0].named_buffers():
            self.register_buffer(f"{part}_{name}", torch.stack([linear.get_buffer(name) for linear in linears]))

    def _times(self, rows: torch.Tensor, part: str, number: int) -> torch.Tensor:
        held: dict[str, Any] = self._buffers
        qweight, qzeros, scales = (held[f"{part}_{name}"][number] for name in WEIGHT[:3])
        pairs, order = held.get(f"{part}_scales_and_zeros"), held.get(f"{part}_order")
        if order is not None:
            rows = rows.index_select(1, order[number])
        return awq_matmul(rows, qweight, qzeros, scales, self.quant_kernel, None if pairs is None else pairs[number])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "AwqExperts":
        before = {tensor.device for tensor in self._buffers.values() if tensor is not None}
        super()._apply(keeping_dtypes(fn, list(self._buffers.values())), recurse)  # type: ignore[no-untyped-call]
        now = {tensor.device for tensor in self._buffers.values() if tensor is not None}
        if before != now and len(now) == 1 and torch.device("meta") not in now:
            self.lay_out_(now.pop())
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self._buffers or not self._kvboost_hf_saves_converted:
            return
        for number in range(self.count):
            for part in self.parts:
                linear = self._expert(number, part)
                linear._save_to_state_dict(destination, f"{prefix}{number}.{part}.", keep_vars)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.code_order is not None:
            load_operator()
        if self.code_order not in (None, order_name()):  # pickled on another kind of processor
            for part in self.parts:
                linears = [self._expert(number, part) for number in range(self.count)]
                for linear in linears:
                    linear.to_gemm_()
                self._stack(part, linears)
            self.lay_out_(torch.device("cpu"))


def expert_rows(stacked: Any) -> tuple[int, int, int]:
    """Features that gate, up and down of the experts of a layer take.

    Raises:
        ValueError: the experts are not stacked in a known way.
    """
    if not are_stacked(stacked):
        raise ValueError(
            f"Experts on 4-bit weights must have a gate and no biases, as those of Qwen3-MoE and Mixtral; "
            f"{type(stacked).__name__} is of another kind. Use a checkpoint that is not quantized."
        )
    _, hidden, inner = stacked.down_proj.shape
    return hidden, hidden, inner


def are_stacked(stacked: Any) -> bool:
    """Whether `AwqExperts` can replace a module of experts."""
    has = [getattr(stacked, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 3 for tensor in has):
        return False
    asked = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    known = all(getattr(stacked, name, expected) == expected for name, expected in asked.items())
    return known and not getattr(stacked, "has_post_expert_norm", False) and hasattr(stacked, "_apply_gate")
