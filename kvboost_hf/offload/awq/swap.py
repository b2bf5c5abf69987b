"""Replaces linear layers and experts of a model by those on AWQ weights."""

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
    """The AWQ settings of a checkpoint.

    Args:
        group_size: Rows that share a scale and a zero point.
        version: Layout of its tensors.
        config: Its whole quantization config.
    """

    group_size: int
    version: str
    config: dict[str, Any]

    @classmethod
    def of(cls, config: dict[str, Any]) -> "AwqSettings":
        """Read `quantization_config` of a checkpoint.

        Raises:
            ValueError: it is not AWQ, or an unknown variant.
        """
        method = str(config.get("quant_method"))
        if method != "awq":
            raise ValueError(
                f"The checkpoint is quantized with {method!r}; layers are streamed of AWQ checkpoints and of those "
                "that are not quantized. Load it with from_pretrained() as it is, without streaming."
            )
        bits = config.get("bits", config.get("w_bit", 4))
        group_size = config.get("group_size", config.get("q_group_size", 128))
        version = str(config.get("version", config.get("format", "gemm"))).lower()
        if config.get("backend") == "llm-awq":
            version = "llm-awq"
        if bits != 4 or group_size not in (32, 64, 128) or not config.get("zero_point", True):
            raise ValueError(
                f"AWQ weights must have 4 bits, groups of 32, 64 or 128 and zero points, got {bits} bits, groups of "
                f"{group_size} and zero_point={config.get('zero_point', True)}."
            )
        if version not in _VERSIONS:
            raise ValueError(f"The layout of AWQ weights must be one of {_VERSIONS}, got {version!r}.")
        return cls(group_size=group_size, version=version, config=config)

    def as_saved(self) -> dict[str, Any]:
        """The quantization config of a checkpoint that is saved from the loaded model."""
        return {**{k: v for k, v in self.config.items() if k not in ("format", "backend")}, "version": "gemm"}


def swap_linears(model: nn.Module, settings: AwqSettings, quantized: set[str], kernel: QuantKernel) -> None:
    """Replace the linear layers and experts that have AWQ weights in the checkpoint.

    Args:
        model: On the meta device.
        settings: Of the checkpoint.
        quantized: Names of the modules with AWQ weights.
        kernel: As `StreamingConfig` has it.

    Raises:
        ValueError: `quantized` is empty, or one of its modules is neither a linear layer nor an expert.
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
    """Prepare linear layers and experts to load a checkpoint of a layout."""
    for module in list(model.modules()):
        if isinstance(module, AwqLinear | AwqExperts):
            module.expect_(version)


def to_gemm(layer: nn.Module) -> None:
    """Convert the loaded weights of linear layers and experts to `gemm`."""
    for module in list(layer.modules()):
        if isinstance(module, AwqExperts) or (isinstance(module, AwqLinear) and module.version != "gemm"):
            module.to_gemm_()


def save_converted(module: nn.Module, converted: bool) -> None:
    """Choose whether `state_dict()` has AWQ weights as checkpoints have them, or the buffers as they are."""
    for each in module.modules():
        if isinstance(each, AwqLinear | AwqExperts):
            each._kvboost_hf_saves_converted = converted


def lay_out(module: nn.Module, device: torch.device) -> None:
    """Convert AWQ weights, which may be on the meta device, to the layout in which a device multiplies by them."""
    for each in list(module.modules()):
        if isinstance(each, AwqLinear | AwqExperts):
            each.lay_out_(device)
