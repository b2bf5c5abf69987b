"""Tiers, codecs and live quantization on a CUDA device: K/V that goes to pinned memory, to disk, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, KVQuantConfig, check_model_compatibility
from tests.conftest import counted, left_pad, make_model, random_ids
from tests.gpu.device import DEVICE, ON_GPU, needs_gpu
from tests.internals.cache import ComputePace, LayerKVReader, loading, prompt_plan
from tests.internals.top import device_link

BASE = random_ids(2000, seed=1)


def on_gpu(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in left_pad(ids).items()}


def reader(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = make_model("llama").to(DEVICE, dtype)
    check_model_compatibility(model)
    return model


def tokens(model: PreTrainedModel, ids: torch.Tensor, cache: ChunkReuseCache | None = None) -> torch.Tensor:
    return model.generate(**on_gpu(ids), max_new_tokens=8, do_sample=False, past_key_values=cache)


def test_what_is_stored_is_in_pinned_memory_and_arrives_whole() -> None:
    model = reader()
    store = ChunkStore(model, chunk_size=64)
    cache = ChunkReuseCache(model, store)
    tokens(model, BASE, cache)
    held = cache._live.layers[0].columns(0, 64, 128)
    chunk = next(chunk for chunk in store.inspect().chunks.values() if chunk.start == 64)
    assert all(plane.is_pinned() == ON_GPU for plane in chunk.kv.tensors)
    for found, expected in zip(LayerKVReader(chunk.kv).layer(0) or (), held or (), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs_gpu("its kernels read pinned memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hit_is_gathered_from_pinned_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one kernel a layer, also if the store evicts it at once and the memory is used again."""
    monkeypatch.setattr(prompt_plan, "_MIN_BYTES", 1)
    assert device_link.link.gathers(DEVICE)
    gather, layers = device_link.CudaLink.gather, []

    def noted(self: device_link.CudaLink, opened: Any, table: Any, places: Any) -> None:
        layers.append(places)
        gather(self, opened, table, places)

    monkeypatch.setattr(device_link.CudaLink, "gather", noted)
    model = reader(dtype)
    store, plain = ChunkStore(model, chunk_size=64), tokens(model, BASE)
    store.warm(BASE)
    for _ in range(2):
        layers.clear()
        cache = ChunkReuseCache(model, store)
        torch.cuda._sleep(2**28)  # what the kernels wait for
        found = tokens(model, BASE, cache)
        assert cache.report.tier_tokens["ram"] >= 1920
        assert len(layers) == model.config.num_hidden_layers
        assert torch.equal(found, plain)
        store.clear()
        for _ in range(40):
            device_link.link.pinned(torch.Size([4, 2, 64, 16]), dtype).fill_(9)
        store.warm(BASE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restart(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # A GPU computes so small a model sooner than a disk is read, and then nothing is loaded.
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)
    plain = tokens(reader(dtype), BASE)
    for place in ("disk", "disk again"):
        model = reader(dtype)
        store = ChunkStore(model, chunk_size=64, tiers=[f"disk:{tmp_path}:1GB"])
        if place == "disk":
            tokens(model, BASE, ChunkReuseCache(model, store))
            store.close()
            continue
        for tier in ("disk", "ram"):
            cache = ChunkReuseCache(model, store)
            with counted(model) as work:
                found = tokens(model, BASE, cache)
            assert cache.report.tier_tokens[tier] >= 1920
            assert work.tokens < 100
            if dtype == torch.float32:
                assert torch.equal(found, plain)
            store.flush()
        assert all(
            plane.is_pinned() == ON_GPU for chunk in store.inspect().chunks.values() for plane in chunk.kv.tensors
        )
        store.close()


def test_the_device_tier() -> None:
    model = reader()
    store = ChunkStore(model, chunk_size=64, tiers=["device:1GB"])
    plain = tokens(model, BASE)
    for tier in ("live", "ram", "device"):
        cache = ChunkReuseCache(model, store)
        assert torch.equal(tokens(model, BASE, cache), plain)
        if tier != "live":
            assert cache.report.tier_tokens[tier] >= 1920
    assert store.stats()["tiers"]["device"]["bytes"] > 0


@pytest.mark.parametrize("codec", ["raw", "turboquant"])
def test_hits_are_copied_in_groups_of_layers_while_the_model_computes(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[loading.Loading] = []
    start = loading.Loading.start
    monkeypatch.setattr(prompt_plan, "_MIN_BYTES", 1)
    for name, nbytes in (("_FIRST_BYTES", 1), ("_MOST_BYTES", 2**21)):
        monkeypatch.setattr(loading, name, nbytes)
    monkeypatch.setattr(loading.Loading, "start", lambda self: (begun.append(self), start(self)))
    model = make_model("deep_llama").to(DEVICE)
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=64, tiers=["device:1GB"], codec=codec)
    tokens(model, BASE, ChunkReuseCache(model, store))
    found = [tokens(model, BASE, ChunkReuseCache(model, store)) for _ in range(3)]  # the first one from host memory
    assert len(begun) == ON_GPU
    assert all(torch.equal(each, found[0]) for each in found)
    if codec == "raw":
        assert torch.equal(found[0], tokens(model, BASE))


@pytest.mark.parametrize("codec", ["int8", "int4", "turboquant", "turboquant:3.5", "turboquant:2"])
def test_codecs_give_on_the_device_what_they_give_on_the_host(codec: str) -> None:
    model = reader()
    store = ChunkStore(model, chunk_size=64, codec=codec)
    on_device = ChunkReuseCache(model, store)
    tokens(model, BASE, on_device)
    block = next(iter(store.inspect().chunks.values())).kv.blocks[0]
    run = block.run(0)

    def decoded(device: torch.device | str) -> torch.Tensor:
        planes = {name: plane[run.start : run.stop].to(device) for name, plane in block.planes.items()}
        shape = (len(run), *block.shape)
        return block.codec.decode(planes, shape, block.dtype, block.role, block.rotations[run.start]).cpu()

    torch.testing.assert_close(decoded(DEVICE), decoded("cpu"), rtol=1e-3, atol=1e-3)
    again = ChunkReuseCache(model, store)
    tokens(model, BASE, again)
    assert again.report.reused_tokens >= 1920


@pytest.mark.parametrize("config", [KVQuantConfig(method="kivi", key_bits=8, value_bits=8), KVQuantConfig()])
def test_live_quantization(config: KVQuantConfig) -> None:
    model = reader()
    plain = tokens(model, BASE)
    cache = ChunkReuseCache(model, live_quant=config)
    found = tokens(model, BASE, cache)
    assert found.shape == plain.shape
    exact = ChunkReuseCache(model)
    tokens(model, BASE, exact)
    assert cache.nbytes < exact.nbytes
    if config.method == "kivi":
        assert torch.equal(found, plain)
