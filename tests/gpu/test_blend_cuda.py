"""Moved chunks on a CUDA device: repaired in full they give plain answers, in part they cost a part."""

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids
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


@pytest.mark.parametrize("name", MOVABLE)
@pytest.mark.parametrize("repair", ["none", "query"])
def test_a_live_edit_that_is_repaired_is_plain(name: str, repair: str) -> None:
    """K/V of the text before stays on the device on its way to its new place."""
    model = make_model(name).to(DEVICE)
    ids = random_ids(230, seed=1).to(DEVICE)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32), blend(repair))
    generate(model, as_inputs(ids), cache, max_new_tokens=1)
    new = random_ids(9, seed=5)[0]
    edited = cache.edit(drop=[(60, 110)], replace=[(20, 26, new)], move=[(120, 160, 30)])
    assert edited.device == ids.device
    assert cache.report.moved_tokens > 100
    cache.repair()
    longer = as_inputs(torch.cat([edited, random_ids(20, seed=9).to(DEVICE)], dim=1))
    assert_same(generate(model, longer, cache), generate(model, longer))
    assert cache.report.moved_tokens == 0
