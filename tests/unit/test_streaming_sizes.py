"""Sizes from a configuration alone, against what models of that configuration really take."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from kvboost_hf import load_streamed, streaming_plan
from kvboost_hf.config import StreamingConfig
from recipes.awq import write_random_awq
from tests.architectures.models import make_architecture
from tests.internals.compat import (
    PrivateCache,
    bytes_per_token,
    cache_layers,
    decoder_layers,
    kv_bytes_per_token,
    run_model,
)
from tests.internals.offload import (
    CUBLAS_BYTES,
    ModelSizes,
    PackedFormat,
    StreamBuilder,
    activation_bytes,
    awq_matmul_torch,
    estimate_sizes,
    find_units,
    plan_residency,
    scratch_bytes,
    sizes_of,
    swap_linears,
    tile_weights,
    use_backend,
    what_fits,
)
from tests.internals.triton import SCRATCH_BYTES
from tests.offload.poisoning import PoisoningBackend

pytestmark = pytest.mark.daily


def llama(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "vocab_size": 512}
    return LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})


def sizes(config: PreTrainedConfig, bits: Any = 16, mode: Any = "partial_resident", **others: Any) -> ModelSizes:
    return estimate_sizes(config, StreamingConfig(residency_mode=mode, max_tokens=1000), bits=bits, **others)


@pytest.mark.parametrize("tied", [False, True])
def test_whole_layers_are_what_a_model_has(tied: bool) -> None:
    config = llama(tie_word_embeddings=tied)
    found, model = sizes(config, dtype=torch.float32), LlamaForCausalLM(config)
    layer = sum(each.nbytes for each in model.model.layers[0].parameters())
    assert found.layer_bytes == (layer,) * 3
    assert found.other_bytes == sum(each.nbytes for each in (*model.parameters(), *model.buffers())) - 3 * layer


def test_four_bits_at_a_group_size_of_128() -> None:
    config, weights = llama(num_key_value_heads=4), 4 * 256 * 256 + 3 * 256 * 768
    (layer, *_) = sizes(config, bits=4).layer_bytes
    assert layer == weights // 2 + weights // 128 // 2 + weights // 128 * 2 + 2 * 256 * 2
    assert 0.5195 < (layer - 1024) / weights < 0.5196
    (finer, *_) = sizes(config, bits=4, group_size=64).layer_bytes
    assert finer - layer == weights // 128 // 2 + weights // 128 * 2


def test_sizes_that_are_no_multiple_of_the_group_are_not_quantized() -> None:
    assert sizes(llama(hidden_size=96), bits=4).layer_bytes > sizes(llama(hidden_size=128), bits=4).layer_bytes


def test_feed_forward_parts_alone() -> None:
    config = llama(num_key_value_heads=4)
    whole, parts = sizes(config, bits=4), sizes(config, bits=4, mode="ffn_only_stream")
    weights = 3 * 256 * 768
    assert parts.layer_bytes == (weights // 2 + weights // 128 // 2 + weights // 128 * 2,) * 3
    assert sum(parts.layer_bytes) + parts.other_bytes == sum(whole.layer_bytes) + whole.other_bytes


def test_feed_forward_parts_without_a_module_of_their_own() -> None:
    config = OPTConfig(hidden_size=128, ffn_dim=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    assert sizes(config, mode="ffn_only_stream").layer_bytes == ((2 * 128 * 256 + 256 + 128) * 2,) * 2


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "olmo_hybrid", "zamba2", "mamba2", "gemma3n_text"])
def test_layers_without_kv_take_none(name: str) -> None:
    model = make_architecture(name)
    cache = PrivateCache(cache_layers(model))
    run_model(model, torch.arange(3, 13)[None], cache)
    held = sum(
        part.nbytes
        for layer in cache.layers
        for part in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if part is not None
    )
    assert held == 10 * bytes_per_token(model)


def test_kv_is_what_a_cache_takes() -> None:
    model = LlamaForCausalLM(llama()).eval()
    with torch.no_grad():
        cache = model(torch.arange(10)[None], past_key_values=DynamicCache(config=model.config)).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 10 * kv_bytes_per_token(model.config, torch.float32) == 10 * bytes_per_token(model)
    assert sizes(llama()).kv_bytes == 1000 * held // 10 // 2


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside took at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.launches = 0
        self.seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def free(self, nbytes: int) -> None:
        self.now -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.launches += not func.is_view and not func._schema.name.startswith("aten::empty")
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                storage = each.untyped_storage()
                if storage not in self.seen:
                    self.seen[storage] = None
                    weakref.finalize(storage, self.free, storage.nbytes())
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
        return result


@pytest.mark.parametrize("tokens", [256, 1024])
def test_activations_are_what_a_forward_takes(tokens: int) -> None:
    config = llama(intermediate_size=1024)
    model = LlamaForCausalLM(config).eval().bfloat16()
    with torch.no_grad(), Peak() as peak:
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False, logits_to_keep=1)
    estimate = activation_bytes(config, tokens, torch.bfloat16)
    assert 0.95 * estimate < peak.most < 1.05 * estimate


@pytest.mark.parametrize("mode", ["partial_resident", "ffn_only_stream"])
def test_an_estimate_is_what_loading_finds(mode: Any, tmp_path: Path) -> None:
    config = llama(dtype=torch.float16)
    write_random_awq(config, tmp_path)
    asked = StreamingConfig(residency_mode=mode, keep_first_k=0, max_tokens=50, quant_kernel="torch")  # as on a GPU
    with use_backend(PoisoningBackend):
        plan = streaming_plan(load_streamed(str(tmp_path), asked, device="cpu"))
    assert plan is not None
    estimate = estimate_sizes(config, asked, bits=4)
    assert plan.sizes == replace(estimate, workspace_bytes=0), "which only a GPU takes"
    numbers = 256 * 768  # of the largest weight
    assert estimate.workspace_bytes == CUBLAS_BYTES + 2 * numbers


def test_workspaces_of_weights_that_are_large() -> None:
    """A product has numbers of 128 MiB at most; weights of 16 bits need none."""
    wide = llama(hidden_size=8192, intermediate_size=28672, num_hidden_layers=1, num_attention_heads=64)
    assert sizes(wide, bits=4).workspace_bytes == CUBLAS_BYTES + SCRATCH_BYTES
    assert sizes(wide).workspace_bytes == CUBLAS_BYTES


def test_what_fits() -> None:
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    found = what_fits(config, "90MB", bits=4, streaming=StreamingConfig(max_tokens=500))
    assert 0 < len(found.resident) < 8
    assert found.device_bytes <= 90 * 10**6 < found.device_bytes + found.slot_bytes
    assert len(what_fits(config, "90MB", bits=4, streaming=StreamingConfig(max_tokens=1000)).resident) < len(
        found.resident
    )
    in_pieces = what_fits(config, "90MB", bits=4, streaming=StreamingConfig(max_tokens=500, prefill_chunk_size=100))
    assert in_pieces.sizes.kv_bytes == found.sizes.kv_bytes
    assert in_pieces.sizes.activation_bytes < found.sizes.activation_bytes / 3
    assert what_fits(config, "1GB", bits=4).n_slots == 0
    with pytest.raises(ValueError, match="at least"):
        what_fits(config, "90MB", bits=16)


def test_bits_are_those_of_the_checkpoint() -> None:
    plain, awq = llama(), llama()
    awq.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 64}
    asked = StreamingConfig(max_tokens=1000)
    assert estimate_sizes(plain, asked) == sizes(plain, bits=16)
    assert estimate_sizes(awq, asked) == sizes(awq, bits=4, group_size=64) != sizes(plain, bits=4)
    assert sizes(awq, bits=4) == estimate_sizes(awq, asked)  # as it is planned to be served
    assert estimate_sizes(awq, asked, bits=16) == sizes(awq, bits=16)
    assert what_fits(awq, "1GB", streaming=asked).sizes == estimate_sizes(awq, asked)


def test_models_without_linear_layers() -> None:
    plan = what_fits(GPT2Config(), "1GB")
    (layer,) = GPT2LMHeadModel(GPT2Config(n_layer=1)).transformer.h
    assert plan.sizes.layer_bytes[0] == 2 * sum(each.numel() for each in layer.parameters())
    assert "AWQ" not in str(plan)
    with pytest.raises(ValueError, match="`bits` must be 16 for GPT2LMHeadModel, got 4"):
        what_fits(GPT2Config(), "1GB", bits=4)


def test_other_bits() -> None:
    with pytest.raises(ValueError, match="`bits` must be 4 or 16, got 3"):
        sizes(llama(), bits=3)


LARGEST = ((5120, 27648), (27648, 5120), (5120, 5120), (5120, 1024))  # of Qwen2.5-32B


@pytest.mark.parametrize("shape", LARGEST)
@pytest.mark.parametrize("tokens", [1, 7, 8, 4096])
def test_scratch_without_triton_is_what_a_product_takes(
    shape: tuple[int, int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that is none, and computes nothing."""
    peak = _product(shape, tokens, monkeypatch)
    estimate = scratch_bytes(tokens, *shape, 128)
    given = 2 * tokens * shape[1]  # the result
    assert 0.6 * estimate < peak.most - given < estimate


def test_a_token_without_triton_launches_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """22,000 for the 64 layers of Qwen2.5-32B. With the tiles of a CPU it would be 116,000."""
    linears = [LARGEST[2], LARGEST[3], LARGEST[3], LARGEST[2], LARGEST[0], LARGEST[0], LARGEST[1]]
    assert 64 * sum(_product(shape, 1, monkeypatch).launches for shape in linears) < 23_000
    monkeypatch.setattr("kvboost_hf.offload.awq.tiling.SCRATCH_BYTES", 5 * tile_weights(torch.device("cpu")))
    assert 64 * sum(_product(shape, 1, monkeypatch).launches for shape in linears) > 100_000


def _product(shape: tuple[int, int], tokens: int, monkeypatch: pytest.MonkeyPatch) -> Peak:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # refuses the device
    rows, columns = shape
    with torch.device("meta"):
        x, scales = torch.empty(tokens, rows).half(), torch.empty(rows // 128, columns).half()
        qweight, qzeros = (torch.empty(each, columns // 8, dtype=torch.int32) for each in (rows, rows // 128))
    with Peak() as peak:
        assert awq_matmul_torch(x, qweight, qzeros, scales).shape == (tokens, columns)
    return peak


def test_a_gpu_without_triton_is_planned_with_more_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever loads: an estimate cannot know."""
    asked: list[torch.device] = []

    def runs(kernel: str, device: torch.device) -> bool:
        asked.append(device)
        return kernel == "triton"

    config = llama(num_hidden_layers=1)
    monkeypatch.setattr("kvboost_hf.offload.build.runs_triton", runs)
    monkeypatch.setattr("kvboost_hf.offload.build.make_mapping", lambda device: None)
    monkeypatch.setattr("kvboost_hf.offload.build.cuda_pinning", lambda device: None)
    monkeypatch.setattr("kvboost_hf.offload.build.free_bytes", lambda device: 10**9)
    found = {}
    for kernel in ("triton", "auto"):
        with torch.device("meta"):
            model = LlamaForCausalLM(config).half()
            swap_linears(model, FORMAT, AWQ_NAMES, kernel)
        streaming = StreamingConfig(quant_kernel=kernel, max_tokens=100)
        found[kernel] = StreamBuilder(model, streaming, torch.device("cuda", 0)).plan.sizes.workspace_bytes
    assert asked == [torch.device("cuda", 0)] * 2
    assert found["triton"] == CUBLAS_BYTES + 2 * 256 * 768
    assert found["auto"] == CUBLAS_BYTES + scratch_bytes(100, 256, 768, 128)


FORMAT = PackedFormat.awq(128)
AWQ_NAMES: dict[str, dict[str, tuple[int, ...]]] = {
    f"model.layers.0.mlp.{part}_proj": {} for part in ("gate", "up", "down")
}


def qwen(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=152_064,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


@pytest.mark.parametrize("config", [qwen(3584, 18_944, 28, 28, 4), qwen(5120, 27_648, 64, 40, 8)], ids=["7B", "32B"])
def test_usual_models_on_cards_of_8_to_24_gb(config: Qwen2Config) -> None:
    """A desktop and a browser hold a part of the card; whoever names its whole size gets a plan for the rest."""
    found = estimate_sizes(config, StreamingConfig(), bits=4)
    stay = []
    for card in (8, 12, 16, 24):
        total = card << 30
        for others in (600_000_000, 1_500_000_000):
            plan = plan_residency(found, StreamingConfig(vram_budget=f"{card}GiB"), free_bytes=total - others)
            assert plan.device_bytes <= 0.9 * (total - others)
            assert f"only {total - others} are free on the device" in plan.notes[0]
            assert plan.resident == plan_residency(found, StreamingConfig(), free_bytes=total - others).resident
            stay.append(len(plan.resident))
    assert stay[::2] == sorted(stay[::2])
    assert all(more >= fewer for more, fewer in zip(stay[::2], stay[1::2], strict=True))
    assert 0 < stay[0] <= stay[-1] == config.num_hidden_layers
    with pytest.raises(ValueError, match="must be at least") as told:
        plan_residency(found, StreamingConfig(vram_budget="8GiB"), free_bytes=1 << 30)
    least = int(str(told.value).split("at least ")[1].split()[0])
    assert plan_residency(found, StreamingConfig(vram_budget=least), free_bytes=8 << 30).resident == ()
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        plan_residency(found, StreamingConfig(vram_budget=least - 1), free_bytes=8 << 30)


def test_a_head_that_is_still_another_tensor_is_counted_once() -> None:
    """As while a model is loaded: it is tied at the end."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama(tie_word_embeddings=True))
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    units = find_units(model, decoder_layers(model), ffn_only=False)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    found = sizes_of(model, units, StreamingConfig(max_tokens=1000), gpu=True)
    assert found == sizes(llama(tie_word_embeddings=True), dtype=torch.float32)
