"""Proposals from a store for a model on a CUDA device."""

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility, lookup_assistant
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.gpu.device import DEVICE

NEW = 48


def test_stored_text_is_generated_in_few_forwards() -> None:
    model = make_model("llama").to(DEVICE)
    check_model_compatibility(model)  # its forwards are not to be counted
    inputs = as_inputs(random_ids(70, seed=1).to(DEVICE))
    length = {"max_new_tokens": NEW, "eos_token_id": None}
    plain = model.generate(**inputs, **length)
    store = ChunkStore(model, chunk_size=32)
    assistant = lookup_assistant(model, store)
    assert assistant.device == model.device
    store.warm(plain)
    for cache in (None, ChunkReuseCache(model, store)):
        with counted(model) as work:
            out = model.generate(**inputs, **length, past_key_values=cache, assistant_model=assistant)
        assert out.equal(plain)
        assert work.calls == 3  # the first token comes from the target alone; drafts have 24 tokens at most


def test_sampling_takes_proposals() -> None:
    model = make_model("llama").to(DEVICE)
    inputs = as_inputs(random_ids(70, seed=1).to(DEVICE))
    store = ChunkStore(model, chunk_size=32)
    store.warm(model.generate(**inputs, max_new_tokens=NEW, eos_token_id=None))
    with counted(model) as work:
        out = model.generate(
            **inputs,
            max_new_tokens=NEW,
            eos_token_id=None,
            do_sample=True,
            temperature=1e-4,  # as good as greedy: what is proposed is what is drawn
            assistant_model=lookup_assistant(model, store),
        )
    assert out.shape[1] == 70 + NEW
    assert work.calls < NEW / 2
