"""Forwards that PyTorch records or transforms: their graphs must not depend on what was stored when they were made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, last_cache
from tests.conftest import make_model, random_ids
from tests.internals.compat import CACHE

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch.jit
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap
    pytest.mark.filterwarnings("ignore:While compiling, we found"),  # of torch.export, in code of transformers
]
IDS, OTHERS = random_ids(40, seed=1), random_ids(40, seed=2)
ALL = ReusePolicy(min_prefill_saving=0)
Logits = Callable[[torch.Tensor], torch.Tensor]
Given = dict[str, Any]


class Whole(nn.Module):
    """Passes ids to a model, and returns the logits alone."""

    def __init__(self, model: PreTrainedModel, given: Given) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        given = {name: each() if callable(each) else each for name, each in self.given.items()}
        logits: torch.Tensor = self.model(ids, logits_to_keep=1, **given).logits
        return logits


def traced(module: Whole) -> Logits:
    found: Logits = torch.jit.trace(module, (IDS,), check_trace=False)
    return found


def proxied(module: Whole) -> Logits:
    return make_fx(module)(IDS)


def exported(module: Whole) -> Logits:
    found: Logits = torch.export.export(module, (IDS,), strict=False).module()
    return found


def exported_strictly(module: Whole) -> Logits:
    found: Logits = torch.export.export(module, (IDS,), strict=True).module()
    return found


def in_one_graph(module: Whole) -> Logits:
    found: Logits = torch.compile(module, backend="eager", fullgraph=True)
    return found


def of_weights(module: Whole) -> Logits:
    weights = {name: torch.stack([each, each]) for name, each in module.named_parameters()}

    def of_one(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.vmap(lambda one: torch.func.functional_call(module, one, (ids,)))(weights)
        return found[1]

    return of_one


def by_rows(module: Whole) -> Logits:
    return lambda ids: torch.func.vmap(lambda row: module(row[None])[0])(ids)


def with_gradients(module: Whole) -> Logits:
    name = next(name for name, _ in module.named_parameters() if name.endswith("up_proj.weight"))
    weight = module.get_parameter(name).detach()

    def logits(weight: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.func.functional_call(module, {name: weight}, (ids,))
        return found.sum(), found

    return lambda ids: torch.func.grad(logits, has_aux=True)(weight, ids)[1]


def warm(model: PreTrainedModel) -> ChunkStore:
    """A store that has the K/V of `IDS`."""
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store, ALL)
    with torch.no_grad():
        model(IDS, logits_to_keep=1, **{CACHE: cache})
    cache.store_tails()
    return store


def same(found: Logits, plain: PreTrainedModel) -> None:
    for ids in (IDS, OTHERS):
        torch.testing.assert_close(found(ids), plain(ids, logits_to_keep=1).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("given", [{}, {"use_cache": False}], ids=["", "without a cache"])
@pytest.mark.parametrize("record", [traced, exported, of_weights, by_rows, with_gradients])
def test_attached(record: Callable[[Whole], Logits], given: Given) -> None:
    model, plain = make_model("llama"), make_model("llama")
    attach(model, warm(model), ALL)
    with torch.no_grad():
        same(record(Whole(model, given)), plain)
        if (found := last_cache(model)) is not None:  # what exports a model does not ask
            assert (found.report.bypass_reason or "").startswith("PyTorch records or transforms the forward")
        model(IDS, logits_to_keep=1)
        found = last_cache(model)
    assert found is not None
    assert found.report.reused_tokens == 39
    assert found.store.check_integrity().wrong == 0


@pytest.mark.parametrize("record", [traced, proxied, of_weights, by_rows])
def test_with_a_cache_of_ours(record: Callable[[Whole], Logits]) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = warm(model)
    made: list[ChunkReuseCache] = []

    def cache() -> ChunkReuseCache:
        made.append(ChunkReuseCache(model, store, ALL))
        return made[-1]

    with torch.no_grad():
        same(record(Whole(model, {CACHE: cache})), plain)
        assert (made[0].report.bypass_reason or "").startswith("PyTorch records or transforms the forward")
        model(IDS, logits_to_keep=1, **{CACHE: cache()})
    assert made[-1].report.reused_tokens == 39
    assert store.check_integrity().wrong == 0


@pytest.mark.parametrize("given", [{"use_cache": False}, {CACHE: lambda: DynamicCache()}], ids=["", "stock cache"])
@pytest.mark.parametrize("record", [pytest.param(in_one_graph, marks=pytest.mark.daily), exported_strictly])
def test_hooks_break_no_graph_without_a_cache_of_ours(record: Callable[[Whole], Logits], given: Given) -> None:
    """A cache that was made for the model has put hooks on it."""
    model, plain = make_model("llama"), make_model("llama")
    store = warm(model)
    with torch.no_grad():
        same(record(Whole(model, given)), plain)
        cache = ChunkReuseCache(model, store, ALL)
        model(IDS, logits_to_keep=1, **{CACHE: cache})
    assert cache.report.reused_tokens == 39


@pytest.mark.parametrize("given", [{}, {"use_cache": False}], ids=["", "without a cache"])
def test_an_attached_model_is_exported_strictly(given: Given) -> None:
    model, plain = make_model("llama"), make_model("llama")
    attach(model, warm(model), ALL)
    with torch.no_grad():
        same(exported_strictly(Whole(model, given)), plain)


def test_one_graph_of_an_attached_model_says_what_to_do() -> None:
    model = make_model("llama")
    attach(model, warm(model), ALL)
    with pytest.raises(Exception, match=r"without fullgraph=True, or detach\(model\)"), torch.no_grad():
        in_one_graph(Whole(model, {}))(IDS)
