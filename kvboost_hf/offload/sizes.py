"""How much memory a model takes, told from its configuration alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvboost_hf.compat import decoder_layers, feed_forward_name, kv_bytes_per_token
from kvboost_hf.config import StreamingConfig
from kvboost_hf.offload.flat import FlatLayout
from kvboost_hf.offload.plan import ModelSizes, ResidencyPlan, plan_residency
from kvboost_hf.offload.units import Unit

WORD = 8  # weights of four bits in an int32
SAMPLING_COPIES = 4  # of the last logits in float32: as they came, processed, sorted, as probabilities


def activation_bytes(config: PreTrainedConfig, tokens: int, dtype: torch.dtype) -> int:
    """What a forward of a prompt takes at its peak, in the feed-forward part of a layer.

    That is `tokens * (4 * hidden_size + 3 * intermediate_size) * itemsize`, for the embeddings, the input of the
    layer, the residual and the input of the part, and for its two projections beside their product; and 4 times the
    last logits in float32. A mask, the scores of eager attention, and experts of which several see each token come on
    top.

    Args:
        config: Of the model.
        tokens: Of the prompt.
        dtype: Of what the layers compute.
    """
    text: Any = config.get_text_config(decoder=True)
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    of_tokens = tokens * (4 * text.hidden_size + 3 * intermediate) * dtype.itemsize
    return int(of_tokens + SAMPLING_COPIES * text.vocab_size * torch.float32.itemsize)


def sizes_of(model: PreTrainedModel, units: Sequence[Unit], max_tokens: int) -> ModelSizes:
    """What a model takes; its tensors may be on the meta device.

    Args:
        model: Of which
        units: can be streamed,
        max_tokens: with a context of so many.
    """
    streamed = [unit.tensors() for unit in units]
    inside = {id(tensor) for tensors in streamed for tensor in tensors.values()}
    everything = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return ModelSizes(
        layer_bytes=tuple(FlatLayout(tensors).nbytes for tensors in streamed),
        other_bytes=sum(nbytes for key, nbytes in everything.items() if key not in inside),
        kv_bytes=max_tokens * kv_bytes_per_token(model.config, model.dtype),
        activation_bytes=activation_bytes(model.config, max_tokens, model.dtype),
    )


def estimate_sizes(
    config: PreTrainedConfig,
    streaming: StreamingConfig,
    *,
    bits: Literal[4, 16] = 4,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
) -> ModelSizes:
    """What a model takes, without its weights.

    With 4 bits the `nn.Linear` modules of decoder layers are counted as AWQ checkpoints hold them: words, zeros and
    scales, 0.5195 bytes a weight at a group size of 128. All else is counted in `dtype`: embeddings, head, norms,
    biases, and experts whose weights are stacked in one parameter.

    Args:
        config: Of a causal language model of transformers.
        streaming: What is asked for; `residency_mode` and `max_tokens` are used.
        bits: Of the weights of decoder layers.
        group_size: Rows that share a scale and a zero.
        dtype: Of what is not quantized, of K/V and of activations.

    Raises:
        ValueError: other bits, or no decoder layers, or feed-forward parts that cannot be told.
    """
    if bits not in (4, 16):
        raise ValueError(f"`bits` must be 4 or 16, got {bits!r}.")
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model: PreTrainedModel = build(config, dtype=dtype)
    layers = decoder_layers(model)
    if not layers:
        raise ValueError(f"The decoder layers of a {type(model).__name__} cannot be told, so none can be streamed.")
    streamed, staying = [], 0
    for layer in layers:
        tensors = _tensors(layer, group_size if bits == 4 else 0)
        if streaming.residency_mode == "ffn_only_stream":
            start = f"{feed_forward_name(layer)}."
            staying += FlatLayout({name: each for name, each in tensors.items() if not name.startswith(start)}).nbytes
            tensors = {name: each for name, each in tensors.items() if name.startswith(start)}
        streamed.append(FlatLayout(tensors).nbytes)
    inside = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
    outside = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if id(each) not in inside)
    return ModelSizes(
        layer_bytes=tuple(streamed),
        other_bytes=outside + staying,
        kv_bytes=streaming.max_tokens * kv_bytes_per_token(config, dtype),
        activation_bytes=activation_bytes(config, streaming.max_tokens, dtype),
    )


def what_fits(
    config: PreTrainedConfig,
    vram_budget: int | str,
    *,
    streaming: StreamingConfig | None = None,
    bits: Literal[4, 16] = 4,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
) -> ResidencyPlan:
    """Which layers of a model would stay on a device, without downloading it.

    Args:
        config: Of a causal language model of transformers, as `AutoConfig.from_pretrained()` gives it.
        vram_budget: As `StreamingConfig` has it.
        streaming: What else is asked for.
        bits: As `estimate_sizes` has it, and so `group_size` and `dtype`.

    Raises:
        ValueError: not even the slots fit into the budget, or as `estimate_sizes` does.

    Example:
        >>> from transformers import LlamaConfig
        >>> plan = what_fits(LlamaConfig(), "4GB", streaming=StreamingConfig(max_tokens=2048))
        >>> len(plan.resident), len(plan.in_host)
        (18, 14)
    """
    asked = replace(streaming or StreamingConfig(), vram_budget=vram_budget)
    sizes = estimate_sizes(config, asked, bits=bits, group_size=group_size, dtype=dtype)
    return plan_residency(sizes, asked, free_bytes=asked.vram_bytes)


def _tensors(layer: nn.Module, group_size: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer, on the meta device; with a group size, of its quantized form."""
    found = dict((*layer.named_parameters(), *layer.named_buffers()))
    for name, module in layer.named_modules() if group_size else ():
        if not isinstance(module, nn.Linear) or module.in_features % group_size or module.out_features % WORD:
            continue
        del found[f"{name}.weight"]
        rows, columns, groups = module.in_features, module.out_features, module.in_features // group_size
        with torch.device("meta"):
            found[f"{name}.qweight"] = torch.empty(rows, columns // WORD, dtype=torch.int32)
            found[f"{name}.qzeros"] = torch.empty(groups, columns // WORD, dtype=torch.int32)
            found[f"{name}.scales"] = torch.empty(groups, columns, dtype=torch.float16)
    return found
