"""Moved chunks on a CUDA device: repaired in full they give plain answers, in part they cost a part."""

import pytest
import torch

from kvboost_hf import ChunkReuseCache
from tests.conftest import as_inputs, counted, left_pad, make_model
from tests.gpu.device import DEVICE
from tests.internals.cache import REPAIRS, blend_reason
from tests.parity.test_blend import MOVABLE, assert_same, blend, generate, prompt, store_with_documents


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


@pytest.mark.parametrize("repair", ["first_k", "cacheblend", "query"])
@pytest.mark.parametrize("name", MOVABLE)
def test_with_everything_repaired_it_is_plain_generate(name: str, repair: str) -> None:
    model = make_model(name).to(DEVICE)
    rows = on_gpu(left_pad(prompt([2, 0, 3, 1]), prompt([1, 3], seed=7)))
    cache = ChunkReuseCache(model, store_with_documents(model), blend(repair, 1.0))
    found = generate(model, rows, cache)
    assert cache.report.moved_tokens == 256 + 128, cache.report.moved_reason
    assert_same(found, generate(model, rows))


@pytest.mark.parametrize("repair", ["none", "first_k", "query"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_part_costs_a_part(repair: str, dtype: torch.dtype) -> None:
    model = make_model("llama").to(DEVICE, dtype)
    assert blend_reason(model, REPAIRS[repair].measure) is None
    cache = ChunkReuseCache(model, store_with_documents(model), blend(repair))
    with counted(model) as work:
        generate(model, on_gpu(as_inputs(prompt([2, 0, 3, 1]))), cache, max_new_tokens=1)
    assert cache.report.moved_tokens == 256
    assert cache.report.forwarded_tokens == work.tokens < 110
