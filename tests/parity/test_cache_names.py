"""A cache is taken as `cache`, the name since transformers 5.24, with each release, and by the names before it."""

import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from tests.architectures import make_architecture
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.compat import CACHE
from tests.parity.compare import same_as_plain

BASE = random_ids(100, seed=1)
OLDER = {"llama": "past_key_values", "mamba2": "cache_params"}


def warnings_of_reuse(kind: str, argument: str) -> tuple[list[Any], list[Any]]:
    """What generate() and forwards warn of; the same answers, with one token of the second prompt computed."""
    model: Any = make_architecture(kind)
    store = ChunkStore(model, chunk_size=32)
    check_model_compatibility(model)
    plain = model.generate(**as_inputs(BASE), max_new_tokens=4)
    with torch.no_grad():
        logits = model(BASE, use_cache=True).logits[:, -1:]
    with warnings.catch_warnings(record=True) as of_generate:
        warnings.simplefilter("always")
        for _ in range(2):
            cache = ChunkReuseCache(model, store)
            assert torch.equal(model.generate(**as_inputs(BASE), **{argument: cache}, max_new_tokens=4), plain)
    assert cache.report.reused_tokens >= 64
    with warnings.catch_warnings(record=True) as of_forward, torch.no_grad():
        warnings.simplefilter("always")
        cache = ChunkReuseCache(model, store)
        found = model(BASE, **{argument: cache}, use_cache=True, logits_to_keep=1).logits
    assert cache.report.reused_tokens >= 64
    torch.testing.assert_close(found, logits, atol=2e-4, rtol=2e-4)
    return of_generate, of_forward


@pytest.mark.parametrize("kind", OLDER)
def test_the_newest_name(kind: str) -> None:
    assert warnings_of_reuse(kind, "cache") == ([], [])


@pytest.mark.parametrize("kind", OLDER)
def test_the_name_before_it(kind: str) -> None:
    """generate() of a release that has the newest name warns of the older one."""
    of_generate, of_forward = warnings_of_reuse(kind, OLDER[kind])
    assert [each.category for each in of_generate] == [FutureWarning, FutureWarning] * (CACHE == "cache")
    assert of_forward == []


def test_two_names(llama: Any) -> None:
    cache = ChunkReuseCache(llama)
    with pytest.raises((ValueError, FutureWarning), match="cache"):
        llama.generate(**as_inputs(BASE), cache=cache, past_key_values=ChunkReuseCache(llama), max_new_tokens=4)


def test_the_class_in_place_of_a_cache(llama: Any) -> None:
    """transformers marks what it is given: the mark took the place of a property, and later calls went wrong."""
    mark = vars(ChunkReuseCache)["_is_user_defined"]
    try:
        with pytest.raises(TypeError, match=r"got the class ChunkReuseCache\. Pass ChunkReuseCache\(model\)"):
            llama.generate(**as_inputs(BASE), **{CACHE: ChunkReuseCache}, max_new_tokens=2)
        assert vars(ChunkReuseCache)["_is_user_defined"] is mark
    finally:
        type.__setattr__(ChunkReuseCache, "_is_user_defined", mark)


def test_what_takes_the_name_is_no_patch(llama: PreTrainedModel) -> None:
    """K/V that was stored before another model of the class was given a cache is found after it, and the reverse."""
    store = ChunkStore(llama, chunk_size=32)
    check_model_compatibility(llama)
    assert same_as_plain(llama, ChunkReuseCache(llama, store), BASE) == 0
    ChunkReuseCache(make_model("llama", seed=5))
    assert same_as_plain(llama, ChunkReuseCache(llama, store), BASE) >= 96
