"""Computes how much memory a model takes, from the model or from its configuration alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvboost_hf.compat import decoder_layers, kv_bytes_per_token, loader_of
from kvboost_hf.config import StreamingConfig
from kvboost_hf.offload.awq.experts import EXPERT_PARTS, AwqExperts, are_stacked
from kvboost_hf.offload.awq.formats import PackedFormat
from kvboost_hf.offload.awq.linear import AwqLinear
from kvboost_hf.offload.awq.swap import swap_linears
from kvboost_hf.offload.awq.tiling import scratch_bytes, scratch_columns
from kvboost_hf.offload.plan import ModelSizes, ResidencyPlan, plan_residency
from kvboost_hf.offload.units import Holder, Unit, find_units, input_embeddings, parts_of

WORD = 8  # weights of four bits in an int32
CUBLAS_BYTES = 32 << 20  # of PyTorch's workspace for cuBLAS on an H100; on older GPUs it takes a quarter
SAMPLING_COPIES = 4  # of the last logits in float32: raw, processed, sorted, as probabilities


def activation_bytes(config: PreTrainedConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of activations of a prompt's forward at its peak, in the feed-forward part of a layer.

    These are `tokens * (4 * hidden_size + 3 * intermediate_size) * itemsize`, for the embeddings, the input of the
    layer, the residual and the input of the part, and for its two projections and their product; and 4 times the last
    logits in float32. A mask, the scores of eager attention, and several experts per token are not included.

    Args:
        config: The configuration of the model.
        tokens: The number of tokens of the prompt.
        dtype: The dtype in which the layers compute.
    """
    text: Any = config.get_text_config(decoder=True)
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    widest = intermediate if isinstance(intermediate, int) else max(intermediate)  # of each layer, in Gemma 3n
    of_tokens = tokens * (4 * text.hidden_size + 3 * widest) * dtype.itemsize
    vocab_size = getattr(text, "vocab_size", 0)  # models of images have none
    return int(of_tokens + SAMPLING_COPIES * vocab_size * torch.float32.itemsize)


def workspace_bytes(model: nn.Module, dtype: torch.dtype, tokens: int, *, triton: bool = True) -> int:
    """Bytes of workspaces of matrix products on a GPU.

    These are PyTorch's workspace for cuBLAS, and the scratch memory of the product by the largest 4-bit weight, since
    products run one after the other: for Triton's kernels the columns that are dequantized at a time for a prompt, for
    PyTorch's operations `cpu.scratch_bytes`.

    Args:
        model: The model; its linear layers and experts may be on the meta device.
        dtype: The dtype in which the layers compute.
        tokens: The number of tokens of the prompt.
        triton: Whether Triton's kernels multiply by 4-bit weights.
    """
    shapes: list[tuple[int, int, int]] = []
    for module in model.modules():
        if isinstance(module, AwqLinear):
            shapes.append((module.in_features, module.out_features, module.group_size))
        elif isinstance(module, AwqExperts):
            shapes += [(*size, module.stored[part].gemm_group_size) for part, size in module.parts.items()]
    if triton:
        size = dtype.itemsize
        scratch = [size * rows * scratch_columns(rows, columns, size) for rows, columns, _ in shapes]
    else:
        scratch = [scratch_bytes(tokens, *shape) for shape in shapes]
    return CUBLAS_BYTES + max(scratch, default=0)


def sizes_of(
    model: PreTrainedModel,
    units: Sequence[Unit],
    streaming: StreamingConfig,
    embeddings: Holder | None = None,
    *,
    gpu: bool,
    triton: bool = True,
) -> ModelSizes:
    """The sizes of a model, whose tensors may be on the meta device.

    Args:
        model: As it will be loaded.
        units: The part of each layer that can be streamed.
        streaming: The settings of streaming, which say how many tokens there are in the context and in one forward.
        embeddings: The input embeddings, if they may stay in host memory.
        gpu: Whether the device is a GPU.
        triton: Whether Triton's kernels multiply by 4-bit weights there.
    """
    waiting = None if embeddings is None else embeddings.get()
    inside = {id(tensor) for unit in units for tensor in unit.tensors().values()}
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})  # while a model is loaded, still two tensors
    parameters = [parameter for name, parameter in model.named_parameters() if name not in ties]
    held = (part for tensor in (*parameters, *model.buffers()) for part in parts_of(tensor, ""))
    everything = {id(tensor): tensor.nbytes for _, tensor in held}
    return ModelSizes(
        layer_bytes=tuple(unit.layout().nbytes for unit in units),
        other_bytes=sum(nbytes for key, nbytes in everything.items() if key not in inside),
        kv_bytes=streaming.max_tokens * kv_bytes_per_token(model.config, model.dtype),
        activation_bytes=activation_bytes(model.config, streaming.forward_tokens, model.dtype),
        embedding_bytes=0 if waiting is None else waiting.nbytes,
        workspace_bytes=workspace_bytes(model, model.dtype, streaming.forward_tokens, triton=triton) if gpu else 0,
        counted_for=_counted_for(model, gpu=gpu),
    )


def _counted_for(model: nn.Module, *, gpu: bool) -> str:
    packed = any(isinstance(module, AwqLinear | AwqExperts) for module in model.modules())
    dtype = f"{model.dtype}".removeprefix("torch.")
    return f"On {'a GPU' if gpu else 'a CPU'}, weights in {f'4 bits, all else in {dtype}' if packed else dtype}:"


def estimate_sizes(
    config: PreTrainedConfig,
    streaming: StreamingConfig,
    *,
    bits: Literal[4, 16] | None = None,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cuda",
) -> ModelSizes:
    """The sizes of a model on a device, without its weights.

    With 4 bits the linear layers and experts of decoder layers are counted as streaming keeps them: words, zeros and
    scales, 0.5195 bytes a weight at a group size of 128. Embeddings, head, norms, biases, and what the configuration
    of a quantized checkpoint leaves out, are counted in `dtype`.

    Args:
        config: The configuration of a causal language model of transformers.
        streaming: The settings; the mode, the numbers of tokens and `host_embeddings` are used.
        bits: Bits of a weight in decoder layers; None for 4 if the checkpoint of the configuration has 4, else 16.
        group_size: Rows that share a scale and a zero point; None for that of the checkpoint, or 128.
        dtype: The dtype of weights that are not quantized, of K/V and of activations; None for that of the
            configuration, or float16 where it names none.
        device: The device that computes, which need not be there: a GPU, or `"cpu"`.

    Raises:
        ValueError: no decoder of text, other bits, 4 for a model without weights that can be packed, a checkpoint that
            is quantized in another way, or as `find_units` does.
    """
    dtype = dtype or (config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16)
    stored: Any = getattr(config, "quantization_config", None)
    packed = _own_format(stored, bits)
    bits = bits if bits is not None else 16 if packed is None else 4
    if packed is None or group_size is not None:
        packed = PackedFormat.awq(group_size or 128)
    if bits not in (4, 16):
        raise ValueError(f"`bits` must be 4 or 16, got {bits!r}.")
    build = loader_of(config).from_config
    with torch.device("meta"):
        model: PreTrainedModel = build(config, dtype=dtype)
    layers = decoder_layers(model)
    if bits == 4:
        inside = {id(module) for layer in layers for module in layer.modules()}
        found = {
            name
            for name, module in model.named_modules()
            if id(module) in inside and isinstance(module, nn.Linear) and _is_packed(name, module, packed)
        }
        experts = {
            f"{name}.0.{EXPERT_PARTS[0][0]}"
            for name, module in model.named_modules()
            if id(module) in inside and are_stacked(module)
        }
        found |= {name for name in experts if packed.packs(name)}
        if not found:
            raise ValueError(
                f"`bits` must be 16 for {type(model).__name__}, got 4: its decoder layers have no linear layer whose "
                f"rows are a multiple of {packed.group_sizes or 32}."
            )
        swap_linears(model, packed, {name: {} for name in found}, "auto")
    units = find_units(model, layers, ffn_only=streaming.residency_mode == "ffn_only_stream")
    gpu = _is_gpu(device)
    embeddings = input_embeddings(model) if gpu and streaming.host_embeddings else None
    return sizes_of(model, units, streaming, embeddings, gpu=gpu)


def _is_gpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def what_fits(
    config: PreTrainedConfig,
    vram_budget: int | str,
    *,
    streaming: StreamingConfig | None = None,
    bits: Literal[4, 16] | None = None,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cuda",
) -> ResidencyPlan:
    """Which layers of a model would stay on a device, without downloading it.

    The plan is the one that `load_streamed()` makes for the same settings, device and dtype.

    Args:
        config: The configuration of a causal language model, as `AutoConfig.from_pretrained()` returns it.
        vram_budget: As `StreamingConfig` has it.
        streaming: Further settings.
        bits: As `estimate_sizes` has it, and so `group_size` and `dtype`.
        device: The device that computes, which need not be there. On a `"cpu"`, layers that do not stay are read from
            files: `streaming` must name a `disk_folder`.

    Raises:
        ValueError: not even the slots fit into the budget, or as `estimate_sizes` does.

    Example:
        >>> from transformers import LlamaConfig
        >>> plan = what_fits(LlamaConfig(), "4GB", bits=4, streaming=StreamingConfig(max_tokens=2048))
        >>> len(plan.resident), len(plan.in_host)
        (20, 12)
    """
    asked = replace(streaming or StreamingConfig(), vram_budget=vram_budget)
    sizes = estimate_sizes(config, asked, bits=bits, group_size=group_size, dtype=dtype, device=device)
    return plan_residency(sizes, asked, free_bytes=asked.vram_bytes if _is_gpu(device) else None)


def _own_format(stored: Any, bits: int | None) -> PackedFormat | None:
    """The format of a checkpoint in 4 bits, unless other weights are planned for, or it cannot be streamed."""
    if stored is None or bits not in (None, 4):
        return None
    try:
        return PackedFormat.of(stored)
    except ValueError:
        if bits is None:
            raise
        return None


def _is_packed(name: str, linear: nn.Linear, packed: PackedFormat) -> bool:
    stored = packed.stored(linear.in_features, {})
    aligned = linear.in_features % stored.group_size == stored.group_size % 32 == linear.out_features % WORD == 0
    return aligned and packed.packs(name)
