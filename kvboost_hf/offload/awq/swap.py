"""Replaces linear layers and experts of a model by those on 4-bit weights."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq.experts import EXPERT_PARTS, AwqExperts, expert_rows
from kvboost_hf.offload.awq.formats import PackedFormat, Shapes
from kvboost_hf.offload.awq.layout import StoredWeight
from kvboost_hf.offload.awq.linear import AwqLinear


def swap_linears(model: nn.Module, packed: PackedFormat, quantized: Mapping[str, Shapes], kernel: QuantKernel) -> None:
    """Replace the linear layers and experts that have 4-bit weights in the checkpoint.

    Args:
        model: On the meta device.
        packed: The format of the checkpoint.
        quantized: The tensors of each packed weight, by the name of its module.
        kernel: As `StreamingConfig` has it.

    Raises:
        ValueError: `quantized` is empty, or one of its modules is neither a linear layer nor an expert.
    """
    if not quantized:
        raise ValueError(
            f"config.json says that the weights of the checkpoint are packed by {packed.method}, but "
            f"none of its tensors ends in {packed.words!r}. Its files are those of another checkpoint."
        )
    untie(model, quantized)
    modules = dict(model.named_modules())
    experts: dict[str, dict[str, list[Shapes]]] = {}
    for name in sorted(quantized):
        parent, _, attribute = name.rpartition(".")
        linear = modules.get(name)
        if isinstance(linear, nn.Linear):
            stored = packed.stored(linear.in_features, quantized[name])
            setattr(modules[parent], attribute, _swapped(linear, stored, kernel))
            continue
        stacked, _, number = parent.rpartition(".")
        if not any(attribute in parts for parts in EXPERT_PARTS) or not number.isdigit() or stacked not in modules:
            raise ValueError(
                f"{name} has 4-bit weights in the checkpoint, and is no linear layer in {type(model).__name__}. "
                "Use a checkpoint of this model that is not quantized."
            )
        experts.setdefault(stacked, {}).setdefault(attribute, []).append(quantized[name])
    for name, found in experts.items():
        parent, _, attribute = name.rpartition(".")
        parts = next(parts for parts in EXPERT_PARTS if found.keys() & {*parts})
        sizes = zip(parts, expert_rows(modules[name]), strict=True)
        alike = {part: _alike(f"{name}.*.{part}", packed, rows, found.get(part, [])) for part, rows in sizes}
        setattr(modules[parent], attribute, AwqExperts(modules[name], alike, quant_kernel=kernel).eval())


def untie(model: nn.Module, quantized: Iterable[str]) -> None:
    """Give packed linear layers weights of their own, such as a head, where the configuration ties them to others."""
    for prefix, owner in model.named_modules():
        ties: dict[str, str] = vars(owner).get("all_tied_weights_keys", {})
        packed = {tied for tied in ties if f"{prefix}.{tied}".lstrip(".").removesuffix(".weight") in quantized}
        for tied in packed:
            del ties[tied]
        if packed and isinstance(owner, PreTrainedModel):
            for config in (owner.config, owner.config.get_text_config(decoder=True)):
                config.tie_word_embeddings = False


def expect_stored(model: nn.Module) -> None:
    """Prepare linear layers and experts to load a checkpoint."""
    for module in list(model.modules()):
        if isinstance(module, AwqLinear | AwqExperts):
            module.expect_()


def to_gemm(layer: nn.Module) -> int:
    """Convert the loaded weights of linear layers and experts to `gemm`.

    Returns:
        The number of scales that were rounded to float16.

    Raises:
        ValueError: a weight cannot be converted.
    """
    rounded = 0
    for name, module in list(layer.named_modules()):
        if isinstance(module, AwqExperts) or (isinstance(module, AwqLinear) and module.version != "int4pack"):
            try:
                rounded += module.to_gemm_()
            except ValueError as error:
                raise ValueError(f"{name} of {type(layer).__name__} cannot be streamed: {error}") from error
    return rounded


def save_converted(module: nn.Module, converted: bool) -> None:
    """Choose whether `state_dict()` has AWQ weights as checkpoints have them, or the buffers as they are."""
    for each in module.modules():
        if isinstance(each, AwqLinear | AwqExperts):
            each.save_converted_(converted)


def lay_out(module: nn.Module, device: torch.device) -> None:
    """Convert AWQ weights, which may be on the meta device, to the layout in which a device multiplies by them."""
    for each in list(module.modules()):
        if isinstance(each, AwqLinear | AwqExperts):
            each.lay_out_(device)


def awq_config(model: nn.Module, packed: PackedFormat) -> tuple[dict[str, Any], str | None]:
    """The quantization config of the AWQ checkpoint that is saved from a model.

    Returns:
        The config, and None; or that of the checkpoint and the reason why no AWQ checkpoint can hold the weights.
    """
    if packed.is_awq:
        return {**{k: v for k, v in packed.config.items() if k not in ("format", "backend")}, "version": "gemm"}, None
    stored: list[StoredWeight] = []
    kept: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, AwqLinear):
            stored.append(module.stored)
        elif isinstance(module, AwqExperts):
            stored += module.stored.values()
        elif isinstance(module, nn.Linear):
            kept.append(name)
    sizes = sorted({each.gemm_group_size for each in stored})
    if any(each.ordered for each in stored):
        return packed.config, "An AWQ checkpoint has no place for an index of groups (desc_act, actorder)."
    if len(sizes) > 1:
        return packed.config, f"An AWQ checkpoint has groups of one size, and this model has some of {sizes}."
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": sizes[0],
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": kept,
    }, None


def _swapped(linear: nn.Linear, stored: StoredWeight, kernel: QuantKernel) -> AwqLinear:
    with torch.device("meta"):
        swapped = AwqLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            group_size=stored.gemm_group_size,
            quant_kernel=kernel,
            stored=stored,
        )
        if linear.bias is not None:  # which is not rounded to another dtype than it would have in the model
            swapped.to(linear.bias.dtype)
    return swapped.eval()


def _alike(name: str, packed: PackedFormat, rows: int, shapes: Sequence[Shapes]) -> StoredWeight:
    """How a part of all experts of a layer is stored."""
    found = {packed.stored(rows, each) for each in shapes} or {packed.stored(rows, {})}
    if len(found) > 1:
        raise ValueError(
            f"{name} must have the same groups in all experts, got {sorted(map(str, found))}. Use a checkpoint of "
            "this model whose experts are quantized alike."
        )
    return found.pop()
