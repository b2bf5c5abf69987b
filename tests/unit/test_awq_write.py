"""Checkpoints that are written: what the files hold, how far they are off, and how much memory it takes."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import load_streamed
from recipes import awq
from recipes.awq import quantize, quantize_awq, write_random_awq
from tests.conftest import make_model, random_ids
from tests.internals.offload import AwqLinear, dequantize, layout_of

pytestmark = pytest.mark.daily

GROUP_SIZE = 32


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as its index has them."""
    files = {path.name for path in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    found = {}
    for file in sorted(files):
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            names = set(opened.keys())
            found.update({name: opened.get_tensor(name) for name in names})
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            assert names == {name for name, place in weight_map.items() if place == file}
            assert set(weight_map.values()) == files
    if index.exists():
        assert json.loads(index.read_text())["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    else:
        assert files == {"model.safetensors"}
    return found


def load(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    for name, module in list(model.named_modules()):
        if f"{name}.qweight" in tensors:
            bias = module.bias is not None
            linear = AwqLinear(module.in_features, module.out_features, bias=bias, group_size=GROUP_SIZE)
            model.set_submodule(name, linear)
    model.load_state_dict(tensors)


def expected_layout(model: PreTrainedModel, *, dense: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes, from the model's own modules."""
    layout = {}
    for name, tensor in model.state_dict().items():
        owner, _, part = name.rpartition(".")
        module = model.get_submodule(owner)
        if not isinstance(module, nn.Linear) or owner == "lm_head":
            layout[name] = (tuple(tensor.shape), dense)
        elif part == "bias":
            layout[name] = (tuple(tensor.shape), torch.float16)
        else:
            packed = layout_of("gemm", module.in_features, module.out_features, GROUP_SIZE)
            layout.update({f"{owner}.{part}": found for part, found in packed.items()})
    return layout


def layout(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize("zero_point", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_rounding_is_within_half_a_step(name: str, zero_point: bool, tmp_path: Path) -> None:
    model = make_model(name)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize_awq(model, tmp_path, group_size=GROUP_SIZE, zero_point=zero_point)
    found = read(tmp_path)
    assert layout(found) == expected_layout(model, dense=torch.float32)
    packed = 0
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor)
        owner = name.rpartition(".")[0]
        if name in found:
            assert torch.equal(found[name], tensor.to(found[name].dtype))
            continue
        packed += 1
        scales = found[f"{owner}.scales"]
        off = dequantize(found[f"{owner}.qweight"], found[f"{owner}.qzeros"], scales) - tensor.T
        steps = off.abs() / scales.float().repeat_interleave(GROUP_SIZE, 0)
        assert 0.4 < steps.max() <= 0.51  # scales are rounded, too
    assert packed == 14


def test_a_head(tmp_path: Path) -> None:
    """The embeddings that it is tied to stay as they are."""
    sizes: Any = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96, tie_word_embeddings=True)).eval()
    quantize_awq(model, tmp_path, group_size=GROUP_SIZE, head=True)
    found = read(tmp_path)
    assert "lm_head.weight" not in found
    embeddings = model.get_input_embeddings().weight
    assert torch.equal(found["model.embed_tokens.weight"], embeddings)
    scales = found["lm_head.scales"]
    off = dequantize(found["lm_head.qweight"], found["lm_head.qzeros"], scales) - embeddings.T
    assert 0.4 < (off.abs() / scales.float().repeat_interleave(GROUP_SIZE, 0)).max() <= 0.51
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == []
    loaded: Any = load_streamed(str(tmp_path), device="cpu", dtype=torch.float32)
    assert isinstance(loaded.lm_head, AwqLinear)
    assert torch.equal(loaded.get_input_embeddings().weight, embeddings)


def test_the_configuration(tmp_path: Path) -> None:
    model = make_model("llama")
    quantize_awq(model, tmp_path, group_size=GROUP_SIZE, skip=("lm_head", "o_proj"))
    assert not hasattr(model.config, "quantization_config")
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["architectures"] == ["LlamaForCausalLM"]
    assert found["quantization_config"] == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP_SIZE,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "lm_head"],
    }
    tensors = read(tmp_path)
    assert "model.layers.1.self_attn.o_proj.weight" in tensors
    assert "model.layers.1.self_attn.k_proj.qweight" in tensors
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == model.generation_config.eos_token_id


def test_shards(tmp_path: Path) -> None:
    quantize_awq(make_model("llama"), tmp_path / "one", group_size=GROUP_SIZE)
    quantize_awq(make_model("llama"), tmp_path / "many", group_size=GROUP_SIZE, max_shard_size=60_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 3
    one, many = read(tmp_path / "one"), read(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(tensor, many[name]) for name, tensor in one.items())


@pytest.mark.parametrize("zero_point", [True, False])
def test_values_at_the_edge(zero_point: bool) -> None:
    """All zeros, of one sign, tiny, and exact where they have sixteen levels."""
    weight = torch.zeros(8, 64)
    weight[1] = 3.0
    weight[2] = -3.0
    weight[3] = 1e-8
    weight[4] = torch.arange(-8, 8).repeat(4)
    weight[5, :] = -1e-3
    found = dequantize(*quantize(weight, group_size=64, zero_point=zero_point)).T
    assert torch.equal(found[0], weight[0])
    assert torch.equal(found[4], weight[4])
    assert (found - weight).abs().max() <= 3 / 7 * 0.51


def test_layers_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"down_proj cannot be packed, add it to `skip`: `in_features` must be .* 64"):
        quantize_awq(make_model("llama"), tmp_path, group_size=64)
    with pytest.raises(ValueError, match=r"`group_size` must be one of \(32, 64, 128\), got 48"):
        write_random_awq(make_model("llama").config, tmp_path, group_size=48)
    assert not list(tmp_path.iterdir())


def test_random_weights(tmp_path: Path) -> None:
    model = make_model("qwen2")
    write_random_awq(model.config, tmp_path, group_size=GROUP_SIZE, seed=1, max_shard_size=20_000)
    found = read(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    assert layout(found) == expected_layout(model, dense=torch.float16)
    assert AutoConfig.from_pretrained(tmp_path).quantization_config["modules_to_not_convert"] == ["lm_head"]
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == model.config.eos_token_id
    for name in found:
        owner, _, part = name.rpartition(".")
        if part == "qweight":
            dense = dequantize(found[name], found[f"{owner}.qzeros"], found[f"{owner}.scales"])
            assert 0.018 < dense.std() < 0.022
            assert dense.mean().abs() < 0.003
            assert dense.unique().numel() > 500
    assert (found["model.norm.weight"] == 1).all()
    assert (found["model.layers.0.self_attn.q_proj.bias"] == 0).all()
    assert 0.019 < found["model.embed_tokens.weight"].float().std() < 0.021


def test_activations_stay_finite(tmp_path: Path) -> None:
    """In float16, through as many layers as the largest models have, which have AWQ layers here."""
    config = LlamaConfig(**{**make_model("llama").config.to_dict(), "num_hidden_layers": 80})
    write_random_awq(config, tmp_path, group_size=GROUP_SIZE)
    model = LlamaForCausalLM(config).half()
    load(model, read(tmp_path))
    assert sum(isinstance(module, AwqLinear) for module in model.modules()) == 7 * 80
    logits = model(random_ids(40)).logits
    assert logits.isfinite().all()
    assert logits.std() > 1e-3


def test_a_written_model_is_what_was_rounded(tmp_path: Path) -> None:
    """The same logits from AWQ layers as from dense ones that hold the rounded weights."""
    quantize_awq(make_model("qwen2"), tmp_path, group_size=GROUP_SIZE)
    found = read(tmp_path)
    packed, rounded, plain = make_model("qwen2"), make_model("qwen2"), make_model("qwen2")
    load(packed, found)
    for name, module in rounded.named_modules():
        if f"{name}.qweight" in found:
            parts = (found[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
            module.weight.data = dequantize(*parts).T.contiguous()
    one, other, before = (model(random_ids(40)).logits for model in (packed, rounded, plain))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert (one - before).abs().max() > 100 * (one - other).abs().max()


def test_seeds_decide(tmp_path: Path) -> None:
    config = make_model("llama").config
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        write_random_awq(config, tmp_path / name, group_size=GROUP_SIZE, seed=seed)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same
    assert one != other


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    config = LlamaConfig(**{**make_model("llama").config.to_dict(), "tie_word_embeddings": True})
    write_random_awq(config, tmp_path, group_size=GROUP_SIZE)
    found = read(tmp_path)
    assert "lm_head.weight" not in found
    assert "model.embed_tokens.weight" in found


class Alive(TorchDispatchMode):
    """The most bytes of tensors that were alive at a time, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not found.is_meta:
            self._tensors.append(weakref.ref(found))
        alive = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        self._tensors = [weakref.ref(tensor) for tensor in alive]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
        self.most = max(self.most, sum(storages.values()))
        return found


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awq, "_AT_ONCE", 256)
    config = make_model("deep_llama").config
    with Alive() as alive:
        write_random_awq(config, tmp_path, group_size=GROUP_SIZE)
    found = read(tmp_path)
    total = sum(tensor.nbytes for tensor in found.values())
    layer = sum(tensor.nbytes for name, tensor in found.items() if name.startswith("model.layers.3."))
    assert 0 < alive.most <= 256 * 32  # words of eight zeros, and what they are made from
    assert alive.most < layer < total / 8
    with Alive() as alive:
        quantize_awq(make_model("deep_llama"), tmp_path / "whole", group_size=GROUP_SIZE)
    assert alive.most > total
