"""Audited prompts: what went wrong is noticed, put right, and not served again."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, check_model_compatibility
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids

BASE, OTHER = random_ids(200, seed=1), random_ids(200, seed=2)
ALWAYS = ReusePolicy(audit_rate=1.0)
NEW = 8


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **kwargs)


def corrupt(store: ChunkStore, start: int) -> None:
    """Change the K/V of a chunk, as failing memory might."""
    chunk = next(chunk for chunk in store.inspect().chunks.values() if chunk.start == start)
    for block in chunk.kv.tensors:
        block.mul_(-3)


@pytest.fixture(params=["llama", "mistral", "gemma2", pytest.param("qwen3_next", marks=pytest.mark.daily)])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = make_model(request.param)
    check_model_compatibility(made)
    return made


def test_what_is_right_passes(model: PreTrainedModel) -> None:
    store = ChunkStore(model, chunk_size=32)
    cache = ChunkReuseCache(model, store, ALWAYS)
    for ids, reused in (BASE[:, :100], False), (BASE[:, :120], True), (OTHER[:, :50], False), (BASE[:, :110], True):
        with counted(model) as work:
            found = generate(model, as_inputs(ids), past_key_values=cache)
        assert torch.equal(found, generate(model, as_inputs(ids)))
        report = cache.report
        assert report.audit_tokens == (ids.shape[1] if reused else 0)
        assert (report.audit_divergence is not None) is reused
        assert work.tokens == report.forwarded_tokens + report.audit_tokens + NEW - 1
    assert store.stats()["audits"] == 2
    assert store.stats()["divergences"] == store.stats()["quarantined"] == 0


def test_what_was_taken_out_twice_is_refused_until_all_is_cleared() -> None:
    llama = make_model()
    store = ChunkStore(llama, chunk_size=32)

    def chunks() -> int:
        generate(llama, as_inputs(BASE[:, :100]), past_key_values=ChunkReuseCache(llama, store))
        return int(store.stats()["chunks"])

    for found in (3, 3, 2):
        assert chunks() == found
        store.quarantine([key for key, chunk in store.inspect().chunks.items() if chunk.start == 64])
    store.clear()
    assert chunks() == 3


@pytest.mark.parametrize("batch", [False, True])
def test_what_is_wrong_is_put_right_and_taken_out(
    model: PreTrainedModel, batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = ChunkStore(model, chunk_size=32)
    ids = BASE[:, :120]
    inputs = left_pad(ids, OTHER[:, :70]) if batch else as_inputs(ids)
    expected = generate(model, inputs)
    generate(model, inputs, past_key_values=ChunkReuseCache(model, store))
    before = store.stats()
    corrupt(store, 64)
    cache = ChunkReuseCache(model, store, ALWAYS)
    with caplog.at_level(logging.WARNING, logger="kvboost_hf"):
        assert torch.equal(generate(model, inputs, past_key_values=cache), expected)
    assert "audited prompt" in caplog.text
    assert cache.report.audit_divergence > 0.01
    stats = store.stats()
    assert stats["divergences"] == 1
    assert stats["quarantined"] >= 1
    assert stats["bytes"] == sum(c.nbytes for c in store.inspect().chunks.values()) + sum(
        s.nbytes for s in store.inspect().states.values()
    )
    # What took its place is right, and is used; states are saved again with the next prompt.
    for policy in (ReusePolicy(), ReusePolicy(), ALWAYS):
        again = ChunkReuseCache(model, store, policy)
        assert torch.equal(generate(model, inputs, past_key_values=again), expected)
    assert again.report.reused_tokens >= 96
    assert store.stats()["divergences"] == 1
    assert store.stats()["chunks"] >= before["chunks"] - 1
    # The cache itself goes on from what is right.
    longer = as_inputs(torch.cat([ids, OTHER[:, :9]], dim=1))
    assert torch.equal(generate(model, longer, past_key_values=cache), generate(model, longer))


def test_what_is_wrong_does_not_come_nearer(llama: PreTrainedModel, tmp_path: Path) -> None:
    check_model_compatibility(llama)
    expected = generate(llama, as_inputs(BASE))
    for tiers in ["device:1GB"], ["device:1GB", f"disk:{tmp_path}:1GB"]:
        store = ChunkStore(llama, chunk_size=32, tiers=tiers)
        generate(llama, as_inputs(BASE), past_key_values=ChunkReuseCache(llama, store))
        corrupt(store, 64)
        for policy in ALWAYS, ReusePolicy():
            cache = ChunkReuseCache(llama, store, policy)
            assert torch.equal(generate(llama, as_inputs(BASE), past_key_values=cache), expected)
        assert cache.report.reused_tokens >= 192
        store.close()


def test_a_second_offence_is_final(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    expected = generate(llama, as_inputs(BASE))
    generate(llama, as_inputs(BASE), past_key_values=ChunkReuseCache(llama, store))
    for _ in range(2):
        corrupt(store, 64)
        cache = ChunkReuseCache(llama, store, ALWAYS)
        assert torch.equal(generate(llama, as_inputs(BASE), past_key_values=cache), expected)
    cache = ChunkReuseCache(llama, store)
    assert torch.equal(generate(llama, as_inputs(BASE), past_key_values=cache), expected)
    assert cache.report.reused_tokens == 64
    store.clear()
    generate(llama, as_inputs(BASE), past_key_values=ChunkReuseCache(llama, store))
    cache = ChunkReuseCache(llama, store)
    generate(llama, as_inputs(BASE), past_key_values=cache)
    assert cache.report.reused_tokens >= 192


def test_a_rate_is_a_share(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    cache = ChunkReuseCache(llama, store, ReusePolicy(audit_rate=0.25))
    for _ in range(13):  # the first is not reused
        generate(llama, as_inputs(BASE), past_key_values=cache)
    assert store.stats()["audits"] == 3


@torch.no_grad()
def test_tuples_and_candidates(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    store.warm(BASE)
    expected = llama(BASE, logits_to_keep=3).logits
    corrupt(store, 64)
    found = llama(BASE, past_key_values=ChunkReuseCache(llama, store, ALWAYS), logits_to_keep=3, return_dict=False)
    torch.testing.assert_close(found[0], expected, atol=2e-4, rtol=2e-4)
    assert store.stats()["divergences"] == 1
    repeated = torch.cat([BASE[:, :80], BASE[:, :80]], dim=1)
    generate(llama, as_inputs(repeated), past_key_values=ChunkReuseCache(llama, store))
    corrupt(store, 32)
    cache = ChunkReuseCache(llama, store, ALWAYS)
    found = generate(llama, as_inputs(repeated), past_key_values=cache, prompt_lookup_num_tokens=4)
    assert torch.equal(found, generate(llama, as_inputs(repeated)))
    assert store.stats()["divergences"] == 2


@pytest.mark.daily
@pytest.mark.parametrize("rate", [-0.1, 1.5, "often", True])
def test_bad_rates(rate: Any) -> None:
    with pytest.raises(ValueError, match="`audit_rate` must be"):
        ReusePolicy(audit_rate=rate)
