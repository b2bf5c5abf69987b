"""Models with streamed layers on a CUDA device."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from kvboost_hf import (
    ChunkReuseCache,
    StreamingConfig,
    load_streamed,
    stop_streaming,
    streaming_plan,
    streaming_stats,
)
from recipes.awq import write_random_awq
from tests.conftest import as_inputs, random_ids
from tests.gpu.device import DEVICE, ON_GPU, needs_gpu
from tests.internals.offload import CudaBackend, LayerMemory, can_map, cuda_pinning, map_to_cuda, use_backend
from tests.offload.at_once import HostLink

LAYERS, SIZE, NEW = (8, 32, 12) if ON_GPU else (6, 4, 3)
IDS = random_ids(60, seed=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """AWQ weights of 8 layers of 12 MB, and as much of embeddings and head."""
    folder = tmp_path_factory.mktemp("awq")
    config = Qwen2Config(
        vocab_size=128 * SIZE,
        hidden_size=32 * SIZE,
        intermediate_size=128 * SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=SIZE // 2,
        num_key_value_heads=4 if ON_GPU else 2,
        initializer_range=0.1,
        dtype=torch.float16,
    )
    write_random_awq(config, folder)
    return str(folder)


def load(checkpoint: str, **kwargs: Any) -> Any:
    with nullcontext() if ON_GPU else use_backend(partial(CudaBackend, DEVICE, HostLink())):
        model = load_streamed(checkpoint, StreamingConfig(**kwargs), device=DEVICE)
    model.generation_config.eos_token_id = None
    return model


def generate(model: Any, **kwargs: Any) -> torch.Tensor:
    inputs = {name: tensor.to(DEVICE) for name, tensor in as_inputs(IDS).items()}
    found: torch.Tensor = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **kwargs)
    return found


@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
@pytest.mark.parametrize(
    "given",
    [
        {"residency_mode": "full_stream"},
        {"residency_mode": "full_stream", "n_staging_slots": 3},
        {"residency_mode": "ffn_only_stream"},
        {"keep_first_k": 2, "keep_last_k": 1},
        {"residency_mode": "full_stream", "pin_memory": False},
        {"residency_mode": "full_stream", "disk_folder": "layers"},
    ],
    ids=str,
)
def test_as_resident(checkpoint: str, given: dict[str, Any], attention: str, tmp_path: Path) -> None:
    whole = load(checkpoint, residency_mode="full_resident")
    whole.set_attn_implementation(attention)
    assert streaming_stats(whole) is None
    if "disk_folder" in given:
        given = {**given, "disk_folder": str(tmp_path / given["disk_folder"])}
    model = load(checkpoint, **given)
    model.set_attn_implementation(attention)
    ids = IDS.to(DEVICE)
    with torch.no_grad():
        wanted = whole(input_ids=ids, output_hidden_states=True)
        for _ in range(4):
            found = model(input_ids=ids, output_hidden_states=True)
            torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=0)
            assert all(map(torch.equal, found.hidden_states, wanted.hidden_states))
    assert torch.equal(generate(model), generate(whole))
    cache = ChunkReuseCache(model)
    for _ in range(2):
        assert torch.equal(generate(model, past_key_values=cache), generate(whole))
    assert cache.report.reused_tokens >= 59
    stats = streaming_stats(model)
    assert stats is not None
    assert stats.misses == 1
    assert stats.copy_rate > 0


def test_on_a_stream_of_the_caller(checkpoint: str) -> None:
    whole, model = load(checkpoint, residency_mode="full_resident"), load(checkpoint, residency_mode="full_stream")
    ids = IDS.to(DEVICE)
    with torch.no_grad():
        wanted = whole(input_ids=ids).logits
        torch.cuda.synchronize()
        for _ in range(6):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                found = model(input_ids=ids).logits
            also = model(input_ids=ids).logits
            torch.cuda.synchronize()
            assert torch.equal(found, wanted)
            assert torch.equal(also, wanted)


@needs_gpu("it measures its memory")
def test_budget(checkpoint: str) -> None:
    """The peak is within it, and as many layers stay as that allows."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(checkpoint, vram_budget="100MB", max_tokens=256)
    plan = streaming_plan(model)
    assert plan is not None
    assert 0 < len(plan.resident) < LAYERS
    generate(model)
    assert torch.cuda.max_memory_allocated() - before <= 100e6


@needs_gpu("it reads pinned memory")
def test_mapped_memory() -> None:
    assert can_map(DEVICE)
    flat = LayerMemory(cuda_pinning(DEVICE)).allocate(1 << 20)
    flat.view(torch.float16).copy_(torch.arange(1 << 19) % 1000)
    mapped = map_to_cuda(flat, DEVICE)
    assert mapped.is_cuda
    assert torch.equal(mapped.cpu(), flat)
    flat[:16] = 7
    assert torch.equal(mapped[:16].cpu(), flat[:16])  # no copy
    with pytest.raises(RuntimeError):
        map_to_cuda(torch.zeros(64, dtype=torch.uint8), DEVICE)


def test_embeddings_in_host_memory(checkpoint: str) -> None:
    model = load(checkpoint, residency_mode="full_stream")
    without = load(checkpoint, residency_mode="full_stream", host_embeddings=False)
    plan = streaming_plan(model)
    assert plan is not None
    assert plan.host_embeddings
    weight = model.get_input_embeddings().weight
    assert weight.device.type == DEVICE.type
    assert torch.equal(weight, without.get_input_embeddings().weight)
    assert torch.equal(generate(model), generate(without))


def test_stopped(checkpoint: str) -> None:
    """Layers get their weights back in host memory, and everything else can follow them."""
    model = load(checkpoint, keep_first_k=2)
    assert streaming_stats(model) is not None
    wanted = generate(model)
    model = stop_streaming(model).to(DEVICE)
    assert streaming_stats(model) is None
    assert torch.equal(generate(model), wanted)
