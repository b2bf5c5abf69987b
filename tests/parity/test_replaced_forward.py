"""Functions in place of a model's forward, as people write them to count tokens: reuse goes on, and stays right."""

import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, attach, detach, last_cache
from tests.conftest import left_pad, make_model, random_ids
from tests.internals.cache import foreign

HEAD = random_ids(200, seed=1)


def counting(model: PreTrainedModel, seen: list[int]) -> Callable[..., Any]:
    forward = model.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    return count


def wrapping(model: PreTrainedModel, seen: list[int]) -> Callable[..., Any]:
    return functools.wraps(model.forward)(counting(model, seen))


def binding(model: PreTrainedModel, seen: list[int]) -> Callable[..., Any]:
    count = counting(model, seen)
    return types.MethodType(lambda self, *args, **kwargs: count(*args, **kwargs), model)


def mocking(model: PreTrainedModel, seen: list[int]) -> Callable[..., Any]:
    return mock.Mock(side_effect=counting(model, seen))


def answer(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found: torch.Tensor = model.generate(**given, max_new_tokens=3, do_sample=False, pad_token_id=0, **kwargs)
    return found


@pytest.mark.parametrize("anew", [False, True], ids=["once", "for each call"])
@pytest.mark.parametrize("make", [counting, pytest.param(wrapping, marks=pytest.mark.daily), binding, mocking])
@pytest.mark.parametrize("attached", [False, True], ids=["cache", "attach"])
def test_what_counts_costs_no_reuse(attached: bool, make: Any, anew: bool) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = ChunkStore(model, chunk_size=32)
    if attached:
        attach(model, store)
    seen: list[int] = []
    counter = make(model, seen)
    reused = []
    for n in range(3):
        ids = torch.cat([HEAD, random_ids(10, seed=n)], dim=1)
        if anew and make is not mocking:  # each of these is another object, and no code of its own
            model.__dict__.pop("forward", None)
            counter = make(model, seen)
        model.forward = counter
        seen.clear()
        cache = None if attached else ChunkReuseCache(model, store)
        found = answer(model, ids, **({} if attached else {"past_key_values": cache}))
        report = (cache or last_cache(model)).report
        assert report.bypass_reason is None
        assert sum(seen) >= report.forwarded_tokens
        reused.append(report.reused_tokens)
        assert torch.equal(found, answer(plain, ids))
    assert reused[0] == 0
    assert min(reused[1:]) >= 192
    detach(model)


def shifted(model: PreTrainedModel, name: str, shift: Callable[[torch.Tensor], torch.Tensor], on: list[bool]) -> Any:
    forward = model.forward

    def change(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get(name)
        return forward(*args, **({**kwargs, name: shift(given)} if on[0] and given is not None else kwargs))

    return change


CHANGES: dict[str, tuple[str, Any]] = {
    "other ids": ("input_ids", lambda ids: (ids + 1) % 190),
    "ids in place": ("input_ids", lambda ids: ids.clamp_(max=100)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_arguments_is_noticed_at_once(change: str) -> None:
    name, shift = CHANGES[change]
    model, plain = make_model("llama"), make_model("llama")
    store, on = ChunkStore(model, chunk_size=32), [False]
    model.forward = shifted(model, name, shift, on)
    plain.forward = shifted(plain, name, shift, on)
    for turn, on[0] in enumerate((False, False, True, True, True, False, False)):
        cache = ChunkReuseCache(model, store)
        found = answer(model, HEAD.clone(), past_key_values=cache)
        assert torch.equal(found, answer(plain, HEAD.clone())), turn
        if turn == 2:
            assert "changes what it is given" in (cache.report.bypass_reason or "")
        if turn == 1:
            assert cache.report.reused_tokens >= 192


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_padded_batches(name: str) -> None:
    """generate() leaves out positions, too, for a forward that does not name them: by distance, they are the same."""
    model, plain = make_model(name), make_model(name)
    model.forward, plain.forward = counting(model, []), counting(plain, [])
    store = ChunkStore(model, chunk_size=32)
    for turn in range(3):
        tails = [random_ids(n, seed=10 * turn + n) for n in (7, 12, 9)]
        inputs = left_pad(*(torch.cat([HEAD, tail], dim=1) for tail in tails))
        cache = ChunkReuseCache(model, store)
        found = model.generate(**inputs, max_new_tokens=4, do_sample=False, past_key_values=cache)
        assert torch.equal(found, plain.generate(**inputs, max_new_tokens=4, do_sample=False))
        if name == "gpt2":  # with positions of its own for padded rows it would say something else
            assert "there is padding but no position_ids" in (cache.report.bypass_reason or "")
        else:
            assert cache.report.reused_tokens >= (390 if turn == 0 else 3 * 187)


def test_the_watch_goes_with_the_function() -> None:
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=32)
    model.forward = counting(model, [])
    answer(model, HEAD, past_key_values=ChunkReuseCache(model, store))
    before = len(model.model._forward_pre_hooks)
    del model.__dict__["forward"]
    answer(model, HEAD, past_key_values=ChunkReuseCache(model, store))
    assert len(model.model._forward_pre_hooks) == before - 1


def test_a_loop_by_hand_gets_all_logits() -> None:
    """Only generate() says by its code which logits it reads."""
    model = make_model("llama")
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    cache = ChunkReuseCache(model, ChunkStore(model))
    with torch.no_grad():
        assert model(HEAD, past_key_values=cache).logits.shape[1] == 200
    assert "the logits of all tokens are wanted" in (cache.report.bypass_reason or "")


def test_a_partial_of_a_function_is_nobody_s_own() -> None:
    """In a module that is first seen when it has one: what it calls with is anybody's."""
    place = types.ModuleType("transformers.models.llama.seen_late")
    place.own, place.given = torch.nn.functional.silu, functools.partial(torch.nn.functional.silu, inplace=True)  # type: ignore[attr-defined]
    assert foreign._Names(place).replaced() == [place.given]
