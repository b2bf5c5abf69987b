"""Linear layers on AWQ weights in place of a model's own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq.linear import AwqLinear

_VERSIONS = ("gemm", "gemv", "llm-awq")


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqSettings:
    """What a checkpoint says of its AWQ weights.

    Args:
        group_size: Rows that share a scale and a zero.
        version: Layout of its tensors.
        told: All that it says.
    """

    group_size: int
    version: str
    told: dict[str, Any]

    @classmethod
    def of(cls, told: dict[str, Any]) -> "AwqSettings":
        """Read `quantization_config` of a checkpoint.

        Raises:
            ValueError: it is not AWQ, or of a kind that is not known.
        """
        method = str(told.get("quant_method"))
        if method != "awq":
            raise ValueError(
                f"The checkpoint is quantized with {method!r}; layers are streamed of AWQ checkpoints and of those "
                "that are not quantized. Load it with from_pretrained() as it is, without streaming."
            )
        bits = told.get("bits", told.get("w_bit", 4))
        group_size = told.get("group_size", told.get("q_group_size", 128))
        version = str(told.get("version", told.get("format", "gemm"))).lower()
        if told.get("backend") == "llm-awq":
            version = "llm-awq"
        if bits != 4 or group_size not in (32, 64, 128) or not told.get("zero_point", True):
            raise ValueError(
                f"AWQ weights must have 4 bits, groups of 32, 64 or 128 and zero points, got {bits} bits, groups of "
                f"{group_size} and zero_point={told.get('zero_point', True)}."
            )
        if version not in _VERSIONS:
            raise ValueError(f"The layout of AWQ weights must be one of {_VERSIONS}, got {version!r}.")
        return cls(group_size=group_size, version=version, told=told)

    def as_saved(self) -> dict[str, Any]:
        """What a checkpoint says that is saved of the loaded model."""
        return {**{k: v for k, v in self.told.items() if k not in ("format", "backend")}, "version": "gemm"}


def swap_linears(model: nn.Module, settings: AwqSettings, quantized: set[str], kernel: QuantKernel) -> None:
    """Put an `AwqLinear` in place of each linear layer with quantized weights.

    Args:
        model: On the meta device.
        settings: Of the checkpoint.
        quantized: Names of the modules whose weights it has.
        kernel: As `StreamingConfig` has it.

    Raises:
        ValueError: there are none, or one of them is no linear layer.
    """
    if not quantized:
        raise ValueError(
            "config.json says that the checkpoint is AWQ's, but it has no tensor that ends in 'qweight'. Its files are "
            "those of another checkpoint."
        )
    for name in sorted(quantized):
        parent, _, attribute = name.rpartition(".")
        try:
            linear = model.get_submodule(name)
        except AttributeError:
            linear = None
        if not isinstance(linear, nn.Linear):
            raise ValueError(
                f"{name} has AWQ weights in the checkpoint, but is no linear layer in {type(model).__name__}: experts "
                "that transformers keeps in one tensor cannot be loaded this way."
            )
        with torch.device("meta"):
            swapped = AwqLinear(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                group_size=settings.group_size,
                quant_kernel=kernel,
                version=settings.version,
            )
        setattr(model.get_submodule(parent), attribute, swapped.train(linear.training))
