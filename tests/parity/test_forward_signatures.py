"""Forwards that pass on whatever they are given: such models are served as those that name their arguments."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, attach, detach, last_cache
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.internals.compat import forward_arguments


def unnamed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class ByPlace(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class ByName(LlamaForCausalLM):
    def forward(self, **kwargs: Any) -> Any:
        return super().forward(**kwargs)


class Twice(ByPlace):
    def forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().forward(input_ids, *args, **kwargs)


class Decorated(LlamaForCausalLM):
    @unnamed
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask, **kwargs)


class Patched(LlamaForCausalLM):
    forward = unnamed(LlamaForCausalLM.forward)


class Partial(LlamaForCausalLM):
    forward = functools.partialmethod(LlamaForCausalLM.forward, output_attentions=None)


class Counting:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Mixed(Counting, LlamaForCausalLM):
    pass


class Around(PreTrainedModel, GenerationMixin):
    """A model that runs another one, and says nothing of what that takes."""

    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = LlamaForCausalLM(config)
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()


CLASSES = [ByPlace, ByName, Twice, Decorated, Patched, Partial, Mixed, Around]


def make(kind: Any) -> Any:
    plain = make_model("llama")
    model = kind(plain.config).eval()
    getattr(model, "inner", model).load_state_dict(plain.state_dict())
    return model


@pytest.mark.daily
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: str(kind.__name__))
def test_it_is_served_as_one_that_names_its_arguments(kind: Any) -> None:
    model, settings = make(kind), {"max_new_tokens": 3, "do_sample": False}
    store = ChunkStore(model, chunk_size=16)
    for given, forwarded in ((as_inputs(random_ids(70)), 6), (left_pad(random_ids(40, 1), random_ids(33, 2)), 16)):
        expected = model.generate(**given, **settings)
        for _ in range(2):
            cache = ChunkReuseCache(model, store)
            assert model.generate(**given, **settings, cache=cache).equal(expected)
        if kind is not Around or len(given["input_ids"]) == 1:  # of padding nothing is known there
            assert cache.report.bypass_reason is None
            assert cache.report.forwarded_tokens == forwarded
    attach(model, store)
    assert model.generate(**as_inputs(random_ids(70)), **settings).equal(
        make_model("llama").generate(**as_inputs(random_ids(70)), **settings)
    )
    found = last_cache(model)
    assert found is not None
    assert found.report.forwarded_tokens == 6
    detach(model)


@pytest.mark.parametrize("kind", [ByPlace, Twice, Patched, Around], ids=lambda kind: str(kind.__name__))
@torch.no_grad()
def test_arguments_may_come_by_their_place(kind: Any) -> None:
    model, given = make(kind), as_inputs(random_ids(70))
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for ids in (given["input_ids"], given["input_ids"][:, :40]):
        cache.reset()
        found = model(ids, torch.ones_like(ids), cache=cache, logits_to_keep=1).logits
        assert torch.allclose(found, make_model("llama")(ids).logits[:, -1:], atol=1e-4)
    assert cache.report.forwarded_tokens == 1


@pytest.mark.daily
@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2"])
def test_a_subclass_takes_what_its_class_takes(name: str) -> None:
    model = make_model(name)

    class Sub(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    expected, found = forward_arguments(model), forward_arguments(Sub(model.config))
    assert found.positional == expected.positional
    assert found.defaults == expected.defaults
    assert ("position_ids" in found) == ("position_ids" in expected)
    assert "no_such_argument" not in found
