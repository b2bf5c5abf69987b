"""Bare model(...) calls keep their meaning, and whatever cannot be reused is bypassed with its reason."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3NextForCausalLM

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, check_model_compatibility
from tests import multimodal
from tests.conftest import as_inputs, counted, left_pad, make_model, pickles_models, random_ids
from tests.internals.cache import _are_positions_of, wants_all_logits
from tests.internals.compat import require_known_ids

BASE = random_ids(200, seed=1)


@pytest.fixture
def warm(llama: PreTrainedModel) -> ChunkStore:
    """A store that holds `BASE`."""
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    store.warm(BASE)
    return store


def pickled(model: PreTrainedModel) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: PreTrainedModel) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_the_rest_of_a_long_prompt_is_computed_in_pieces(llama: PreTrainedModel) -> None:
    """Behind a few reused tokens, one forward over all others would be slower than one over the whole prompt."""
    check_model_compatibility(llama)
    known, other = random_ids(1600, seed=1), random_ids(1600, seed=2)
    store = ChunkStore(llama, chunk_size=64)
    with counted(llama) as work:
        llama(known, past_key_values=ChunkReuseCache(llama, store), logits_to_keep=1)
    assert (work.calls, work.tokens) == (1, 1600)
    for reused, calls in ((64, 3), (640, 2), (1280, 1)):
        prompt = torch.cat([known[:, :reused], other[:, reused:]], dim=1)
        cache = ChunkReuseCache(llama, store, ReusePolicy(min_prefill_saving=0))
        with counted(llama) as work:
            found = llama(prompt, past_key_values=cache, logits_to_keep=1).logits
        assert (work.calls, work.tokens) == (calls, 1600 - reused)
        assert cache.report.forwarded_tokens == work.tokens
        torch.testing.assert_close(found, llama(prompt, logits_to_keep=1).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("live", [False, True])
def test_a_short_beginning_is_computed_again_where_a_mask_would_cost_more(llama: PreTrainedModel, live: bool) -> None:
    """On a small model attention behind 64 reused tokens takes longer than the 64 tokens; behind 1,280 it does not."""
    check_model_compatibility(llama)
    known, other = random_ids(1600, seed=1), random_ids(1600, seed=2)
    store = ChunkStore(llama, chunk_size=64)
    for reused, computed in ((64, 1600), (1280, 320)):
        cache = ChunkReuseCache(llama, store)
        llama(known, past_key_values=cache, logits_to_keep=1)
        cache = cache if live else ChunkReuseCache(llama, store)
        cache.begin_anew()
        prompt = torch.cat([known[:, :reused], other[:, reused:]], dim=1)
        with counted(llama) as work:
            found = llama(prompt, past_key_values=cache, logits_to_keep=1).logits
        assert (work.calls, work.tokens) == (1, computed)
        assert (cache.report.reused_tokens, cache.report.forwarded_tokens) == (1600 - computed, computed)
        assert ("few known tokens" in cache.report.explain()) == (computed == 1600)
        torch.testing.assert_close(found, llama(prompt, logits_to_keep=1).logits, rtol=1e-3, atol=1e-3)
        assert cache.get_seq_length() == 1600
        # All of it was stored, and goes on from there.
        again = ChunkReuseCache(llama, store)
        llama(prompt, past_key_values=again, logits_to_keep=1)
        assert again.report.forwarded_tokens == 1


@torch.no_grad()
def test_a_short_beginning_is_computed_again_where_merging_would_cost_more() -> None:
    """kvboost_fa2 makes no mask, but merges the past with the rest: on a small model that is worth some 60 tokens."""
    model = make_model()
    model.set_attn_implementation("kvboost_fa2")
    check_model_compatibility(model)
    known, other = random_ids(1600, seed=1), random_ids(1600, seed=2)
    store = ChunkStore(model, chunk_size=16)
    store.warm(known, pin=False)
    for reused, computed in ((16, 1600), (400, 1200)):
        cache = ChunkReuseCache(model, store)
        prompt = torch.cat([known[:, :reused], other[:, reused:]], dim=1)
        with counted(model) as work:
            found = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        assert (work.calls, work.tokens) == (1, computed)
        assert ("few known tokens" in cache.report.explain()) == (computed == 1600)
        torch.testing.assert_close(found, model(prompt, logits_to_keep=1).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_short_beginning_is_reused_where_it_is_pinned_or_asked_for(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    known, other = random_ids(1600, seed=1), random_ids(1600, seed=2)
    for pin, policy in ((True, ReusePolicy()), (False, ReusePolicy(min_prefill_saving=0))):
        store = ChunkStore(llama, chunk_size=64)
        store.warm(known[:, :64], pin=pin)
        cache = ChunkReuseCache(llama, store, policy)
        for rest in (other, known):  # from the store, and then from the cache itself
            cache.begin_anew()
            llama(torch.cat([known[:, :64], rest[:, -1000:]], dim=1), past_key_values=cache, logits_to_keep=1)
            assert cache.report.forwarded_tokens == 1000


@torch.no_grad()
def test_a_prompt_reuses_when_one_logit_is_enough(llama: PreTrainedModel, warm: ChunkStore) -> None:
    cache = ChunkReuseCache(llama, warm)
    with counted(llama) as work:
        found = llama(**as_inputs(BASE), past_key_values=cache, logits_to_keep=1).logits
    close(found, llama(**as_inputs(BASE)).logits[:, -1:])
    assert work.tokens == 1
    assert cache.get_seq_length() == 200


@pytest.mark.daily
@torch.no_grad()
@pytest.mark.parametrize("keep", [2, 7, 200, 300])
def test_as_many_logits_as_asked_for(llama: PreTrainedModel, warm: ChunkStore, keep: int) -> None:
    found = llama(**as_inputs(BASE), past_key_values=ChunkReuseCache(llama, warm), logits_to_keep=keep).logits
    close(found, llama(**as_inputs(BASE), logits_to_keep=keep).logits)


@torch.no_grad()
def test_a_loop_by_hand(llama: PreTrainedModel) -> None:
    """Ids continue the cache, as with any other cache, whatever they are."""
    cache, stock = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32)), DynamicCache(config=llama.config)
    parts = [BASE[:, :70], BASE[:, 70:71], BASE[:, :70], random_ids(40, seed=3), BASE[:, 5:6]]
    for ids in parts:
        close(llama(ids, past_key_values=cache).logits, llama(ids, past_key_values=stock).logits)
    assert cache.get_seq_length() == stock.get_seq_length()
    # What was decoded by hand is found again.
    fresh = ChunkReuseCache(llama, cache.store)
    llama(torch.cat(parts, dim=1), past_key_values=fresh, logits_to_keep=1)
    assert fresh.report.reused_tokens == sum(p.shape[1] for p in parts) // 32 * 32


WANTS_ALL: dict[str, tuple[dict[str, Any], str]] = {
    "all logits": ({}, "logits of all tokens"),
    "labels": ({"labels": BASE, "logits_to_keep": 0}, "logits of all tokens"),
    "a slice": ({"logits_to_keep": slice(-3, None)}, "logits of all tokens"),
    "a list": ({"logits_to_keep": [3, 150]}, "logits of all tokens"),
    "a number of NumPy, which is an index": ({"logits_to_keep": np.int64(3)}, "logits of all tokens"),
    "hidden states": ({"output_hidden_states": True, "logits_to_keep": 1}, "without the hidden states"),
}


@pytest.mark.daily
@torch.no_grad()
@pytest.mark.parametrize("case", WANTS_ALL)
def test_all_of_a_prompt_is_computed_when_all_is_wanted(llama: PreTrainedModel, warm: ChunkStore, case: str) -> None:
    kwargs, reason = WANTS_ALL[case]
    cache = ChunkReuseCache(llama, warm)
    found, expected = llama(BASE, past_key_values=cache, **kwargs), llama(BASE, **kwargs)
    assert found.logits.shape == expected.logits.shape
    close(found.logits, expected.logits)
    if "output_hidden_states" in kwargs:
        close(found.hidden_states[-1], expected.hidden_states[-1])
    assert reason in (cache.report.bypass_reason or "")
    assert cache.report.reused_tokens == 0
    assert cache.report.forwarded_tokens == 200


@torch.no_grad()
@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"position_ids": torch.arange(7, 207)[None]}, "position_ids do not count up from 0"),
        ({"position_ids": torch.zeros(1, 200, dtype=torch.long)}, "position_ids do not count up from 0"),
        ({"attention_mask": (torch.arange(200) % 5 > 0).long()[None]}, "attention mask"),
        ({"attention_mask": torch.ones(1, 1, 200, 200, dtype=torch.bool).tril()}, "not 2-D"),
        ({"attention_mask": (torch.arange(200) < 190).long()[None]}, "attention mask"),
        ({"use_cache": True, "some_mode": torch.ones(1)}, "`some_mode` was passed"),
    ],
)
def test_what_kv_cannot_be_told_by_is_bypassed(
    llama: PreTrainedModel, warm: ChunkStore, kwargs: dict[str, Any], reason: str
) -> None:
    chunks = len(warm)
    cache = ChunkReuseCache(llama, warm)
    kwargs = {"input_ids": BASE, "logits_to_keep": 1, **kwargs}
    close(llama(**kwargs, past_key_values=cache).logits, llama(**kwargs).logits)
    assert reason in (cache.report.bypass_reason or "")
    llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=2)  # and the next call is itself again
    assert cache.report.bypass_reason is None
    assert len(warm) == chunks


class Around(torch.nn.Module):
    """Somebody's own embeddings, around those of a model or its table alone."""

    def __init__(self, inner: torch.nn.Module, plain: bool) -> None:
        super().__init__()
        self.inner = inner if plain else torch.nn.ParameterList(inner.parameters())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        (table,) = self.inner.parameters()
        return table[ids]


@torch.no_grad()
def test_pieces_of_a_prompt_in_somebodys_own_loop(llama: PreTrainedModel) -> None:
    """Each counts, reused or not, and shows at once that somebody has changed what is held."""
    ids = random_ids(70)
    for how, reason in (({}, "all tokens are wanted"), ({"logits_to_keep": 1}, "changed by somebody else")):
        cache = ChunkReuseCache(llama)
        llama(ids[:, :60], past_key_values=cache, **how)
        cache.layers[0].keys.zero_()
        llama(ids[:, 60:], past_key_values=cache, **how)
        llama(ids[:, :1], past_key_values=cache, **how)  # a step, which is no part of the prompt
        assert reason in str(cache.report.bypass_reason)
        assert (cache.report.prompt_tokens, cache.report.forwarded_tokens) == (70, 70)


class LogitsOfAll(Qwen3NextForCausalLM):
    """A model whose forward cannot be told which logits are needed."""

    def forward(
        self, input_ids: Any, past_key_values: Any = None, use_cache: Any = None, return_dict: Any = None
    ) -> Any:
        return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)


@torch.no_grad()
def test_a_forward_that_returns_all_logits() -> None:
    """They are those of the ids that it was given, also where it could carry tokens behind a copy of states."""
    stock, ids = make_model("qwen3_next"), random_ids(70)
    model = LogitsOfAll(stock.config).eval()
    model.load_state_dict(stock.state_dict())
    cache = ChunkReuseCache(model)
    model(ids[:, :60], past_key_values=cache)
    assert "takes no logits_to_keep" in str(cache.report.bypass_reason)
    cache.crop(55)
    found = model(ids[:, 55:], past_key_values=cache).logits
    torch.testing.assert_close(found, stock(ids).logits[:, 55:], atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_a_step_that_cannot_be_reused_is_told_of_where_nothing_was(llama: PreTrainedModel) -> None:
    """To a prompt that was reused it is of no concern, unless more of the prompt follows."""
    ids, store = random_ids(80), ChunkStore(llama, chunk_size=16)
    llama(ids, past_key_values=ChunkReuseCache(llama, store), logits_to_keep=1)
    for first, new, live, stored, is_told in ((0, 1, 0, 64, False), (32, 1, 32, 32, False), (0, 6, 0, 64, True)):
        cache = ChunkReuseCache(llama, store)
        if first:
            llama(ids[:, :first], past_key_values=cache, logits_to_keep=1)
            cache.begin_anew()
        llama(ids[:, :65], past_key_values=cache, logits_to_keep=1)
        assert (cache.report.tier_tokens["live"], cache.report.reused_tokens) == (live, live + stored)
        embeds = llama.get_input_embeddings()(ids[:, :new])
        llama(inputs_embeds=embeds, past_key_values=cache, logits_to_keep=1)
        assert ("no input_ids were passed" in str(cache.report.bypass_reason)) == is_told
        assert cache.get_seq_length() == 65 + new


def test_how_many_columns_a_cache_has_room_for(llama: PreTrainedModel) -> None:
    caches = [ChunkReuseCache(llama, max_cache_len=size) for size in (None, 128)]
    assert [cache.max_cache_len for cache in caches] == [-1, 128]  # as PEFT reads it


@torch.no_grad()
def test_when_a_text_begins(llama: PreTrainedModel) -> None:
    """At a start of a prompt that somebody has told of, and in a forward that may be one."""
    cache, told, within = ChunkReuseCache(llama), list[bool](), list[bool]()
    hook = llama.lm_head.register_forward_pre_hook(lambda *given: within.append(cache.begins_text))
    for begin in (lambda: None, cache.begin_anew, lambda: setattr(cache, "_is_user_defined", True)):
        begin()
        told.append(cache.begins_text)
        llama(random_ids(9), past_key_values=cache, logits_to_keep=1)
        told += [within[-1], cache.begins_text]  # before it there may be probes
    hook.remove()
    assert told == [False, True, False, True, True, False, True, True, False]


def test_which_ids_a_model_has_embeddings_for() -> None:
    """As many as its table has, or its module says; and any that its configuration names, or that somebody reads."""
    model = make_model()
    embeddings: Any = model.get_input_embeddings()
    model.config.vocab_size = 150  # of an earlier table
    for said, known in ((100, 200), (300, 300)):  # a part of the table may be here alone
        embeddings.num_embeddings = said
        require_known_ids(model, np.array([[0, known - 1]]), "Ids")
        for ids, unknown in (([-1, 0], -1), ([5, known], known)):
            with pytest.raises(ValueError, match=f"Ids must be from 0 to {known - 1}, .* got {unknown}\\."):
                require_known_ids(model, np.array([ids]), "Ids")
    model.config.image_token_id = 5000
    require_known_ids(model, np.array([[5000, 7]]), "Ids")
    with pytest.raises(ValueError, match=r"got 5001\."):
        require_known_ids(model, np.array([[5000, 5001]]), "Ids")
    embeddings.register_forward_pre_hook(lambda *given: None)
    require_known_ids(model, np.array([[5001]]), "Ids")


@pytest.mark.daily
@pytest.mark.parametrize("plain", [True, False])
def test_embeddings_are_a_module_of_somebody_else(plain: bool) -> None:
    model = make_model()
    model.set_input_embeddings(Around(model.get_input_embeddings(), plain))
    store, ids = ChunkStore(model, chunk_size=16), random_ids(40)
    expected = model.generate(ids, max_new_tokens=3)
    for reused in (0, 32):
        cache = ChunkReuseCache(model, store)
        assert torch.equal(model.generate(ids, cache=cache, max_new_tokens=3), expected)
        assert cache.report.reused_tokens == reused


@torch.no_grad()
def test_how_arguments_are_read(llama: PreTrainedModel) -> None:
    """Positions of three dimensions are those of models with images; no logits, or a loss, are those of all tokens."""
    ids, other = torch.zeros(3, 5, dtype=torch.long), multimodal.make_model("qwen2_vl")
    for shape, text, media in (
        ((3, 5), True, True),
        ((1, 5), True, True),
        ((2, 5), False, False),
        ((3, 4), False, False),
        ((3, 3, 5), False, True),
        ((3, 1, 5), False, True),
        ((3, 2, 5), False, False),
        ((1, 3, 3, 5), False, False),
    ):
        found = [_are_positions_of(model, ids, torch.zeros(shape)) for model in (llama, other)]
        assert found == [text, media], shape
    for kept, is_all in ((None, True), (0, True), (-1, True), (1, False), (5, False), (torch.tensor([1]), True)):
        assert wants_all_logits({"input_ids": ids, "logits_to_keep": kept}) is is_all
    assert wants_all_logits({"input_ids": ids, "logits_to_keep": 1, "labels": ids})


def test_inputs_embeds_are_bypassed(llama: PreTrainedModel, warm: ChunkStore) -> None:
    embeds = llama.get_input_embeddings()(BASE)
    cache = ChunkReuseCache(llama, warm)
    found = llama(inputs_embeds=embeds, past_key_values=cache, logits_to_keep=1).logits
    close(found, llama(BASE).logits[:, -1:])
    assert cache.report.bypass_reason == "no input_ids were passed"
    assert (cache.report.prompt_tokens, cache.report.forwarded_tokens) == (200, 200)
    llama(inputs_embeds=embeds[:, :9], past_key_values=cache, logits_to_keep=1)  # which go on
    assert (cache.report.prompt_tokens, cache.report.forwarded_tokens) == (209, 209)


def test_inputs_embeds_behind_another_prompt(llama: PreTrainedModel, warm: ChunkStore) -> None:
    """generate() takes embeddings for the whole prompt, whatever the cache holds, and cuts them by its length."""
    embeds = llama.get_input_embeddings()(BASE).detach() * 1.5
    expected = llama.generate(inputs_embeds=embeds, max_new_tokens=4)
    cache = ChunkReuseCache(llama, warm)
    for told in (BASE[:, :120], BASE):  # the second is longer than the embeddings, with its answer
        llama.generate(**as_inputs(told), past_key_values=cache, max_new_tokens=2)
        for _ in range(2):
            assert torch.equal(llama.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=4), expected)
            assert cache.report.bypass_reason == "no input_ids were passed"


def test_gradients_are_those_of_the_whole_prompt(llama: PreTrainedModel, warm: ChunkStore) -> None:
    cache = ChunkReuseCache(llama, warm)
    llama(BASE, past_key_values=cache, logits_to_keep=1).logits.square().sum().backward()
    found = llama.get_input_embeddings().weight.grad.clone()
    llama.zero_grad()
    llama(BASE, logits_to_keep=1).logits.square().sum().backward()
    torch.testing.assert_close(found, llama.get_input_embeddings().weight.grad, rtol=1e-3, atol=1e-3)
    assert "gradients are enabled" in (cache.report.bypass_reason or "")


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("second", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_modes_mix(llama: PreTrainedModel, first: Any, second: Any) -> None:
    check_model_compatibility(llama)
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
    with first():
        llama.generate(**as_inputs(BASE[:, :100]), past_key_values=cache, max_new_tokens=5)
    with second():
        found = llama(BASE[:, 100:110], past_key_values=cache).logits
        again = llama.generate(**as_inputs(BASE[:, :120]), past_key_values=cache, max_new_tokens=5)
    assert found.shape[1] == 10
    assert torch.equal(again, llama.generate(**as_inputs(BASE[:, :120]), max_new_tokens=5))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_forward_leaves_no_trace(llama: PreTrainedModel, error: type[BaseException]) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    cache = ChunkReuseCache(llama, store)
    llama.generate(**as_inputs(BASE[:, :80]), past_key_values=cache, max_new_tokens=3)

    def fail(*_: Any) -> None:
        raise error

    for layer, prompt in [(1, BASE), (0, random_ids(90, seed=6)), (1, BASE[:, :150])]:
        before = store.stats()["bytes"]
        handle = llama.model.layers[layer].register_forward_pre_hook(fail)
        with pytest.raises(error):
            llama.generate(**as_inputs(prompt), past_key_values=cache, max_new_tokens=3)
        handle.remove()
        assert store.stats()["bytes"] >= before
        found = llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=8)
        assert torch.equal(found, llama.generate(**as_inputs(BASE), max_new_tokens=8))


def test_ids_outside_the_vocabulary(llama: PreTrainedModel, warm: ChunkStore) -> None:
    cache = ChunkReuseCache(llama, warm)
    bad = torch.cat([BASE[:, :100], torch.tensor([[5000]])], dim=1)
    told = r"from 0 to 199, for which LlamaForCausalLM has embeddings, got 5000\. Tokenize with"
    with pytest.raises(ValueError, match=told):
        llama.generate(**as_inputs(bad), past_key_values=cache, max_new_tokens=3)
    with pytest.raises(ValueError, match=told):
        warm.warm(bad)
    found = llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=3)
    assert torch.equal(found, llama.generate(**as_inputs(BASE), max_new_tokens=3))
    assert not any((chunk.tokens >= 200).any() for chunk in warm.inspect().chunks.values())


@pytest.mark.parametrize("shape", [(1, 0), (0, 90)])
def test_empty_ids_fail_as_they_do_without_us(llama: PreTrainedModel, shape: tuple[int, int]) -> None:
    empty = torch.empty(shape, dtype=torch.long)
    outcomes = []
    for kwargs in ({}, {"past_key_values": ChunkReuseCache(llama)}):
        try:
            outcomes.append(llama.generate(input_ids=empty, max_new_tokens=2, **kwargs).tolist())
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


class TestChangedWeights:
    """K/V of other weights is never used, whether PyTorch counts the change or not."""

    def change(self, model: PreTrainedModel, how: str) -> None:
        weight = model.model.layers[0].self_attn.v_proj.weight
        if how == "data +=":
            weight.data += 0.3
        elif how == "optimizer":
            weight.grad = torch.ones_like(weight)
            torch.optim.SGD([weight], lr=0.3).step()
        elif how == "load_state_dict":
            model.load_state_dict(make_model("llama", seed=5).state_dict())
        elif how == "dtype":
            model.to(torch.float64)  # type: ignore[arg-type]

    @pytest.mark.parametrize("how", ["data +=", "optimizer", "load_state_dict", "dtype"])
    def test_between_calls(self, llama: PreTrainedModel, warm: ChunkStore, how: str) -> None:
        cache = ChunkReuseCache(llama, warm)
        llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=3)
        self.change(llama, how)
        found = llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=8)
        assert cache.report.reused_tokens == 0
        assert "other weights" in cache.report.explain()
        assert torch.equal(found, llama.generate(**as_inputs(BASE), max_new_tokens=8))
        llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=3)
        assert cache.report.forwarded_tokens == 1

    @torch.no_grad()
    def test_in_the_middle_of_a_conversation(self, llama: PreTrainedModel, warm: ChunkStore) -> None:
        cache = ChunkReuseCache(llama, warm)
        llama(BASE, past_key_values=cache, logits_to_keep=1)
        self.change(llama, "data +=")
        llama(random_ids(70, seed=4), past_key_values=cache)  # continues old K/V, as any cache would
        fresh = ChunkReuseCache(llama, warm)
        llama(torch.cat([BASE, random_ids(70, seed=4)], dim=1), past_key_values=fresh, logits_to_keep=1)
        assert fresh.report.reused_tokens == 0  # nothing of the mixture was stored

    def test_invalidate(self, llama: PreTrainedModel, warm: ChunkStore) -> None:
        cache = ChunkReuseCache(llama, warm)
        llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=3)
        warm.invalidate()
        llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=3)
        assert cache.report.reused_tokens == 0


class TestCopies:
    def test_a_fork_goes_its_own_way(self, llama: PreTrainedModel) -> None:
        check_model_compatibility(llama)
        cache = ChunkReuseCache(llama)
        llama.generate(**as_inputs(BASE[:, :100]), past_key_values=cache, max_new_tokens=2)
        for twin in (cache.fork(), copy.deepcopy(cache)):
            ids = torch.cat([BASE[:, :100], random_ids(9, seed=8)], dim=1)
            found = llama.generate(**as_inputs(ids), past_key_values=twin, max_new_tokens=6)
            assert torch.equal(found, llama.generate(**as_inputs(ids), max_new_tokens=6))
            assert twin.report.forwarded_tokens == 9
            found = llama.generate(**as_inputs(BASE[:, :101]), past_key_values=cache, max_new_tokens=6)
            assert torch.equal(found, llama.generate(**as_inputs(BASE[:, :101]), max_new_tokens=6))
            assert cache.report.forwarded_tokens == 1

    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, *(pytest.param(each, marks=pickles_models) for each in (pickled, saved))]
    )
    def test_the_model_can_be_copied_pickled_and_saved(
        self, duplicate: Callable[[Any], Any], llama: PreTrainedModel, warm: ChunkStore
    ) -> None:
        twin = duplicate(llama)
        cache = ChunkReuseCache(twin, ChunkStore(twin, chunk_size=32))
        for _ in range(2):
            found = twin.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=4)
        assert torch.equal(found, llama.generate(**as_inputs(BASE), max_new_tokens=4))
        assert cache.report.forwarded_tokens == 1


@torch.no_grad()
def test_crop_reset_and_rows_by_hand(llama: PreTrainedModel, warm: ChunkStore) -> None:
    cache, stock = ChunkReuseCache(llama, warm), DynamicCache(config=llama.config)
    for held in (cache, stock):
        llama(BASE[:, :150], past_key_values=held, logits_to_keep=1)
        held.crop(-30)
        held.batch_repeat_interleave(3)
        held.reorder_cache(torch.tensor([2, 0, 1]))  # type: ignore[arg-type]
        held.batch_select_indices(torch.tensor([0, 2]))
    ids = random_ids(20, seed=9, batch=2)
    close(llama(ids, past_key_values=cache).logits, llama(ids, past_key_values=stock).logits)
    for keeps, left in ((200, 140), (140, 140), (90, 90)):  # a number of columns to keep, as it was once told
        cache.crop(keeps)
        assert cache.get_seq_length() == left
    ids = torch.cat([BASE[:, :90], ids[:1, :9]], dim=1)
    close(llama(ids[:, 90:].expand(2, -1), past_key_values=cache).logits, llama(ids).logits[:, 90:].expand(2, -1, -1))
    cache.reset()
    assert cache.get_seq_length() == 0
    llama(BASE, past_key_values=cache, logits_to_keep=1)
    assert cache.report.forwarded_tokens == 1


@torch.no_grad()
def test_layers_changed_behind_our_back_are_not_stored(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    cache = ChunkReuseCache(llama, store)
    batch = torch.cat([BASE[:, :60], random_ids(60, seed=3)])
    llama(batch, past_key_values=cache, logits_to_keep=1)
    for layer in cache.layers:
        layer.reorder_cache(torch.tensor([1, 0]))
    llama(random_ids(40, seed=4, batch=2), past_key_values=cache, logits_to_keep=1)
    fresh = ChunkReuseCache(llama, store)
    llama(torch.cat([BASE[:, :60], random_ids(40, seed=4)], dim=1), past_key_values=fresh, logits_to_keep=1)
    assert fresh.report.reused_tokens <= 32


@torch.no_grad()
def test_a_padded_batch_without_its_mask_is_not_stored(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    cache = ChunkReuseCache(llama, store)
    batch = left_pad(BASE[:, :60], BASE[:, :40])
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    llama(**batch, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    chunks = len(store)
    llama(random_ids(64, seed=4, batch=2), past_key_values=cache, logits_to_keep=1)  # sees the padding, too
    assert "missing" in (cache.report.bypass_reason or "")
    assert len(store) == chunks
