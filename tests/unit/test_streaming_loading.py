"""Loading streamed models: what is refused and how, and how much memory it takes."""

import itertools
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Qwen2Config, Qwen2ForCausalLM

from kvboost_hf import StreamingConfig, load_streamed, stream_layers, streaming_plan, streaming_stats, with_streaming
from kvboost_hf.assets import EMBEDDED_MODEL_DIR
from recipes.awq import quantize_awq, write_random_awq
from tests.conftest import make_model, random_ids
from tests.internals.offload import any_of, build, use_backend
from tests.internals.offload import checkpoint as checkpoints
from tests.offload.poisoning import PoisoningBackend
from tests.streaming import FULL_STREAM, make_layers

pytestmark = pytest.mark.daily

IDS = random_ids(20, seed=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Several shards."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    quantize_awq(model, tmp_path, group_size=32, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    return tmp_path


def load(folder: Path, config: StreamingConfig = FULL_STREAM, **kwargs: Any) -> Any:
    with use_backend(PoisoningBackend):
        return load_streamed(str(folder), config, **kwargs)


def edit_config(folder: Path, **told: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= told
    path.write_text(json.dumps(config))


@pytest.mark.daily
@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"quant_method": "hqq"}, "quantized with 'hqq'"),
        ({"bits": 8}, "got 8 bits"),
        ({"group_size": 16}, "groups of 16"),
        ({"version": "exllama"}, "must be one of .*got 'exllama'"),
    ],
)
def test_other_quantizations(checkpoint: Path, told: dict[str, Any], message: str) -> None:
    edit_config(checkpoint, **told)
    with pytest.raises(ValueError, match=message):
        load(checkpoint)


def test_awq_in_name_only(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="none of its tensors ends in 'qweight'"):
        load(tmp_path)


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return folder / str(next(file for tensor, file in index.items() if name in tensor))


def test_missing_shard(checkpoint: Path) -> None:
    shard = shard_of(checkpoint, "layers.2.")
    shard.unlink()
    with pytest.raises((OSError, ValueError), match=shard.name):
        load(checkpoint)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["layers.2.mlp.up_proj.scales", "layers.1.input_layernorm.weight"])
def test_missing_tensor(checkpoint: Path, name: str) -> None:
    rewrite(shard_of(checkpoint, name), lambda tensors: tensors.pop(f"model.{name}"))
    with pytest.raises(ValueError, match=f"has no model.{name}"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["layers.2.mlp.up_proj.qweight", "layers.1.input_layernorm.weight"])
def test_another_shape(checkpoint: Path, name: str) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.{name}"] = tensors[f"model.{name}"][:32].contiguous()

    rewrite(shard_of(checkpoint, name), halve)
    with pytest.raises(ValueError, match=f"model.{name} has the shape"):
        load(checkpoint)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_stays_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """As the router of many a mixture of experts does."""
    model = make_model("deep_llama")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.input_layernorm.weight)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", ["input_layernorm"])
    wanted = type(model).from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert {tensor.dtype for tensor in wanted.values()} == {dtype, torch.float32}
    found = load(tmp_path, dtype=dtype).state_dict()
    assert all(found[name].dtype == wanted[name].dtype for name in wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_pattern_for_many_names() -> None:
    """One after the other, they would be tried for minutes."""
    parts = itertools.product(range(48), range(128), ("up", "down"), ("qweight", "scales"))
    names = [f"layers.{layer}.experts.{expert}.{part}.{kind}" for layer, expert, part, kind in parts]
    pattern = re.compile(f"^{any_of([*names, 'layers'])}$")
    before = time.thread_time()
    assert all(map(pattern.search, [*names, "layers"]))
    assert time.thread_time() - before < 5
    assert not any(map(pattern.search, ["layers.48.experts.0.up.scales", "layers.0", names[0][:-1], names[0] + "s"]))


def test_what_is_no_safetensors_file(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="streamed from safetensors files"):
        load(tmp_path)


def test_budget(checkpoint: Path) -> None:
    """The smallest budget that the error names is enough, and more layers stay with more."""
    config = StreamingConfig(vram_budget=1000, max_tokens=64)
    with pytest.raises(ValueError, match="must be at least") as refused:
        load(checkpoint, config)
    found = re.search(r"must be at least (\d+) bytes", str(refused.value))
    assert found is not None
    least = int(found[1])
    tight = load(checkpoint, StreamingConfig(vram_budget=least, max_tokens=64))
    plan = streaming_plan(tight)
    assert plan is not None
    assert plan.device_bytes <= least
    assert not plan.resident
    with pytest.raises(ValueError, match="must be at least"):
        load(checkpoint, StreamingConfig(vram_budget=least - 1, max_tokens=64))
    roomier = streaming_plan(load(checkpoint, StreamingConfig(vram_budget=least + plan.slot_bytes, max_tokens=64)))
    assert roomier is not None
    assert len(roomier.resident) == 1
    wanted = load_streamed(str(checkpoint), device="cpu")(input_ids=IDS).logits
    assert torch.equal(tight(input_ids=IDS).logits, wanted)


def test_device_maps() -> None:
    folder = str(EMBEDDED_MODEL_DIR)
    config = with_streaming(folder, FULL_STREAM)
    for device_map in ({"model": "cpu", "lm_head": "meta"}, {"": "disk"}):
        with pytest.raises(ValueError, match="compute on one device"):
            AutoModelForCausalLM.from_pretrained(folder, config=config, device_map=device_map)
    with use_backend(PoisoningBackend):
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, device_map="cpu")
    assert streaming_stats(model) is not None


def test_other_loaders() -> None:
    with pytest.raises(ValueError, match="GGUF"):
        load_streamed("model.Q4_K_M.gguf")
    with pytest.raises(ValueError, match="GGUF"):
        load_streamed("somebody/model-GGUF", gguf_file="model.Q4_K_M.gguf")
    with pytest.raises(ValueError, match="got quantization_config=BitsAndBytesConfig"):
        load_streamed(str(EMBEDDED_MODEL_DIR), quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    with pytest.raises(ValueError, match="returns the model alone"):
        load_streamed(str(EMBEDDED_MODEL_DIR), output_loading_info=True)


def test_bitsandbytes_keeps_its_loading() -> None:
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL_DIR, quantization_config=config, device_map="cpu")
    with pytest.raises(ValueError, match=r"is a Params4bit, which is more than its bytes"):
        stream_layers(model, FULL_STREAM, device="cpu")
    assert model(input_ids=IDS).logits.isfinite().all()


def test_one_memory_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvboost_hf"):
        model = load_streamed(str(EMBEDDED_MODEL_DIR), FULL_STREAM, device="cpu")
    assert "share their memory" in caplog.text
    assert streaming_stats(model) is None


def test_from_disk_on_a_cpu(checkpoint: Path, tmp_path: Path) -> None:
    """A model larger than memory: slots that a thread fills from files."""
    wanted = load_streamed(str(checkpoint), device="cpu")(input_ids=IDS).logits
    config = StreamingConfig(residency_mode="ffn_only_stream", disk_folder=str(tmp_path / "layers"))
    model = load_streamed(str(checkpoint), config, device="cpu")
    for _ in range(3):
        assert torch.equal(model(input_ids=IDS).logits, wanted)
    stats = streaming_stats(model)
    assert stats is not None
    assert (stats.layer_calls, stats.misses) == (12, 1)
    for path in (tmp_path / "layers").glob("layer-*.bin"):
        os.truncate(path, 4)  # at once: a thread reads what comes next
    with pytest.raises(OSError, match=r"layer-\w+.bin must have \d+ bytes, has 4"):
        model(input_ids=IDS)


_PEAK = """
import resource, sys, torch
from kvboost_hf import StreamingConfig, load_streamed
from kvboost_hf.offload.backend import use_backend
from tests.offload.poisoning import PoisoningBackend
import transformers.models.llama.modeling_llama
def high(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
def now(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) * 1024
load_streamed(sys.argv[2], StreamingConfig(residency_mode="full_stream"), device="cpu")  # imports, caches
before = now()
with use_backend(PoisoningBackend):
    model = load_streamed(sys.argv[1], StreamingConfig(residency_mode="full_stream", quant_kernel=sys.argv[3]))
print(high() - before, now() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_embeddings_that_wait_take_no_room_of_the_device(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are loaded after the layers, to the host: beside the layers that stay, the device may have no room."""
    loads: list[dict[str, torch.device]] = []
    load: Any = vars(checkpoints)["convert_and_load_state_dict_in_model"]

    def watch(model: Any, tensors: Any, settings: Any) -> Any:
        loads.append(settings.device_map)
        assert (model.get_input_embeddings().weight is None) == (len(loads) <= model.config.num_hidden_layers)
        return load(model, tensors, settings)

    monkeypatch.setattr(checkpoints, "convert_and_load_state_dict_in_model", watch)
    with use_backend(PoisoningBackend):
        model = load_streamed(str(checkpoint), StreamingConfig(keep_first_k=1), device="cpu")
    assert len(loads) == model.config.num_hidden_layers + 1
    assert loads[-1].keys() - {""} == {"model.embed_tokens.weight"}


def test_embeddings_that_wait_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_layers(4)
    weight = model.get_input_embeddings().weight
    moved = spied(monkeypatch)
    with use_backend(PoisoningBackend):
        stream_layers(model, FULL_STREAM, device="cpu")
    assert id(weight) in moved


def spied(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ids of the tensors that stay where they are when all others go to the device."""
    stay: set[int] = set()
    move = build._move
    monkeypatch.setattr(build, "_move", lambda model, device, ids: (stay.update(ids), move(model, device, ids)))
    return stay


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "held"), [("torch", 1.0), ("auto", 0.55 / 0.52)])
def test_memory_of_loading(kernel: str, held: float, tmp_path: Path) -> None:
    """Nothing is in memory twice: at its peak, no more than 1.15 times the weights, two slots of 24 included.

    Weights in the layout of CPUs take 0.55 bytes each, those in the files 0.52.
    """
    config = LlamaConfig(
        vocab_size=1000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16
    )
    write_random_awq(config, tmp_path, max_shard_size="200MB")
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size > 500e6
    told = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path), str(EMBEDDED_MODEL_DIR), kernel],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    peak, after = map(int, told.stdout.split())
    assert size <= after
    assert peak <= 1.15 * held * size


def test_a_build_for_gpus_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch names the accelerator that it was built for, unless it is asked whether there is one."""

    def built_for(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for)
    assert build.default_device() == torch.device("cpu")
