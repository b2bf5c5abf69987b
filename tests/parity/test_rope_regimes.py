"""Rotary frequencies that depend on the length: K/V of one regime is never used in another."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, check_model_compatibility
from tests.conftest import _COMMON, as_inputs, counted, left_pad, random_ids

LIMIT = 128  # tokens that the frequencies were trained for
NEW = 6
BASE, OTHER = random_ids(300, seed=1), random_ids(300, seed=2)

_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.3, 1.7, 2.0, 3.0, 4.0, 6.0, 8.0],
}


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "phi3":
        config = Phi3Config(**_COMMON, rope_parameters=_LONGROPE, original_max_position_embeddings=LIMIT)
        return Phi3ForCausalLM(config).eval()
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    positions = {"max_position_embeddings": LIMIT} if kind == "dynamic" else {}
    rope = dynamic if kind == "dynamic" else _LONGROPE
    return LlamaForCausalLM(LlamaConfig(**{**_COMMON, **positions}, rope_parameters=rope)).eval()


def forget_length(model: PreTrainedModel) -> None:
    """Dynamic frequencies stay those of the longest text so far until a short one comes: plain calls differ, too."""
    with torch.no_grad():
        model(OTHER[:, :1])


def check(model: PreTrainedModel, cache: ChunkReuseCache, inputs: dict[str, torch.Tensor], **mode: Any) -> int:
    """Parity with plain generate(); returns prompt tokens that were really forwarded."""
    wanted = {"output_logits": True, "return_dict_in_generate": True}
    arguments = {**inputs, "max_new_tokens": NEW, "eos_token_id": None, **wanted, **mode}
    forget_length(model)
    plain = model.generate(**arguments)
    forget_length(model)
    with counted(model) as work:
        reused = model.generate(**arguments, past_key_values=cache)
    assert torch.equal(plain.sequences, reused.sequences)
    for expected, found in zip(plain.logits, reused.logits, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    return work.tokens - len(inputs["input_ids"]) * (NEW - 1)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "phi3"])
def test_within_the_original_length(kind: str) -> None:
    model = make(kind)
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    assert check(model, cache, as_inputs(BASE[:, :100])) == 100
    assert check(model, cache, as_inputs(BASE[:, :100])) == 1
    assert check(model, ChunkReuseCache(model, cache.store), as_inputs(BASE[:, :110])) <= 32
    check(model, cache, left_pad(BASE[:, :100], OTHER[:, :60]))
    assert cache.report.reused_tokens >= 96


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "phi3"])
def test_across_it_nothing_is_shared(kind: str) -> None:
    model = make(kind)
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    for ids in (BASE[:, :100], BASE[:, :200], BASE[:, :100], BASE[:, :127], BASE[:, :128], BASE[:, :129]):
        check(model, cache, as_inputs(ids))
        check(model, ChunkReuseCache(model, cache.store), as_inputs(ids))
    # Decoding from one regime into the other, and going on from there.
    told = model.generate(**as_inputs(BASE[:, :120]), max_new_tokens=30, past_key_values=cache)
    forget_length(model)
    assert torch.equal(told, model.generate(**as_inputs(BASE[:, :120]), max_new_tokens=30))
    for ids in (torch.cat([told, OTHER[:, :10]], dim=1), told[:, :126], told):
        check(model, cache, as_inputs(ids))
        check(model, ChunkReuseCache(model, cache.store), as_inputs(ids))


def test_the_check_of_a_store_computes_each_text_with_its_own_frequencies() -> None:
    model = make("longrope")
    store = ChunkStore(model, chunk_size=32)
    for ids in (BASE[:, :100], BASE[:, :200]):
        check(model, ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0)), as_inputs(ids))
    found = store.check_integrity()
    assert found.wrong == 0
    assert found.forwarded_tokens == 96 + 192


def test_dynamic_says_why() -> None:
    model = make("dynamic")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    for _ in range(2):
        assert check(model, cache, as_inputs(BASE[:, :200])) == 200
        assert "rotary frequencies depend on the length" in (cache.report.bypass_reason or "")


@pytest.mark.daily
@pytest.mark.parametrize("kind", ["longrope", "phi3"])  # Phi-3 leaves out the cache that generate() was given there
def test_longrope_reuses_beyond_it_too(kind: str) -> None:
    model = make(kind)
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    assert check(model, cache, as_inputs(BASE[:, :200])) == 200
    assert check(model, cache, as_inputs(BASE[:, :210])) == 10
    assert check(model, ChunkReuseCache(model, cache.store), as_inputs(BASE[:, :200])) <= 32
    # A row that is short has the frequencies of the longest one, and none of its own K/V.
    batch = left_pad(BASE[:, :200], OTHER[:, :90])
    check(model, cache, batch)
    check(model, ChunkReuseCache(model, cache.store), batch)
    check(model, ChunkReuseCache(model, cache.store), as_inputs(OTHER[:, :90]))
    check(model, cache, as_inputs(BASE[:, :200]), prefill_chunk_size=50)
    for mode in ({"max_new_tokens": 30}, {"max_new_tokens": 30, "num_beams": 2}):  # across it
        check(model, cache, as_inputs(BASE[:, :120]), **mode)
    assert cache.store.check_integrity().wrong == 0


def test_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the regimes taken for one, the answers would be other ones."""
    monkeypatch.setattr("kvboost_hf.cache.forward.admission.rope_regime", lambda model, length: b"")
    model = make("longrope")
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    check(model, cache, as_inputs(BASE[:, :100]))
    with pytest.raises(AssertionError):
        check(model, cache, as_inputs(BASE[:, :200]))
