"""torch.compile in its three forms. The backend "eager" traces and guards, and needs no C++ compiler."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, check_model_compatibility, last_cache
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.cache import idle_of
from tests.internals.compat import is_compiled

BASE = random_ids(100, seed=1)


def assign_forward(model: PreTrainedModel) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compile_in_place(model: PreTrainedModel) -> Any:
    model.compile(backend="eager")
    return model


def compile_a_layer(model: PreTrainedModel) -> Any:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return model


WAYS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "model.forward": assign_forward,
    "model.compile()": compile_in_place,
    "torch.compile(model)": lambda model: torch.compile(model, backend="eager"),
    "torch.compile(layer)": compile_a_layer,
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def llama() -> PreTrainedModel:
    """With one layer: tracing takes seconds for each."""
    model = make_model("llama")
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    return model


@pytest.mark.daily
@pytest.mark.parametrize("max_cache_len", ["auto", 128])
@pytest.mark.parametrize("way", WAYS)
def test_reuse(llama: PreTrainedModel, way: str, max_cache_len: Any) -> None:
    check_model_compatibility(llama)  # before it is compiled, since each shape is compiled for itself
    plain = llama.generate(**as_inputs(BASE), max_new_tokens=2)
    store = ChunkStore(llama, chunk_size=32)
    cache = ChunkReuseCache(llama, store, max_cache_len=max_cache_len)
    compiled = WAYS[way](llama)
    for reused in (0, 99):
        found = compiled.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=2)
        assert torch.equal(found, plain)
        assert cache.report.bypass_reason is None
        assert cache.report.reused_tokens == reused
        assert is_compiled(llama) == ("compiled by somebody else" in str(cache.report.eager_reason))


@pytest.mark.slow
def test_moved_chunks(llama: PreTrainedModel) -> None:
    """Compiled after the model was found to do well with them."""
    document = random_ids(64, seed=2)
    inputs = as_inputs(torch.cat([random_ids(21, seed=3), document, random_ids(20, seed=4)], dim=1))
    policy = ReusePolicy(mode="blend", repair="query", recompute_ratio=0.5, min_prefill_saving=0, sink_tokens=0)
    generate: Any = llama.generate
    found = []
    for compiled in (False, True):
        if compiled:
            assign_forward(llama)
        store = ChunkStore(llama, chunk_size=32)
        store.warm(document)
        cache = ChunkReuseCache(llama, store, policy)
        kwargs = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
        found.append(generate(**inputs, past_key_values=cache, **kwargs).logits[0])
        assert (cache.report.moved_tokens, cache.report.recomputed_tokens) == (64, 32), cache.report.moved_reason
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.daily
@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_is_seen(way: str, llama: PreTrainedModel) -> None:
    assert not is_compiled(llama)
    assert is_compiled(WAYS[way](llama))
    assert is_compiled(llama) == (way != "torch.compile(model)")  # which leaves the model itself as it was


@pytest.mark.slow
@pytest.mark.parametrize("way", [None, *WAYS])
def test_no_second_thread_runs_what_is_compiled(way: str | None, llama: PreTrainedModel) -> None:
    """It would crash the process where this thread compiles, or resets the compiler, at the same time."""
    document = random_ids(64, seed=2)
    inputs = as_inputs(torch.cat([random_ids(21, seed=3), document, random_ids(20, seed=4)], dim=1))
    policy = ReusePolicy(mode="blend", repair="none", progressive="ride", min_prefill_saving=0, sink_tokens=0)
    check_model_compatibility(llama)
    compiled = WAYS[way](llama) if way is not None else llama
    store = ChunkStore(llama, chunk_size=32)
    store.warm(document)
    cache = ChunkReuseCache(llama, store, policy)
    compiled.generate(**inputs, past_key_values=cache, max_new_tokens=1)
    assert cache.report.moved_tokens == 64, cache.report.moved_reason
    assert idle_of(cache).wait(30)
    is_plain = way in (None, "torch.compile(model)")  # whose generate() is that of the model itself
    assert (cache.report.repaired_tokens > 0) == is_plain
    cache.repair()  # this thread may
    assert cache.report.repaired_tokens > 0
    cache.reset()
    found = compiled.generate(**inputs, past_key_values=cache, max_new_tokens=2)
    assert cache.report.reused_tokens > 96
    assert torch.equal(found, compiled.generate(**inputs, max_new_tokens=2))


@torch.no_grad()
@pytest.mark.parametrize("max_cache_len", ["auto", 256])
def test_a_compiled_wrapper_called(llama: PreTrainedModel, max_cache_len: Any) -> None:
    """Only the forward of the wrapper is compiled, with hooks outside its graph, or inside where buffers are fixed."""
    compiled = torch.compile(llama, backend="eager")
    store = ChunkStore(compiled, chunk_size=32)  # type: ignore[arg-type]
    for reused in (0, 96 if max_cache_len == "auto" else 0):
        cache = ChunkReuseCache(compiled, store, max_cache_len=max_cache_len)  # type: ignore[arg-type]
        found = compiled(BASE, past_key_values=cache, logits_to_keep=1).logits
        torch.testing.assert_close(found, llama(BASE, logits_to_keep=1).logits, atol=2e-4, rtol=2e-4)
        report = cache.report
        assert (report.prompt_tokens, report.reused_tokens) == (BASE.shape[1], reused)
        assert (report.bypass_reason is None) == (max_cache_len == "auto")


@torch.no_grad()
@pytest.mark.parametrize("way", ["wrapper", "forward"])
def test_an_attached_model_is_compiled(llama: PreTrainedModel, way: str) -> None:
    """A forward that begins a text without a cache gets one of ours, also where it is compiled."""
    attach(llama, ChunkStore(llama, chunk_size=32))
    called = assign_forward(llama) if way == "forward" else torch.compile(llama, backend="eager")
    for reused in (0, 96):
        found = called(BASE, use_cache=True, logits_to_keep=1)
        assert last_cache(llama).report.reused_tokens == reused
        torch.testing.assert_close(found.logits, llama(BASE, use_cache=False).logits[:, -1:], atol=2e-4, rtol=2e-4)


def test_data_parallel_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"got DataParallel. .* itself, not a wrapper around it: model\.module\."):
        ChunkReuseCache(torch.nn.DataParallel(llama))  # type: ignore[arg-type]
