"""What a cache asks of a model once, as long as the model stays as it is, it asks again after each kind of change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.conftest import make_model, random_ids
from tests.internals.cache import _are_counted, binding
from tests.internals.compat import probe_reason

IDS = random_ids(100, seed=1)


def generate(model: Any, ids: torch.Tensor, cache: ChunkReuseCache) -> None:
    model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)


def kept(model: Any) -> ChunkReuseCache:
    """A cache that has answered the same prompt before."""
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for _ in range(4):
        generate(model, IDS, cache)
    assert cache.report.reused_tokens == 99
    return cache


def _written_elsewhere(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _FORWARD(self, *args, **kwargs)


_FORWARD: Any = None


def test_code_that_is_put_into_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """No dict of the class changes with it."""
    model = make_model("llama")
    cache = kept(model)
    forward: Any = LlamaAttention.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    own = forward.__code__
    copy = type(forward)(own, forward.__globals__, "forward", forward.__defaults__, forward.__closure__)
    monkeypatch.setattr(f"{__name__}._FORWARD", copy)
    monkeypatch.setitem(forward.__globals__, "_FORWARD", copy)
    if own.co_freevars:
        pytest.skip("no other code fits into this closure")
    try:
        forward.__code__ = _written_elsewhere.__code__
        generate(model, IDS, cache)
        assert "was replaced" in str(cache.report.bypass_reason)
    finally:
        forward.__code__ = own
    generate(model, IDS, cache)
    assert cache.report.bypass_reason is None


def test_settings_that_ask_for_each_token() -> None:
    model = make_model("llama")
    cache, seen = kept(model), False
    with torch.no_grad():
        for wanted in (True, False, True):
            model.config.output_hidden_states = wanted
            cache.begin_anew()
            states = model(IDS, past_key_values=cache, logits_to_keep=1).hidden_states
            assert (states is not None) is wanted
            if wanted:
                assert states[-1].shape[1] == IDS.shape[1]
            assert cache.report.bypass_reason is None
            # The first call that asks for them computes those of all tokens, and keeps them.
            assert (cache.report.reused_tokens >= 96) is (not wanted or seen)
            seen |= wanted


def test_settings_that_change_in_the_middle_of_a_text() -> None:
    """A prompt in pieces, of which only the first finds the model as it was."""
    model = make_model("llama")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    with torch.no_grad():
        model(IDS[:, :50], past_key_values=cache, logits_to_keep=1)
        model.config.output_hidden_states = True
        states = model(IDS[:, 50:], past_key_values=cache, logits_to_keep=1).hidden_states
    assert states[-1].shape[1] == 50


def _other_dtype(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.double()


def _training(model: Any) -> None:
    model.train()


def _attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def _registered(model: Any) -> None:
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *args, **kwargs: own(*args, **kwargs)


@pytest.mark.parametrize("change", [_other_dtype, _training, _attention, _registered])
def test_a_model_is_probed_again(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model, probed = make_model("llama"), []
    cache = kept(model)
    probe = probe_reason

    def note(model: Any) -> str | None:
        probed.append(model)
        return probe(model)

    monkeypatch.setattr(binding, "probe_reason", note)
    generate(model, IDS, cache)
    probed.clear()
    generate(model, IDS, cache)
    assert not probed or not _are_counted()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", ALL_ATTENTION_FUNCTIONS["sdpa"])
    change(model)
    probed.clear()
    for _ in range(2):
        generate(model, IDS, cache)
    assert probed or cache.report.reused_tokens == 0


def test_a_chunk_is_stored_with_the_token_that_completes_it() -> None:
    """However little is looked at between two chunks, and whatever store the cache goes on with."""
    model = make_model("llama")
    first, second = ChunkStore(model, chunk_size=64), ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, first)

    def tell(tokens: int, start: int) -> None:
        for at in range(start, start + tokens):
            model(IDS[:, at : at + 1], past_key_values=cache, logits_to_keep=1)

    with torch.no_grad():
        model(IDS[:, :40], past_key_values=cache, logits_to_keep=1)
        tell(23, 40)
        assert first.stats()["chunks"] == 0
        tell(1, 63)
        assert first.stats()["chunks"] == 1
        cache.crop(60)
        tell(4, 60)
        tell(10, 64)
        cache.store = second
        tell(1, 74)
        tell(6, 75)
    assert second.stats()["chunks"] >= 1
