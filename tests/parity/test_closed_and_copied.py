"""Attached models whose store was closed, and copies of attached models: nothing ends in silence."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, StoreClosedError, attach, detach, last_cache
from tests.conftest import as_inputs, make_model, pickles_models, random_ids

PROMPT = as_inputs(random_ids(40))
SETTINGS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


@pytest.mark.parametrize("kind", [{}, {"max_cache_len": 64}], ids=["growing", "of a fixed size"])
def test_a_store_that_is_closed_later(kind: Any) -> None:
    model = make_model("llama")
    expected = model.generate(**PROMPT, **SETTINGS)
    with ChunkStore(model, chunk_size=16) as store:
        attach(model, store, **kind)
        assert model.generate(**PROMPT, **SETTINGS).equal(expected)
    for _ in range(2):
        with pytest.raises(StoreClosedError, match=r"attach\(model, ChunkStore\(model\)\).*detach\(model\)"):
            model.generate(**PROMPT, **SETTINGS)
    with pytest.raises(StoreClosedError, match="detach"), torch.no_grad():
        model(**PROMPT, logits_to_keep=1)
    attach(model, ChunkStore(model, chunk_size=16), **kind)
    for _ in range(2):
        assert model.generate(**PROMPT, **SETTINGS).equal(expected)
    found = last_cache(model)
    assert found is not None
    assert found.report.exact_tokens > 0
    found.store.close()
    detach(model)
    assert model.generate(**PROMPT, **SETTINGS).equal(expected)


def test_a_store_that_is_closed_already() -> None:
    model = make_model("llama")
    store = ChunkStore(model)
    store.close()
    for use in (attach, ChunkReuseCache):
        with pytest.raises(StoreClosedError, match="Make a new one"):
            use(model, store)
    assert model.generate(**PROMPT, **SETTINGS).equal(make_model("llama").generate(**PROMPT, **SETTINGS))


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, pytest.param(lambda model: pickle.loads(pickle.dumps(model)), marks=pickles_models)],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_says_that_it_is_not_attached(duplicate: Any) -> None:
    model = make_model("llama")
    expected = model.generate(**PROMPT, **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        duplicate(model)  # nothing to say
        attach(model, salt="a secret")
        with pytest.raises(UserWarning, match=r"Call attach\(copy\)"):
            duplicate(model)
    with pytest.warns(UserWarning, match="is not attached"):
        found = duplicate(model)
    assert last_cache(found) is None
    assert found.generate(**PROMPT, **SETTINGS).equal(expected)
    assert last_cache(found) is None
    attach(found)
    assert found.generate(**PROMPT, **SETTINGS).equal(expected)
    assert last_cache(found) is not None
    assert model.generate(**PROMPT, **SETTINGS).equal(expected)
    own = last_cache(model)
    assert own is not None
    assert own.store is not last_cache(found).store


@pytest.mark.parametrize("kind", [{}, {"max_cache_len": 64}], ids=["growing", "of a fixed size"])
def test_a_shallow_copy_is_not_attached(kind: Any) -> None:
    """It has the weights of the model, and may have another configuration: here, of a window."""
    model = make_model("mistral")
    attach(model, ChunkStore(model, chunk_size=16), **kind)
    model.generate(**PROMPT, **SETTINGS)
    found = copy.copy(model)
    with pytest.warns(UserWarning, match=r"Call attach\(copy\)"):
        assert last_cache(found) is None
    found.config = found.model.config = copy.deepcopy(model.config)
    found.config.sliding_window = found.config.max_position_embeddings
    expected = make_model("mistral")
    expected.config.sliding_window = found.config.sliding_window
    assert found.generate(**PROMPT, **SETTINGS).equal(expected.generate(**PROMPT, **SETTINGS))
    detach(found)
    found.model.config = model.config
    assert model.generate(**PROMPT, **SETTINGS).equal(make_model("mistral").generate(**PROMPT, **SETTINGS))
    own = last_cache(model)
    assert own is not None
    assert own.report.reused_tokens == 39, "the copy took the place of the model that is attached"


def test_a_cache_goes_on_with_what_one_has_left() -> None:
    """Unless a forward was under way, which has failed."""
    model = make_model("llama")
    expected = model.generate(**PROMPT, **SETTINGS)
    for failed in (False, True):
        cache = ChunkReuseCache(model, salt="a secret")
        model.generate(**PROMPT, **SETTINGS, cache=cache)
        held, salt = cache.get_seq_length(), cache.salt
        cache.parts.live.in_forward = failed
        found = ChunkReuseCache.over(cache.parts)
        assert (found.get_seq_length(), found.salt) == (0 if failed else held, salt)
        assert model.generate(**PROMPT, **SETTINGS, cache=found).equal(expected)
        assert found.report.tier_tokens["live"] == (0 if failed else PROMPT["input_ids"].shape[1] - 1)
