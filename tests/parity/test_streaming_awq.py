"""AWQ checkpoints: loaded whole and streamed, beside a model on the same weights, dequantized."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    StreamingConfig,
    load_streamed,
    streaming_plan,
    streaming_stats,
    with_streaming,
)
from recipes.awq import quantize, quantize_awq
from tests.conftest import as_inputs, random_ids
from tests.internals.attention import kernel_calls
from tests.internals.cache import ComputePace
from tests.internals.offload import EXPERT_PARTS, AwqExperts, StoredWeight, dequantize, estimate_sizes, use_backend
from tests.offload.poisoning import PoisoningBackend
from tests.streaming import FULL_STREAM

IDS = random_ids(40, seed=1)
EXACT = StreamingConfig(residency_mode="full_stream", quant_kernel="torch")  # float32 as it is, also on a CPU
SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 199,
}
MOE: dict[str, Any] = {**SIZES, "num_hidden_layers": 3, "num_experts_per_tok": 2}


def dense() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()


def qwen3_moe() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, num_experts=6, moe_intermediate_size=64, head_dim=32)).eval()  # type: ignore[call-arg]


def mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=4)).eval()


def dequantized(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """`model` with the weights that the checkpoint stands for."""
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if f"{name}.qweight" in tensors:
            packed = [tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")]
            module.weight.data = dequantize(*packed).T.contiguous()
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq")
    quantize_awq(dense(), folder, group_size=64, max_shard_size="100KB")
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("whole")
    quantize_awq(dense(), folder, group_size=64)
    return dequantized(folder, dense())


@pytest.mark.parametrize("config", [{"keep_first_k": 1}, {"residency_mode": "full_stream"}], ids=str)
def test_as_dequantized(checkpoint: Path, expected: PreTrainedModel, config: dict[str, Any]) -> None:
    with use_backend(PoisoningBackend):
        model = load_streamed(str(checkpoint), StreamingConfig(**config, quant_kernel="torch"), dtype=torch.float32)
    with torch.no_grad():
        found, wanted = model(input_ids=IDS).logits, expected(input_ids=IDS).logits
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    stats = streaming_stats(model)
    assert stats is not None
    assert stats.misses == 1
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 6}
    assert torch.equal(model.generate(**told), expected.generate(**told))


@pytest.mark.slow
def test_kernel_of_choice(tmp_path: Path) -> None:
    """Triton's, run by its interpreter."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    quantize_awq(Qwen2ForCausalLM(Qwen2Config(**sizes)).eval(), tmp_path, group_size=32)
    logits = []
    for kernel in ("torch", "triton"):
        with use_backend(PoisoningBackend), torch.no_grad():
            config = StreamingConfig(residency_mode="full_stream", quant_kernel=kernel)
            model = load_streamed(str(tmp_path), config, dtype=torch.float32)
            before = kernel_calls()
            logits.append(model(input_ids=IDS[:, :3]).logits)
    assert kernel_calls() - before == {"triton.awq_matmul": 7 * 3}
    torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mode", ["partial_resident", "full_resident", "ffn_only_stream", "full_stream"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_modes_are_identical(checkpoint: Path, tmp_path: Path, mode: Any, on_disk: bool) -> None:
    whole = load_streamed(str(checkpoint), device="cpu", dtype=torch.float32)
    given: dict[str, Any] = {"keep_last_k": 1} if mode == "partial_resident" else {}
    given |= {"disk_folder": str(tmp_path)} if on_disk and mode != "full_resident" else {}
    for _ in range(2):  # the second time from the same files
        with use_backend(PoisoningBackend):
            model = load_streamed(str(checkpoint), StreamingConfig(residency_mode=mode, **given), dtype=torch.float32)
        told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 6}
        assert torch.equal(model.generate(**told), whole.generate(**told))
        assert (streaming_stats(model) is None) == (mode == "full_resident")
        if on_disk:
            written = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.bin")}
    if on_disk and mode != "full_resident":
        assert len(written) == (4 if mode == "partial_resident" else 5)


def test_half_precision(checkpoint: Path) -> None:
    whole = load_streamed(str(checkpoint), device="cpu", dtype=torch.bfloat16)
    with use_backend(PoisoningBackend):
        model = load_streamed(str(checkpoint), FULL_STREAM, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.up_proj.scales.dtype == torch.float16
    assert torch.equal(model(input_ids=IDS).logits, whole(input_ids=IDS).logits)


def test_from_pretrained(checkpoint: Path, tmp_path: Path) -> None:
    with use_backend(PoisoningBackend):
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, config=with_streaming(str(checkpoint), FULL_STREAM), dtype=torch.float32
        )
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 6}
    wanted = model.generate(**told)
    assert model.config.quantization_config["quant_method"] == "awq"
    model.save_pretrained(tmp_path)  # an AWQ checkpoint again
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved == json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    again = load_streamed(str(tmp_path), device="cpu", dtype=torch.float32)
    assert torch.equal(again.generate(**told), wanted)


def test_reuse_across_plans(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K/V on disk is found whatever stays on the device."""
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)  # loading is always worth it
    for config, reused in ((StreamingConfig(keep_first_k=1), 0), (FULL_STREAM, 32)):
        with use_backend(PoisoningBackend):
            model = load_streamed(str(checkpoint), config, dtype=torch.float32, attn_implementation="kvboost_fa2")
        with closing(ChunkStore(model, chunk_size=16, tiers=["ram:1GB", f"disk:{tmp_path}:1GB"])) as store:
            cache = ChunkReuseCache(model, store)
            model.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)
            assert cache.report.reused_tokens == reused


def write_experts(model: PreTrainedModel, folder: Path, parts: tuple[str, str, str], prefix: str) -> PreTrainedModel:
    """Write an AWQ checkpoint as quantizers do, each expert on its own; returns the dequantized model."""
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, weight: torch.Tensor) -> torch.Tensor:
        packed = quantize(weight, group_size=32)
        tensors.update({f"{name}.{part}": tensor for part, tensor in packed._asdict().items()})
        return dequantize(*packed).T

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            module.weight.data = put(name, module.weight.data).contiguous()
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("mlp.experts.gate_up_proj") + prefix
            for number in range(len(tensor)):
                halves = [
                    put(f"{base}.{number}.{part}", half)
                    for part, half in zip(parts[:2], tensor[number].chunk(2), strict=True)
                ]
                tensor[number] = torch.cat(halves)
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("mlp.experts.down_proj") + prefix
            for number in range(len(tensor)):
                tensor[number] = put(f"{base}.{number}.{parts[2]}", tensor[number])
        elif name.removesuffix(".weight") + ".qweight" not in tensors:
            saved = name.replace("mlp.gate.", "block_sparse_moe.gate.") if parts[0] == "w1" else name
            tensors[saved] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize(
    ("make", "parts", "prefix"),
    [
        (qwen3_moe, ("gate_proj", "up_proj", "down_proj"), "mlp.experts"),
        (mixtral, ("w1", "w3", "w2"), "block_sparse_moe.experts"),
    ],
    ids=["qwen3_moe", "mixtral"],
)
def test_experts(make: Any, parts: tuple[str, str, str], prefix: str, tmp_path: Path) -> None:
    wanted = write_experts(make(), tmp_path, parts, prefix)
    with use_backend(PoisoningBackend):
        model = load_streamed(str(tmp_path), EXACT, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, wanted(input_ids=IDS).logits, atol=2e-4, rtol=2e-4)
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 6}
    assert torch.equal(model.generate(**told), wanted.generate(**told))
    plan = streaming_plan(model)
    assert plan is not None
    estimated = estimate_sizes(make().config, FULL_STREAM, bits=4, group_size=32, dtype=torch.float32)
    assert estimated.layer_bytes == plan.sizes.layer_bytes
    model.save_pretrained(tmp_path / "saved")
    again = load_streamed(str(tmp_path / "saved"), device="cpu", dtype=torch.float32)
    saved, state = again.state_dict(), model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)


def test_experts_that_no_token_needs() -> None:
    """One token, experts named twice, and a number that stands for none."""
    experts = qwen3_moe().model.layers[0].mlp.experts
    experts.config._experts_implementation = "eager"
    weights = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    with torch.device("meta"):
        stacked = qwen3_moe().model.layers[0].mlp.experts
    ours = AwqExperts(stacked, dict.fromkeys(EXPERT_PARTS[0], StoredWeight("gemm", 32)), quant_kernel="auto")
    ours.expect_()
    for number in range(6):
        gate, up = weights["gate_up_proj"][number].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": weights["down_proj"][number]}
        for part, weight in parts.items():
            packed = quantize(weight, group_size=32)
            for name, tensor in packed._asdict().items():
                ours.get_submodule(f"{number}.{part}").register_buffer(name, tensor)
            weight.copy_(dequantize(*packed).T)
        experts.gate_up_proj.data[number] = torch.cat([gate, up])
        experts.down_proj.data[number] = weights["down_proj"][number]
    ours.to_gemm_()
    assert len(ours.state_dict()) == 6 * 3 * 3
    assert len(list(ours.buffers())) == 3 * 3
    for index in ([[0, 5]], [[2, 2]], [[6, 1]], [[6, 6]], [[1, 2], [2, 3], [5, 6]]):
        chosen = torch.tensor(index)
        hidden, shares = torch.randn(len(index), 128), torch.rand(chosen.shape)
        none = chosen == 6
        with torch.no_grad():
            wanted = experts(hidden, chosen.masked_fill(none, 0), shares.masked_fill(none, 0))
            found, size = ours(hidden, chosen, shares), wanted.abs().max()
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(size))
    assert ours(torch.randn(0, 128), torch.zeros(0, 2, dtype=torch.long), torch.rand(0, 2)).shape == (0, 128)
