"""Code of others that changes in the middle of a call: what a forward is given, the model, what the cache holds."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel, StaticCache, StoppingCriteria

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, check_model_compatibility, detach, last_cache
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.internals.compat import CACHE

BASE = random_ids(40, seed=1)
ALL = ReusePolicy(min_prefill_saving=0)
Hook = Callable[[Any, Any, dict[str, Any]], Any]


def generate(model: PreTrainedModel, given: Any, cache: Any = None, **more: Any) -> Any:
    inputs = as_inputs(given) if isinstance(given, torch.Tensor) else given
    inputs = {name: each.clone() for name, each in inputs.items()}  # a hook may write to them
    told = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, **{CACHE: cache, **told, **more})


def same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
    assert torch.equal(found.sequences, expected.sequences)


def hooked(models: tuple[PreTrainedModel, ...], change: Hook, *, front: bool) -> list[RemovableHandle]:
    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        change(module, args, kwargs)
        return args, kwargs

    return [model.register_forward_pre_hook(hook, with_kwargs=True, prepend=front) for model in models]


class Then(StoppingCriteria):
    """Does something once, behind the second token of an answer."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self._do, self._tokens = do, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._tokens += 1
        if self._tokens == 2:
            self._do()
        return torch.zeros(len(input_ids), dtype=torch.bool)


# What a forward is given


def without_cache(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs["input_ids"].shape[1] > 1:
        kwargs["use_cache"] = False  # the cache is passed, and grows all the same


@pytest.mark.parametrize("how", ["passed", "attached", "fixed"])
@pytest.mark.parametrize("rows", [1, 2])
def test_use_cache_may_be_false_for_a_prompt(how: str, rows: int) -> None:
    model, plain = make_model("llama"), make_model("llama")
    given = left_pad(*[BASE, BASE[:, 9:]][:rows])
    if how == "attached":
        attach(model)
    cache = None if how == "attached" else ChunkReuseCache(model, max_cache_len=64 if how == "fixed" else None)
    handles = hooked((model, plain), without_cache, front=True)
    same(generate(model, given, cache), generate(plain, given))
    for handle in handles:
        handle.remove()
    same(generate(model, given, cache), generate(plain, given))


def next_id(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs["input_ids"].shape[1] == 1:
        kwargs["input_ids"] = (kwargs["input_ids"] + 1) % 50


def next_id_in_place(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs["input_ids"].shape[1] == 1:
        kwargs["input_ids"].add_(1).remainder_(50)


def hide_a_column(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs["input_ids"].shape[1] == 1:
        shown = torch.ones(1, kwargs[CACHE].get_seq_length() + 1, dtype=torch.long)
        shown[:, 5] = 0
        kwargs["attention_mask"] = shown


@pytest.mark.parametrize("attached", [False, True], ids=["passed", "attached"])
@pytest.mark.parametrize("change", [next_id, next_id_in_place, hide_a_column])
def test_hooks_behind_ours_that_change_the_arguments(change: Hook, attached: bool) -> None:
    """What they make of the tokens of an answer is not what a prompt of these tokens has."""
    model, plain = make_model("llama"), make_model("llama")
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store, ALL)  # and with it our hooks
    if attached:
        attach(model, store, ALL)
    kept = None if attached else cache
    handles = hooked((model, plain), change, front=False)
    first = generate(plain, BASE, max_new_tokens=30)
    for _ in range(2):
        same(generate(model, BASE, kept, max_new_tokens=30), first)
    whole = torch.cat([first.sequences, random_ids(5, seed=3)], dim=1)
    for again in (kept, None if attached else ChunkReuseCache(model, store, ALL)):
        same(generate(model, whole, again), generate(plain, whole))
    report = (last_cache(model) if attached else cache).report
    assert "changes what the model computes" in (report.bypass_reason or "")
    for handle in handles:
        handle.remove()
    same(generate(model, whole, kept), generate(plain, whole))
    detach(model)
    assert store.check_integrity().wrong == 0


def test_hooks_on_a_model_that_change_nothing_cost_no_reuse() -> None:
    model = make_model("llama")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16), ALL)
    hooked((model,), lambda *_: None, front=False)
    for reused in (0, 39):
        generate(model, BASE, cache)
        assert cache.report.reused_tokens == reused


def shifted(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    kwargs["input_ids"] = (kwargs["input_ids"] + 1) % 50


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_hooks_in_front_of_ours_see_each_token_once(name: str) -> None:
    """Also where parts of a prompt are computed ahead: for rows that begin alike, and up to a state."""
    model, plain = make_model(name), make_model(name)
    handles = hooked((model, plain), shifted, front=True)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16), ALL)
    given = left_pad(BASE, torch.cat([BASE[:, :30], random_ids(9, seed=2)], dim=1), BASE[:, :35])
    for each in (cache, cache, ChunkReuseCache(model, cache.store, ALL)):
        same(generate(model, given, each), generate(plain, given))
    assert cache.store.check_integrity().wrong == 0
    for handle in handles:
        handle.remove()
    same(generate(model, given, cache), generate(plain, given))


# The model


@pytest.mark.parametrize("name", ["llama", "mistral", "falcon_h1"])
def test_a_model_that_is_cast_between_two_tokens(name: str) -> None:
    model, plain = make_model(name), make_model(name)
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store, ALL)
    expected = generate(plain, BASE)
    for _ in range(2):
        found = generate(model, BASE, cache, stopping_criteria=[Then(model.double)])
        same(found, generate(plain, BASE, stopping_criteria=[Then(plain.double)]))
        model.float()
        plain.float()
        same(generate(model, BASE, ChunkReuseCache(model, store, ALL)), expected)
    assert store.check_integrity().wrong == 0


# What the cache holds


def write(cache: Any) -> None:
    cache.layers[0].keys[:, :, 3] = 0.3
    cache.layers[1].values.copy_(cache.layers[1].values * 0.5)


def other_memory(cache: Any) -> None:
    keys = cache.layers[0].keys
    keys.set_(keys.clone() * 0.5)


def other_data(cache: Any) -> None:
    cache.layers[1].values.data = cache.layers[1].values.detach() * 0.5


def swap(cache: Any) -> None:
    cache.layers[0], cache.layers[1] = cache.layers[1], cache.layers[0]


@pytest.mark.parametrize("edit", [write, other_memory, other_data, swap])
@pytest.mark.parametrize("size", [None, 64], ids=["growing", "fixed"])
def test_a_call_goes_on_with_an_edit_as_in_a_stock_cache(size: int | None, edit: Callable[[Any], None]) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store, ALL, max_cache_len=size)
    unedited = generate(plain, BASE)
    for each in (cache, cache, ChunkReuseCache(model, store, ALL, max_cache_len=size)):
        stock = StaticCache(plain.config, size) if size is not None else DynamicCache(config=plain.config)
        expected = generate(plain, BASE, stock, stopping_criteria=[Then(partial(edit, stock))])
        same(generate(model, BASE, each, stopping_criteria=[Then(partial(edit, each))]), expected)
        assert not torch.equal(expected.logits[3], unedited.logits[3])
        for length in (40, 36):
            same(generate(model, BASE[:, :length], each), generate(plain, BASE[:, :length]))
    whole = torch.cat([expected.sequences, random_ids(3, seed=4)], dim=1)
    for each in (cache, ChunkReuseCache(model, store, ALL)):
        same(generate(model, whole, each), generate(plain, whole))
    assert store.check_integrity().wrong == 0


def test_what_is_read_again_is_the_same_tensor_until_the_next_write() -> None:
    model = make_model("llama")
    cache = ChunkReuseCache(model)
    generate(model, BASE, cache)
    keys = cache.layers[0].keys
    assert keys is cache.layers[0].keys
    generate(model, BASE, cache)
    assert keys is not cache.layers[0].keys


# A probe


def test_a_hook_that_raises_in_a_probe_and_is_gone_is_not_the_model_s_fault() -> None:
    """As one of another thread may be, when the error is looked at."""
    model = make_model("llama")
    handles: list[RemovableHandle] = []

    def fail(*_: Any) -> None:
        handles[0].remove()
        raise RuntimeError("not now")

    handles.append(model.model.layers[0].register_forward_pre_hook(fail))
    with pytest.warns(UserWarning, match="not now"):
        check_model_compatibility(model, strict=False)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16), ALL)
    for reused in (0, 39):
        generate(model, BASE, cache)
        assert cache.report.bypass_reason is None
        assert cache.report.reused_tokens == reused


def test_a_hook_that_changes_a_probe_is_not_the_model_s_fault() -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = ChunkStore(model, chunk_size=16)

    def change(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + output.shape[1] / 10 if 2 < output.shape[1] <= 8 else output

    handle = model.model.layers[0].register_forward_hook(change)
    reasons = []
    for _ in range(2):  # the probe runs at the first hit
        cache = ChunkReuseCache(model, store, ALL)
        same(generate(model, BASE, cache), generate(plain, BASE))
        reasons.append(cache.report.bypass_reason)
    assert reasons[0] is None
    assert reasons[1] is not None
    handle.remove()
    for reused in (0, 39):
        generate(model, BASE, cache)
        assert cache.report.bypass_reason is None
        assert cache.report.reused_tokens == reused


@torch.no_grad()
@pytest.mark.daily
@pytest.mark.parametrize("change", ["positions", "weights", "layers"])
def test_what_changes_between_two_pieces_of_a_prompt_is_noticed(change: str) -> None:
    """In a loop of somebody else, which has said that it changes nothing."""
    model: Any = make_model("llama")
    ids = random_ids(90, seed=8)
    store = ChunkStore(model, chunk_size=16)
    cache, stock = ChunkReuseCache(model, store), DynamicCache(config=model.config)
    cache.in_own_loop = True
    for start, stop in ((0, 40), (40, 80), (80, 90)):
        positions = torch.arange(start, stop)[None] + (start == 40 and change == "positions")
        if start == 40 and change == "weights":
            model.model.layers[0].mlp.up_proj.weight.data += 0.01
        if start == 40 and change == "layers":
            cache.layers = copy.deepcopy(stock.layers)
        found, expected = (
            model(ids[:, start:stop], position_ids=positions, past_key_values=each, logits_to_keep=1).logits
            for each in (cache, stock)
        )
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert cache.get_seq_length() == stop
    assert (cache.report.bypass_reason is None) == (change == "layers")  # these go on as what they are
    cache.in_own_loop = False
    cache.store_all()
    cache.reset()
    plain = model(ids, logits_to_keep=1).logits
    for reader in (cache, ChunkReuseCache(model, store)):
        torch.testing.assert_close(
            model(ids, past_key_values=reader, logits_to_keep=1).logits, plain, atol=2e-4, rtol=2e-4
        )
