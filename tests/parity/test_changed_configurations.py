"""Models that are edited between two calls: what was found out of them before holds no more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, last_cache
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.internals.compat import CACHE

ALL = ReusePolicy(min_prefill_saving=0)
BASE = random_ids(40, seed=1)
OTHER = torch.cat([BASE[:, :30], random_ids(20, seed=9)], dim=1)
Given = dict[str, torch.Tensor]
PROMPTS: list[Given] = [as_inputs(BASE), as_inputs(OTHER), as_inputs(BASE[:, :20]), left_pad(OTHER, BASE)]


def generate(model: PreTrainedModel, inputs: Given, cache: Any = None, **more: Any) -> Any:
    told = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, **{CACHE: cache, **told, **more})


def same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
    assert torch.equal(found.sequences, expected.sequences)


def window(model: Any) -> None:
    model.config.sliding_window = 10


def no_window(model: Any) -> None:
    model.config.sliding_window = None


def one_layer_less(model: Any) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def one_layer_more(model: Any) -> None:
    layer = type(model.model.layers[0])(model.config, layer_idx=2)
    layer.load_state_dict(model.model.layers[0].state_dict())
    model.model.layers.append(layer.eval())
    model.config.num_hidden_layers = 3


def dynamic_frequencies(model: Any) -> None:
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model.config.max_position_embeddings = 24
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


# Attributes of modules, which a model reads at each forward as it reads its configuration.


def not_causal(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def other_scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2


def other_window(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 10


def without_the_last_layer(model: Any) -> None:
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


def layers_swapped(model: Any) -> None:
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number


@pytest.mark.parametrize("size", [None, 160], ids=["growing", "fixed"])
@pytest.mark.parametrize("how", ["kept", "attached"])
@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("llama", window),
        ("llama", one_layer_less),
        ("llama", one_layer_more),
        ("llama", dynamic_frequencies),
        ("mistral", window),
        ("mistral", no_window),
        ("llama", not_causal),
        ("llama", other_scaling),
        ("llama", without_the_last_layer),
        ("llama", layers_swapped),
        ("mistral", not_causal),
        ("mistral", other_window),
    ],
)
def test_edits_between_two_calls(name: str, edit: Callable[[Any], None], how: str, size: int | None) -> None:
    model, plain = make_model(name), make_model(name)
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store, ALL, max_cache_len=size) if how == "kept" else None
    if how == "attached":
        attach(model, store, ALL, max_cache_len=size)
    for inputs in PROMPTS[:2]:
        same(generate(model, inputs, cache), generate(plain, inputs))
    edit(model)
    edit(plain)
    for inputs in (*PROMPTS, *PROMPTS):
        same(generate(model, inputs, cache), generate(plain, inputs))
        report = (cache or last_cache(model)).report
        assert report.bypass_reason is None or report.reused_tokens == 0
    assert bool(report.forwarded_tokens < report.prompt_tokens) == (report.bypass_reason is None)


def configured(model: Any) -> None:
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 3.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def written_in_place(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(7)


def another_tensor(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 7


@pytest.mark.daily
@pytest.mark.parametrize("edit", [configured, written_in_place, another_tensor])
def test_a_rotation_is_found_anew_for_other_frequencies(edit: Callable[[Any], None]) -> None:
    """Moved keys are turned by it: without a repair, the answer with moved chunks shows which one was taken."""
    policy = ReusePolicy(mode="blend", repair="none", sink_tokens=0, min_prefill_saving=0)
    moved = as_inputs(torch.cat([random_ids(9, seed=4), BASE], dim=1))
    found = []
    for edited_later in (True, False):
        model = make_model("llama")
        for later in (False, True):
            if later is edited_later:
                edit(model)
            store = ChunkStore(model, chunk_size=16)
            for inputs in (as_inputs(BASE), moved):
                cache = ChunkReuseCache(model, store, policy)
                answer = generate(model, inputs, cache)
            assert cache.report.moved_tokens > 0
        found.append(answer)
    same(*found)


# Windows in the configuration of a model that masks none: its checkpoint was made of one of another architecture.


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi"])
def test_windows_that_the_model_does_not_mask(name: str) -> None:
    """transformers lets go of tokens behind the window, which the rest of a prompt has seen."""
    model, plain = make_model(name), make_model(name)
    for each in (model, plain):
        each.config.sliding_window = 24
    store = ChunkStore(model, chunk_size=16)
    for again in (False, True):
        for ids in (BASE[:, :20], BASE[:, :24], BASE[:, :25], BASE, OTHER):
            for more in ({}, {"prefill_chunk_size": 7}):
                cache = ChunkReuseCache(model, store, ALL)
                same(generate(model, as_inputs(ids), cache, **more), generate(plain, as_inputs(ids), **more))
                if ids.shape[1] <= 24:
                    assert cache.report.reused_tokens > 0 or not again
                elif not more:
                    assert cache.report.forwarded_tokens == ids.shape[1]
                    assert "to cached tokens only" in cache.report.bypass_reason
    assert store.check_integrity().wrong == 0


def test_a_conversation_that_grows_beyond_such_a_window() -> None:
    model, plain = make_model("llama"), make_model("llama")
    for each in (model, plain):
        each.config.sliding_window = 24
    store = ChunkStore(model, chunk_size=16)
    kept = ChunkReuseCache(model, store, ALL)
    ids = BASE[:, :9]
    for turn in range(5):
        expected = generate(plain, as_inputs(ids))
        for cache in (kept, ChunkReuseCache(model, store, ALL)):
            same(generate(model, as_inputs(ids), cache), expected)
        ids = torch.cat([expected.sequences, random_ids(3, seed=turn)], dim=1)
    assert store.check_integrity().wrong == 0
