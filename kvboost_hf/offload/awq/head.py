"""An output head whose weights are rounded to 8 bits, for CPUs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from kvboost_hf.offload.awq import built
from kvboost_hf.offload.awq.int4pack import load_operator
from kvboost_hf.offload.awq.linear import keeping_dtypes
from kvboost_hf.offload.awq.swap import untie

HEAD_GROUP = 64  # inputs that the operator rounds with one scale
_LARGEST = 127


class Int8Head(nn.Module):
    """A linear layer on weights of 8 bits, each output with a scale of its own.

    `state_dict()` has the rounded weights as `weight`, and `load_state_dict()` rounds those that it is given. Moves to
    another dtype leave the weights as they are.

    Args:
        linear: The layer whose weights are rounded. It stays as it is.

    Raises:
        ValueError: The layer's number of inputs is no multiple of 64.
    """

    codes: torch.Tensor  # int8 [out_features, in_features]
    scales: torch.Tensor  # float32 [out_features]
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        if self.in_features % HEAD_GROUP:
            raise ValueError(
                f"`head_bits` needs a head whose inputs are a multiple of {HEAD_GROUP}, got {self.in_features}. Pass "
                "None."
            )
        self._dtype = linear.weight.dtype
        codes, scales = rounded(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    @property
    def weight(self) -> torch.Tensor:
        """The rounded weights, [out_features, in_features], in the dtype of the layer that was rounded."""
        return (self.codes * self.scales[:, None]).to(self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the dtype of `x`."""
        taken = x.device.type == "cpu" and built.is_loaded() and x.dtype in built.DTYPES
        if not taken or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        rows = x.reshape(-1, self.in_features).contiguous()
        y: torch.Tensor = torch.ops.kvboost_hf.int8_mm.default(rows, self.codes, self.scales)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """The sizes that `print` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Int8Head":
        super()._apply(keeping_dtypes(fn, [self.codes, self.scales]), recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is not None:
            codes, scales = rounded(given)
            held = {key: value for key, value in state_dict.items() if key != f"{prefix}weight"}
            state_dict = {**held, f"{prefix}codes": codes, f"{prefix}scales": scales}
        super()._load_from_state_dict(state_dict, prefix, *args)


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights to 8 bits: the codes, int8 [out_features, in_features], and the scales, float32 [out_features]."""
    whole = weight.float()
    scales = whole.abs().amax(1) / _LARGEST
    codes = whole / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return codes.round().to(torch.int8), scales


def round_head(model: PreTrainedModel, device: torch.device) -> None:
    """Replace the head of a model by one in 8 bits. Input embeddings that it is tied to stay as they are.

    Raises:
        ValueError: the device is no CPU, the operators cannot be built, or the head is no linear layer.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not load_operator():
        raise ValueError(
            f"`head_bits` 8 needs a CPU with AVX2 and a C++ compiler, got device {str(device)!r}; the log says what "
            "is missing. Pass None."
        )
    if type(head) is not nn.Linear:
        raise ValueError(f"`head_bits` 8 needs a head that is a linear layer, got {type(head).__name__}. Pass None.")
    name = next(name for name, module in model.named_modules() if module is head)
    found = Int8Head(head).eval()
    untie(model, {name})
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, found)
