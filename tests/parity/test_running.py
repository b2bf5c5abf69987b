"""Forwards under way: what they leave in a cache, and that they do not keep it alive."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.conftest import make_model, random_ids
from tests.internals.cache import REPAIRS, LayerKV, loading, prompt_plan, reused

BASE = random_ids(200)


@pytest.fixture
def by_counting() -> Iterator[None]:
    """Without the collector of garbage, which comes too late for whoever is short of memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


def run(model: PreTrainedModel, ids: torch.Tensor, cache: ChunkReuseCache, keep: int = 1) -> None:
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=keep)


@pytest.fixture
def rows_overlap(monkeypatch: pytest.MonkeyPatch) -> list[loading.Loading]:
    """Chunks in host memory are as far from the model as those of a GPU."""
    found: list[loading.Loading] = []

    class Noted(loading.Loading):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(LayerKV, "nbytes_elsewhere", property(lambda self: 2**21))
    monkeypatch.setattr(prompt_plan, "_MIN_BYTES", 1)
    monkeypatch.setattr(reused, "Loading", Noted)
    return found


@pytest.mark.daily
@pytest.mark.parametrize("begun", [20, 31, 32])
def test_a_step_that_completes_a_chunk_offers_it(model: PreTrainedModel, begun: int) -> None:
    """Neither the one before nor the one behind."""
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store)
    run(model, BASE[:, :begun], cache)
    for held in range(begun + 1, 66):
        run(model, BASE[:, held - 1 : held], cache)
        store.flush()
        assert store.stats()["chunks"] == held // 16


@pytest.mark.usefixtures("by_counting")
@pytest.mark.parametrize("repair", REPAIRS)
def test_a_cache_is_freed_after_a_prompt_with_moved_chunks(model: PreTrainedModel, repair: Any) -> None:
    store = ChunkStore(model, chunk_size=32)
    policy = ReusePolicy(mode="blend", repair=repair, min_prefill_saving=0)
    first = ChunkReuseCache(model, store, policy)
    run(model, BASE, first)
    first.store_all()
    cache = ChunkReuseCache(model, store, policy)
    run(model, torch.cat([random_ids(40, seed=9), BASE], dim=1), cache)
    assert cache.report.moved_tokens > 0
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


@pytest.mark.usefixtures("by_counting")
def test_a_cache_is_freed_after_a_load_beside_the_forward(
    model: PreTrainedModel, rows_overlap: list[loading.Loading]
) -> None:
    store = ChunkStore(model, chunk_size=32)
    run(model, BASE, ChunkReuseCache(model, store))
    cache = ChunkReuseCache(model, store)
    run(model, BASE, cache)
    assert cache.report.reused_tokens == 192
    assert len(rows_overlap) == 1
    found = weakref.ref(rows_overlap.pop())
    assert found() is None
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


@pytest.mark.daily
@pytest.mark.usefixtures("by_counting")
@pytest.mark.parametrize(
    ("before", "ids", "keep"),
    [(None, BASE, 1), (BASE, random_ids(1, seed=3), 1), (BASE, random_ids(4, seed=3), 0)],
    ids=["prompt", "step", "candidates"],
)
def test_a_cache_is_freed_after_a_forward_that_failed(
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    before: torch.Tensor | None,
    ids: torch.Tensor,
    keep: int,
) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    if before is not None:
        run(model, before, cache)
    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[1].mlp, "forward", _fail)
        try:
            run(model, ids, cache, keep)
        except OutOfLuckError as error:
            error.__traceback__ = None
        else:
            pytest.fail("it has not failed")
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


class OutOfLuckError(Exception):
    pass


def _fail(*args: Any, **kwargs: Any) -> None:
    raise OutOfLuckError


def test_rows_that_share_chunks_do_not_load_them_row_by_row(rows_overlap: list[loading.Loading]) -> None:
    """Where the attention reads chunks in place, they are loaded once for all rows."""
    model = make_model("llama")
    model.set_attn_implementation("kvboost_fa2")
    store = ChunkStore(model, chunk_size=32)
    run(model, BASE, ChunkReuseCache(model, store))
    two = torch.cat([torch.cat([BASE[:, :160], random_ids(20, seed=seed)], dim=1) for seed in (1, 2)])
    cache = ChunkReuseCache(model, store)
    run(model, two, cache)
    assert cache.report.reused_tokens == 2 * 160
    assert rows_overlap == []


def compiled_steps(cache: ChunkReuseCache, call: Callable[[], Any]) -> int:
    """How often a call asks each layer of a fixed size how much it holds, which waits for a GPU."""
    asked = 0
    layer = cache._live.static_layers[0]
    catch_up = type(layer).catch_up

    def counted(self: Any) -> bool:
        nonlocal asked
        asked += self is layer
        return catch_up(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(layer), "catch_up", counted)
        call()
    return asked


def test_an_eager_step_of_a_fixed_size_asks_once(model: PreTrainedModel) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32), max_cache_len=256)
    run(model, BASE, cache)
    assert compiled_steps(cache, lambda: run(model, random_ids(1, seed=3), cache)) == 1


@pytest.mark.parametrize("store", [True, False], ids=["own", "default"])
def test_a_cache_does_not_keep_a_model_alive_that_a_hook_refers_to(store: bool) -> None:
    model = make_model("llama")
    cache = ChunkReuseCache(model, ChunkStore(model) if store else None)
    handle = model.register_forward_hook(lambda *_, own=model: None)
    run(model, BASE, cache)
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None
    assert cache.report.prompt_tokens
