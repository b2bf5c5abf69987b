"""Writing AWQ checkpoints by plain rounding, or of random weights: for tests and benchmarks.

Plain rounding is not the AWQ of the paper, which first scales channels by what activations need. To quantize a model
for use, take GPTQModel (https://github.com/ModelCloud/GPTQModel) or llm-compressor
(https://github.com/vllm-project/llm-compressor).
"""

import copy
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from kvboost_hf.compat import decoder_layers
from kvboost_hf.offload.awq.layout import Packed, layout_of, pack

_STD = 0.02  # of random weights
_SPREAD = 4.64  # standard deviation of a random level less a zero of 7 or 8
_AT_ONCE = 1 << 24  # random numbers that are in memory
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
}  # of dtypes in safetensors files


def quantize_awq(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    group_size: int = 128,
    zero_point: bool = True,
    skip: Sequence[str] = ("lm_head",),
    head: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Round the linear layers inside a model's decoder layers to four bits, and write an AWQ checkpoint.

    Args:
        model: Any model of transformers; it stays as it is.
        folder: Where to write.
        group_size: Rows that share a scale and a zero: 32, 64 or 128.
        zero_point: Whether a group has the range from its least to its largest weight; else one around zero.
        skip: Names of modules that stay as they are, such as the routers of experts, as `modules_to_not_convert` of
            transformers has them.
        head: Whether to round the output embeddings, too, which few tools do: errors of theirs reach all logits. Input
            embeddings that they are tied to stay as they are.
        max_shard_size: The largest size of a file, in bytes or as text.

    Raises:
        ValueError: the decoder layers of the model cannot be told, or the sizes of a linear layer do not fit.
    """

    def packed(linear: nn.Linear) -> Mapping[str, torch.Tensor]:
        return quantize(linear.weight, group_size=group_size, zero_point=zero_point)._asdict()

    chosen = _chosen(model, skip, group_size, head)
    written = copy.copy(model)
    written.config = _config(model, chosen, group_size, zero_point)
    written.save_pretrained(folder, state_dict=_state(model, chosen, packed), max_shard_size=max_shard_size)


def quantize(weight: torch.Tensor, *, group_size: int, zero_point: bool = True) -> Packed:
    """Round one weight to four bits.

    Args:
        weight: [out_features, in_features], as `nn.Linear` has it.
        group_size: As in `quantize_awq`.
        zero_point: As in `quantize_awq`.
    """
    groups = weight.detach().float().T.reshape(-1, group_size, len(weight))
    least, most = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    steps = (most - least) / 15 if zero_point else torch.maximum(most / 7, -least / 8)
    scales = steps.clamp(min=torch.finfo(torch.float16).tiny).half()
    zeros = (-least / scales.float()).round().clamp(0, 15) if zero_point else torch.full_like(least, 8)
    levels = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return Packed(pack(levels.flatten(0, 1).to(torch.uint8)), pack(zeros.to(torch.uint8)), scales)


def write_random_awq(
    config: PreTrainedConfig,
    folder: str | Path,
    *,
    group_size: int = 128,
    seed: int = 0,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write an AWQ checkpoint of random weights with a standard deviation of about 0.02.

    Numbers go to the files as they are drawn: memory does not grow with the model.

    Args:
        config: The config of a causal language model; what is not packed has its dtype, or float16.
        folder: Where to write.
        group_size: Rows that share a scale and a zero: 32, 64 or 128.
        seed: The seed of all numbers.
        max_shard_size: The largest size of a file, in bytes or as text.

    Raises:
        ValueError: as `quantize_awq`.
    """

    def packed(linear: nn.Linear) -> Mapping[str, torch.Tensor]:
        layout = layout_of("gemm", linear.in_features, linear.out_features, group_size)
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in layout.items()}

    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=config.dtype or torch.float16)
    chosen = _chosen(model, ("lm_head",), group_size)
    state = _state(model, chosen, packed)
    for tied in model.all_tied_weights_keys:
        state.pop(tied, None)

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _config(model, chosen, group_size, zero_point=True).save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    split = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size)
    generator = torch.Generator().manual_seed(seed)
    for file, names in split.filename_to_tensors.items():
        _write_random(folder / file, {name: state[name] for name in names}, generator)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _chosen(model: PreTrainedModel, skip: Sequence[str], group_size: int, head: bool = False) -> dict[str, nn.Linear]:
    """The linear layers to be packed, by name."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    if not inside:
        raise ValueError(f"`model` must have decoder layers that can be told, got {type(model).__name__}.")
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside and should_convert_module(name, list(skip))
    }
    if head:
        last = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        chosen |= {name: module for name, module in model.named_modules() if module is last}
    for name, linear in chosen.items():
        try:
            layout_of("gemm", linear.in_features, linear.out_features, group_size)
        except ValueError as error:
            raise ValueError(f"{name} cannot be packed, add it to `skip`: {error}") from error
    return chosen


def _state(
    model: PreTrainedModel,
    chosen: Mapping[str, nn.Linear],
    packed: Callable[[nn.Linear], Mapping[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, in the order of the model."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner, _, part = name.rpartition(".")
        if owner not in chosen:
            state[name] = tensor
        elif part == "weight":
            state.update({f"{owner}.{part}": found for part, found in packed(chosen[owner]).items()})
        else:
            state[name] = tensor.half()
    return state


def _config(model: PreTrainedModel, chosen: Collection[str], group_size: int, zero_point: bool) -> PreTrainedConfig:
    """The configuration of the checkpoint."""
    config: Any = copy.deepcopy(model.config)
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    config.architectures = [type(model).__name__]
    config.quantization_config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": zero_point,
        "version": "gemm",
        "modules_to_not_convert": [name for name in linears if name not in chosen],
    }
    found: PreTrainedConfig = config
    return found


def _write_random(path: Path, tensors: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
    """Write a safetensors file of tensors that have only a shape and a dtype yet."""
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            for rows in torch.split(tensor, max(1, _AT_ONCE // tensor[0].numel())):
                file.write(_random(name, rows, generator).view(torch.uint8).numpy().data)


def _random(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers for rows of a tensor of this name, of the shape and dtype of `tensor`."""
    shape, dtype = tensor.shape, tensor.dtype
    if name.endswith("qweight"):
        return torch.randint(-(2**31), 2**31, shape, dtype=dtype, generator=generator)
    if name.endswith("qzeros"):
        zeros = torch.randint(7, 9, (*shape[:-1], 8 * shape[-1]), dtype=torch.uint8, generator=generator)
        return pack(zeros)
    if name.endswith("scales"):
        return ((torch.rand(shape, generator=generator) / 2 + 0.75) * (_STD / _SPREAD)).to(dtype)
    if tensor.dim() == 1:
        return torch.full(shape, float(name.endswith("weight")), dtype=dtype)  # a norm, or a bias
    return (torch.randn(shape, generator=generator) * _STD).to(dtype)
