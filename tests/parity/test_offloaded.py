"""Weights that accelerate keeps in host memory or in files, so that the model's own are on the meta device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accelerate.hooks import remove_hook_from_submodules
from peft import LoraConfig
from transformers import LlamaForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, attach, check_model_compatibility, last_cache
from tests.conftest import as_inputs, make_model, random_ids
from tests.parity.compare import same_as_plain

# transformers before 5.23 takes the meta device for the model's own.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")

BASE = random_ids(100, seed=1)
MIXED = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk",
         "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip


def from_checkpoint(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder / "checkpoint")
    with torch.device("meta"):
        empty = LlamaForCausalLM(model.config)  # type: ignore[arg-type]
    empty.model.rotary_emb = model.model.rotary_emb  # computed, not saved
    return load_checkpoint_and_dispatch(empty.eval(), folder / "checkpoint", device_map=MIXED, offload_folder=folder)


def from_pretrained(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder / "checkpoint")
    return LlamaForCausalLM.from_pretrained(folder / "checkpoint", device_map=MIXED, offload_folder=folder)


WAYS: dict[str, Callable[[PreTrainedModel, Path], PreTrainedModel]] = {
    "cpu_offload": lambda m, _: cpu_offload(m, torch.device("cpu"), offload_buffers=True),
    "cpu_offload of each module": lambda m, _: cpu_offload(m, torch.device("cpu"), state_dict=m.state_dict()),
    "disk_offload": lambda m, folder: disk_offload(m, folder, torch.device("cpu")),
    "dispatch_model": lambda m, folder: dispatch_model(
        m, MIXED, main_device="cpu", offload_dir=folder, force_hooks=True
    ),
    "load_checkpoint_and_dispatch": from_checkpoint,
    "from_pretrained": from_pretrained,
}


@pytest.fixture(params=WAYS)
def offloaded(request: Any, llama: PreTrainedModel, tmp_path: Path) -> PreTrainedModel:
    model = WAYS[request.param](llama, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    return model


def test_reuse(offloaded: PreTrainedModel) -> None:
    plain = make_model("llama").generate(**as_inputs(BASE), max_new_tokens=4)
    assert check_model_compatibility(offloaded).moved
    store = ChunkStore(offloaded, chunk_size=32)
    cache = ChunkReuseCache(offloaded, store)
    assert same_as_plain(offloaded, cache, BASE) == 0
    assert same_as_plain(offloaded, cache, BASE) == 99
    assert same_as_plain(offloaded, ChunkReuseCache(offloaded, store), BASE) >= 96
    attach(offloaded, store)
    assert torch.equal(offloaded.generate(**as_inputs(BASE), max_new_tokens=4), plain)
    found = last_cache(offloaded)
    assert found is not None
    assert found.report.reused_tokens >= 96
    store.warm(random_ids(64, seed=3))


def weights_behind(model: PreTrainedModel) -> Any:
    hook = model.model.layers[1].self_attn.v_proj._hf_hook
    return hook.weights_map


def test_weights_in_host_memory_changed(llama: PreTrainedModel) -> None:
    model = cpu_offload(llama, torch.device("cpu"))
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    assert same_as_plain(model, cache, BASE) == 0
    weight = weights_behind(model)["weight"]
    for change in (lambda: weight.add_(0.3), lambda: weight.data.mul_(2)):
        with torch.no_grad():
            change()
        assert same_as_plain(model, cache, BASE) == 0
    assert same_as_plain(model, cache, BASE) == 99


def test_files_changed(llama: PreTrainedModel, tmp_path: Path) -> None:
    model = disk_offload(llama, tmp_path, torch.device("cpu"))
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    assert same_as_plain(model, cache, BASE) == 0
    path = next(tmp_path.glob("*layers.1.self_attn.v_proj.weight.dat"))
    path.write_bytes(torch.randn(32, 64).numpy().tobytes())
    assert same_as_plain(model, cache, BASE) == 0
    assert same_as_plain(model, cache, BASE) == 99


def test_taken_back(llama: PreTrainedModel) -> None:
    model = cpu_offload(llama, torch.device("cpu"))
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    same_as_plain(model, cache, BASE)
    remove_hook_from_submodules(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    same_as_plain(model, cache, BASE)
    model.load_state_dict(make_model("llama", seed=5).state_dict())
    assert same_as_plain(model, cache, BASE) == 0
    assert same_as_plain(model, cache, BASE) == 99


@pytest.mark.usefixtures("any_peft")
def test_adapters_on_an_offloaded_model(llama: PreTrainedModel) -> None:
    llama.add_adapter(LoraConfig(target_modules=["v_proj"], init_lora_weights=False), adapter_name="a")
    model = cpu_offload(llama.eval(), torch.device("cpu"))
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    assert same_as_plain(model, cache, BASE) == 0
    model.disable_adapters()
    assert same_as_plain(model, cache, BASE) == 0
    model.enable_adapters()
    assert same_as_plain(model, cache, BASE) >= 96
