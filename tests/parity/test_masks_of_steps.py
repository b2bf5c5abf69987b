"""Masks that somebody's code makes, or that begin to hide only behind the first piece of a prompt."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.internals.cache import edits_inputs, running
from tests.internals.compat import CACHE

_HIDDEN = 5  # column
_NEW = 5

Given = dict[str, Any]
FULL: Given = as_inputs(torch.cat([random_ids(90, seed=1), random_ids(90, seed=2)]))
PADDED: Given = left_pad(random_ids(90, seed=1), random_ids(83, seed=2))


def _hides(kwargs: Given) -> Given:
    """The arguments of a forward with a mask that hides a column, if it has one token a row."""
    ids, cache = kwargs["input_ids"], kwargs.get("cache") or kwargs.get("past_key_values")
    if ids.shape[1] > 1:
        return kwargs
    mask = kwargs.get("attention_mask")
    mask = torch.ones(len(ids), cache.get_seq_length() + 1, dtype=torch.long) if mask is None else mask.clone()
    mask[0, _HIDDEN] = 0
    return {**kwargs, "attention_mask": mask}


def _by_hook(model: Any) -> None:
    model.register_forward_pre_hook(lambda _module, args, kwargs: (args, _hides(kwargs)), with_kwargs=True)


def _by_preparing(model: Any) -> None:
    class Preparing(type(model)):
        def prepare_inputs_for_generation(
            self, input_ids: Any, attention_mask: Any = None, cache: Any = None, **kwargs: Any
        ) -> Any:
            of = super().prepare_inputs_for_generation
            return _hides(of(input_ids, attention_mask=attention_mask, cache=cache, **kwargs))

    model.__class__ = Preparing


def _by_updating(model: Any) -> None:
    class Updating(type(model)):
        def _update_model_kwargs_for_generation(self, outputs: Any, kwargs: Given, *args: Any, **more: Any) -> Given:
            kept: Given = super()._update_model_kwargs_for_generation(outputs, kwargs, *args, **more)
            mask = kept.get("attention_mask")
            if mask is not None:  # of a padded batch
                kept["attention_mask"] = mask.clone()
                kept["attention_mask"][0, _HIDDEN] = 0
            return kept

    model.__class__ = Updating


def _logits(model: Any, inputs: Given, **given: Any) -> torch.Tensor:
    options = {"max_new_tokens": _NEW, "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    found = model.generate(**inputs, **{**options, **given})
    return torch.stack(found.logits)


@pytest.mark.parametrize("inputs", [FULL, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("edit", [_by_hook, _by_preparing, _by_updating])
@pytest.mark.parametrize(
    ("attention", "live_quant"),
    [("eager", None), ("sdpa", None), ("sdpa", "int8"), ("kvboost_fa2", None), ("kvboost_fa2", "int8")],
)
def test_a_mask_of_somebody_else_is_the_one_that_counts(
    attention: str, live_quant: Any, edit: Callable[[Any], None], inputs: Given
) -> None:
    model = make_model("llama")
    model.set_attn_implementation(attention)
    stock = _logits(model, inputs)
    edit(model)
    plain = _logits(model, inputs)
    hidden = not torch.equal(plain, stock)
    assert hidden or (edit is _by_updating and inputs is FULL)  # else nothing would be tested
    cache = ChunkReuseCache(model, live_quant=live_quant)
    atol = 2e-4 if live_quant is None else 0.05
    for _ in range(2):  # what is computed, and what is reused
        found = _logits(model, inputs, past_key_values=cache)
        torch.testing.assert_close(found, plain, atol=atol, rtol=atol)
    said = plain.argmax(-1).T  # greedy
    later = {
        "input_ids": torch.cat([inputs["input_ids"], said, random_ids(9, seed=4, batch=2)], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, _NEW + 9, dtype=torch.long)], 1),
    }
    found = _logits(model, later, past_key_values=cache)  # what was computed with the mask is not taken for a prompt's
    torch.testing.assert_close(found, _logits(model, later), atol=atol, rtol=atol)


@torch.no_grad()
def _masking(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A loop that hides a column, and now and then the token that it passes; returns logits, not ids."""
    mask, ids, at, found = torch.ones_like(input_ids), input_ids, 0, list[torch.Tensor]()
    for n in range(_NEW):
        positions = torch.arange(at, at + ids.shape[1])[None]
        given = {"attention_mask": mask, "position_ids": positions, CACHE: kwargs[CACHE]}
        found.append(model(input_ids=ids, use_cache=True, **given).logits[:, -1])
        at += ids.shape[1]
        ids = torch.full((len(ids), 1), 11 + n)
        mask = torch.cat([mask, torch.full_like(ids, n != 1)], 1)
        mask[0, _HIDDEN] = n < 2
    return torch.stack(found, 1)


@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
def test_a_loop_of_somebody_else_may_pass_any_mask(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where to read a mask would make a GPU wait, so that none is read."""
    monkeypatch.setattr(running, "hides_padding_only", lambda mask, known: True)
    model = make_model("llama")
    model.set_attn_implementation(attention)
    plain = model.generate(
        **FULL, max_new_tokens=_NEW, custom_generate=_masking, cache=DynamicCache(config=model.config)
    )
    cache = ChunkReuseCache(model)
    for _ in range(2):
        found = model.generate(**FULL, max_new_tokens=_NEW, custom_generate=_masking, cache=cache)
        torch.testing.assert_close(found, plain, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_steps_need_no_mask() -> None:
    model = make_model("llama")
    model.set_attn_implementation("kvboost_fa2")
    cache, ids = ChunkReuseCache(model), random_ids(24, seed=1)
    cache.in_own_loop = True
    for at, stop in ((0, 20), (20, 21), (21, 22), (22, 23)):
        given: Given = {"position_ids": torch.arange(at, stop)[None], CACHE: cache}
        found = model(ids[:, at:stop], logits_to_keep=1, **given).logits
        torch.testing.assert_close(found, model(ids[:, :stop]).logits[:, -1:], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("piece", [1, 2, 3, 4])
@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
def test_padding_on_the_right_that_comes_with_a_later_piece(attention: str, piece: int) -> None:
    model = make_model("llama")
    model.set_attn_implementation(attention)
    for width in range(2, 8):
        ids = random_ids(width, seed=3).repeat(2, 1)
        for pads in range(1, width):
            mask = torch.ones_like(ids)
            mask[0, -pads:] = 0
            inputs = {"input_ids": ids, "attention_mask": mask}
            plain = _logits(model, inputs, prefill_chunk_size=piece)
            cache = ChunkReuseCache(model)
            for _ in range(2):
                found = _logits(model, inputs, prefill_chunk_size=piece, past_key_values=cache)
                torch.testing.assert_close(found, plain, atol=2e-4, rtol=2e-4, msg=f"{width} columns, {pads} hidden")


def test_whose_code_may_change_the_arguments_of_a_step() -> None:
    model: PreTrainedModel = make_model("llama")
    assert not edits_inputs(model)
    ChunkReuseCache(model)
    assert not edits_inputs(model)
    for edit in (_by_hook, _by_preparing, _by_updating):
        other = copy.deepcopy(model)
        edit(other)
        assert edits_inputs(other)
