"""Linear layers on AWQ weights in place of a model's own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq.experts import EXPERT_PARTS, AwqExperts
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
    """Put linear layers on AWQ weights in place of those, and of those experts, that have them in the checkpoint.

    Args:
        model: On the meta device.
        settings: Of the checkpoint.
        quantized: Names of the modules whose weights it has.
        kernel: As `StreamingConfig` has it.

    Raises:
        ValueError: there are none, or one of them is neither a linear layer nor an expert.
    """
    if not quantized:
        raise ValueError(
            "config.json says that the checkpoint is AWQ's, but none of its tensors ends in 'qweight'. Its files are "
            "those of another checkpoint."
        )

    given: Any = {"group_size": settings.group_size, "quant_kernel": kernel}
    modules = dict(model.named_modules())
    experts: dict[str, tuple[str, str, str]] = {}
    for name in sorted(quantized):
        parent, _, attribute = name.rpartition(".")
        linear = modules.get(name)
        if isinstance(linear, nn.Linear):
            with torch.device("meta"):
                swapped = AwqLinear(linear.in_features, linear.out_features, bias=linear.bias is not None, **given)
            setattr(modules[parent], attribute, swapped.eval())
            continue
        stacked, _, number = parent.rpartition(".")
        parts = next((parts for parts in EXPERT_PARTS if attribute in parts), None)
        if parts is None or not number.isdigit() or stacked not in modules:
            raise ValueError(
                f"{name} has AWQ weights in the checkpoint, and is no linear layer in {type(model).__name__}. "
                "Use a checkpoint of this model that is not quantized."
            )
        experts[stacked] = parts
    for name, parts in experts.items():
        parent, _, attribute = name.rpartition(".")
        setattr(modules[parent], attribute, AwqExperts(modules[name], parts, **given).eval())


def expect_version(model: nn.Module, version: str) -> None:
    """Have linear layers and experts take what a checkpoint has."""
    for module in list(model.modules()):
        if isinstance(module, AwqLinear | AwqExperts):
            module.expect_(version)


def to_gemm(layer: nn.Module) -> None:
    """Have them multiply by what has been loaded."""
    for module in list(layer.modules()):
        if isinstance(module, AwqExperts) or (isinstance(module, AwqLinear) and module.version != "gemm"):
            module.to_gemm_()
