"""Exact reuse on a CUDA device: parity, half precision, K/V that travels to the host and back."""

from typing import Any

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from tests.conftest import FULL_ATTENTION, counted, left_pad, make_model, random_ids
from tests.gpu.device import DEVICE
from tests.internals.cache import WeightsWatch, _reads_addresses, _window
from tests.parity.test_changed_weights import SAMPLED, sampled, values

BASE = random_ids(200, seed=1)


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_parity(name: str) -> None:
    model = make_model(name).to(DEVICE)
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=32)
    batches: list[dict[str, Any]] = [
        left_pad(BASE),
        left_pad(BASE[:, :90]),
        left_pad(BASE[:, :150], random_ids(70, seed=2)),
        left_pad(BASE[:, :180], random_ids(170, seed=3)),
    ]
    cache = ChunkReuseCache(model, store)
    for batch in map(on_gpu, batches):
        for held in (cache, ChunkReuseCache(model, store)):
            plain = model.generate(**batch, max_new_tokens=8, output_logits=True, return_dict_in_generate=True)
            reused = model.generate(
                **batch, max_new_tokens=8, output_logits=True, return_dict_in_generate=True, past_key_values=held
            )
            assert torch.equal(plain.sequences, reused.sequences)
            for expected, found in zip(plain.logits, reused.logits, strict=True):
                torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
            assert held.report.bypass_reason is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = make_model("llama").to(DEVICE, dtype)
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=32)
    store.warm(BASE)
    cache = ChunkReuseCache(model, store)
    with counted(model) as work:
        model.generate(**on_gpu(left_pad(BASE)), max_new_tokens=1, past_key_values=cache)
    assert work.tokens == 1
    assert all(block.device.type == "cpu" for chunk in store.inspect().chunks.values() for block in chunk.kv.tensors)
    assert all(layer.keys.device.type == DEVICE.type for layer in cache.layers)


def test_moved_to_the_gpu_between_calls() -> None:
    model = make_model("llama")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    model.generate(**left_pad(BASE), max_new_tokens=2, past_key_values=cache)
    model.to(DEVICE)
    found = model.generate(**on_gpu(left_pad(BASE)), max_new_tokens=8, past_key_values=cache)
    assert torch.equal(found, model.generate(**on_gpu(left_pad(BASE)), max_new_tokens=8))


@pytest.mark.parametrize("kind", SAMPLED)
def test_weights_are_read_at_their_addresses(kind: str) -> None:
    tensor, other = SAMPLED[kind]().to(DEVICE), torch.ones(1000, device=DEVICE)
    assert _reads_addresses(tensor.device)
    offset, sizes, strides = _window(tensor) or (tensor.storage_offset(), tensor.shape, tensor.stride())
    view = tensor.as_strided(sizes, strides, offset).contiguous().flatten().view(torch.uint8).cpu()
    assert values(sampled([tensor]), [tensor]) == view.numpy().tobytes()
    assert len(values(sampled([tensor, other]), [tensor, other])) > len(view)


def test_a_write_that_nobody_counts() -> None:
    tensors = [torch.randn(64, 96, device=DEVICE, dtype=torch.bfloat16), torch.randn(12, device=DEVICE)]
    watch = WeightsWatch()
    before = watch.epoch(tensors)
    assert watch.epoch(tensors) == before
    tensors[1].data.add_(1)
    assert watch.epoch(tensors) == before + 1
