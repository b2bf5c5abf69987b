"""Weights that are tensors made of others, such as optimum-quanto's: `stream_layers` on a model in memory."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, QuantoConfig

from kvboost_hf import (
    ChunkReuseCache,
    StreamingConfig,
    check_model_compatibility,
    stop_streaming,
    stream_layers,
    streaming_plan,
    streaming_stats,
)
from kvboost_hf.errors import StreamingError
from tests.conftest import as_inputs, random_ids
from tests.internals.offload import build, use_backend
from tests.offload.poisoning import PoisoningBackend
from tests.streaming import FULL_STREAM, make_layers

IDS = random_ids(20, seed=1)


class Int8Weight(torch.Tensor):
    """Levels and a scale for each output, as libraries of quantized weights have them."""

    levels: torch.Tensor
    steps: torch.Tensor

    @staticmethod
    def __new__(cls, levels: torch.Tensor, steps: torch.Tensor) -> "Int8Weight":
        made: Any = torch.Tensor._make_wrapper_subclass(cls, levels.size(), dtype=steps.dtype, device=levels.device)
        made.levels, made.steps = levels, steps
        return made

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Int8Weight":
        steps = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / steps).round().to(torch.int8), steps)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["levels", "steps"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: None, size: Any, stride: Any) -> "Int8Weight":
        return Int8Weight(inner["levels"], inner["steps"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].levels.detach(), args[0].steps.detach())
        plain = [each.levels * each.steps if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))


def quantized(layers: int = 4) -> PreTrainedModel:
    """All linear layers, the head included."""
    model = make_layers(layers)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8Weight.of(module.weight.data), requires_grad=False)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def stream(model: PreTrainedModel, config: StreamingConfig = FULL_STREAM) -> PreTrainedModel:
    with use_backend(PoisoningBackend):
        return stream_layers(model, config, device="cpu")


@pytest.mark.parametrize("on_disk", [False, True])
def test_streams(on_disk: bool, tmp_path: Path) -> None:
    wanted = logits(quantized())
    model = quantized()
    config = StreamingConfig(residency_mode="full_stream", disk_folder=str(tmp_path) if on_disk else None)
    stream(model, config)
    for _ in range(2):
        assert torch.equal(logits(model), wanted)
    stats = streaming_stats(model)
    assert stats is not None
    assert stats.misses == 1
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, Int8Weight)
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 6}
    assert torch.equal(model.generate(**told), quantized().generate(**told))
    stop_streaming(model)
    assert torch.equal(logits(model), wanted)


def test_bytes_are_those_of_the_parts() -> None:
    plan = streaming_plan(stream(quantized()))
    assert plan is not None
    plain = streaming_plan(stream(make_layers(4)))
    assert plain is not None
    assert plan.sizes.layer_bytes[0] < 0.3 * plain.sizes.layer_bytes[0]
    assert plan.sizes.other_bytes < plain.sizes.other_bytes


def test_state_dict_has_the_true_weights() -> None:
    model = quantized()
    wanted = {name: parts(tensor) for name, tensor in copy_of_state(model).items()}
    stream(model)
    logits(model)  # the slots hold the last layers now
    for name, tensor in model.state_dict().items():
        assert all(map(torch.equal, parts(tensor), wanted[name])), name


def copy_of_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {
        name: Int8Weight(tensor.levels.clone(), tensor.steps.clone())
        if isinstance(tensor, Int8Weight)
        else tensor.clone()
        for name, tensor in model.state_dict().items()
    }


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.levels, tensor.steps] if isinstance(tensor, Int8Weight) else [tensor]


def test_a_replaced_weight_is_refused() -> None:
    model = stream(quantized())
    up = model.model.layers[1].mlp.up_proj
    up.weight = nn.Parameter(Int8Weight.of(torch.randn(up.out_features, up.in_features)), requires_grad=False)
    with pytest.raises(StreamingError, match=r"weight of a streamed .* has been replaced"):
        logits(model)


def test_weights_of_another_device_type_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes may be packed for its kernels."""
    monkeypatch.setattr(build, "available_device", torch.device)
    with pytest.raises(ValueError, match=r"q_proj.weight is a .*Int8Weight on cpu, which may be packed for kernels"):
        stream_layers(quantized(), FULL_STREAM, device="meta")


def test_reuse_and_changed_weights() -> None:
    """The cache knows weights by what they are made of, wherever they wait."""
    model = stream(quantized())
    cache = ChunkReuseCache(model)
    told: dict[str, Any] = {**as_inputs(random_ids(200, seed=2)), "max_new_tokens": 2}
    first = model.generate(**told, past_key_values=cache)
    assert torch.equal(model.generate(**told, past_key_values=cache), first)
    assert cache.report.reused_tokens > 100
    stop_streaming(model)
    model.model.layers[1].mlp.up_proj.weight.levels.neg_()
    model.generate(**told, past_key_values=cache)
    assert cache.report.reused_tokens == 0


def wide() -> PreTrainedModel:
    """Rows of more than the 128 weights of a group of quanto."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 200, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_quanto(weights: str, dtype: torch.dtype, on_disk: bool, tmp_path: Path) -> None:
    """In its own environment: `make formats`."""
    quanto = pytest.importorskip("optimum.quanto")
    wide().save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=QuantoConfig(weights=weights), dtype=dtype
    )
    wanted, state = logits(model), copy.deepcopy(model.state_dict())
    folder = str(tmp_path / "layers") if on_disk else None
    stream(model, StreamingConfig(residency_mode="full_stream", disk_folder=folder))
    for _ in range(2):
        assert torch.equal(logits(model), wanted)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, quanto.QTensor)
    stats, plan = streaming_stats(model), streaming_plan(model)
    assert stats is not None
    assert plan is not None
    assert stats.misses == 1
    levels = sum(module.weight.numel() for module in model.model.layers[0].modules() if isinstance(module, nn.Linear))
    assert plan.sizes.layer_bytes[0] < levels * (1.2 if weights == "int8" else 0.7)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    assert check_model_compatibility(model, strict=False).streaming
    stop_streaming(model)
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quanto_goes_to_another_device(weights: str, tmp_path: Path) -> None:
    """4-bit weights are packed for kernels of the CPU in bfloat16; streamed to another device, they must not be."""
    quanto = pytest.importorskip("optimum.quanto")
    from tests.internals.offload import _make_portable

    wide().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=QuantoConfig(weights=weights), dtype=torch.bfloat16
    )
    wanted = logits(model)
    _make_portable(model, torch.device("cuda"))
    kinds = {type(module.weight) for module in model.modules() if isinstance(module, quanto.QLinear)}
    assert kinds == {quanto.WeightQBytesTensor if weights == "int8" else quanto.WeightQBitsTensor}
    found = logits(model)
    assert (found - wanted).norm() < 0.05 * wanted.norm()
