"""Forwards return what plain transformers returns; prompts are computed whole only where somebody gets all of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from kvboost_hf import ChunkReuseCache, ChunkStore, attach, check_model_compatibility, detach, last_cache
from tests.architectures import make_architecture
from tests.architectures.outcome import text_ids
from tests.conftest import CHOOSES, VOCAB, as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.compat import hidden_form

KNOWN = random_ids(96, seed=1)
PROMPT = torch.cat([KNOWN, random_ids(20, seed=2)], dim=1)
EVERYTHING, REST = PROMPT.shape[1], 20
STEPS = 2  # tokens that are decoded behind the prompt, one by one

HIDDEN: dict[str, dict[str, Any]] = {
    "hidden": {"output_hidden_states": True},
    "last hidden": {"output_hidden_states": -1},
    **({"some hidden": {"output_hidden_states": [0, 2]}} if CHOOSES else {}),
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "attention": {"output_attentions": True},
    "both": {"output_hidden_states": (1,), "output_attentions": True},
}
ASKED = HIDDEN | WEIGHTS
STORED_WITHOUT = "96 more tokens are stored without the hidden states that the call asks for"
NOT_ASKED: dict[str, dict[str, Any]] = {
    "off": {"output_hidden_states": False, "output_attentions": False, "output_router_logits": False},
    "no layer": {"output_hidden_states": []},
    "layer 0, which counts as off": {"output_hidden_states": 0},
    "none": {"output_hidden_states": None},
    "scores": {"output_scores": True, "output_logits": True},
    "router logits, which generate() never returns": {"output_router_logits": True},
    "a size for a loss": {"num_items_in_batch": 2},
}


def flat(value: Any) -> Iterator[Any]:
    """The tensors in an output, and the shape of what holds them; not caches."""
    if isinstance(value, dict):
        yield list(value)
        value = tuple(value.values())
    if isinstance(value, tuple):
        yield len(value)
        for part in value:
            yield from flat(part)
    elif not hasattr(value, "get_seq_length"):
        yield value


def assert_same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(flat(found), flat(expected), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=5e-4)
        else:
            assert ours == theirs


def warm(model: PreTrainedModel) -> ChunkStore:
    """A store that holds `KNOWN`, without hidden states."""
    check_model_compatibility(model)
    assert not isinstance(hidden_form(model), str)
    store = ChunkStore(model, chunk_size=32)
    store.warm(KNOWN)
    return store


def eager(name: str = "llama") -> Any:
    model = make_model(name)
    model.set_attn_implementation("eager")
    return model


def mixtral() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            initializer_range=0.2,
            pad_token_id=0,
        )
        return MixtralForCausalLM(config).eval()


@pytest.fixture(scope="module")
def plain() -> Any:
    return eager()


@pytest.fixture(scope="module")
def moe() -> Any:
    return mixtral()


def generated(
    model: Any,
    *,
    attached: bool = False,
    ids: torch.Tensor = PROMPT,
    store: ChunkStore | None = None,
    **options: Any,
) -> tuple[int, Any]:
    """Assert that generate() gives what it gives without reuse; returns the tokens forwarded, and the report."""
    options = {**as_inputs(ids), "max_new_tokens": STEPS + 1, "do_sample": False, **options}
    expected, store = model.generate(**options), warm(model) if store is None else store
    if attached:
        attach(model, store)
        with counted(model) as work:
            found = model.generate(**options)
        report = last_cache(model).report
        detach(model)
    else:
        cache = ChunkReuseCache(model, store)
        with counted(model) as work:
            found = model.generate(**options, past_key_values=cache)
        report = cache.report
    assert_same(found, expected)
    return work.tokens, report


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("asked", HIDDEN)
def test_hidden_states_that_generate_returns_are_kept(plain: Any, asked: str, attached: bool) -> None:
    """What is stored without them is computed once more, and then both kinds of calls reuse it."""
    store = warm(plain)
    for ids, computed, reason in ((PROMPT, EVERYTHING, STORED_WITHOUT), (PROMPT, REST, ""), (KNOWN, 32, "")):
        given: dict[str, Any] = {"attached": attached, "store": store, "ids": ids}
        tokens, report = generated(plain, **given, return_dict_in_generate=True, **ASKED[asked])
        assert tokens in (computed + STEPS, 1 + STEPS)  # once the last tokens are stored, too
        assert (report.bypass_reason or "").startswith(reason)
        assert generated(plain, **given)[0] <= computed + STEPS


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("asked", WEIGHTS)
def test_what_generate_returns_of_each_token_is_computed(plain: Any, asked: str, attached: bool) -> None:
    tokens, report = generated(plain, attached=attached, return_dict_in_generate=True, **ASKED[asked])
    assert tokens == EVERYTHING + STEPS
    assert report.reused_tokens == 0
    name, value = next(iter(ASKED[asked].items()))
    assert report.bypass_reason == f"`{name}={value!r}` returns something of each token"


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("asked", ASKED)
def test_what_generate_does_not_return_costs_nothing(plain: Any, asked: str, attached: bool) -> None:
    tokens, report = generated(plain, attached=attached, **ASKED[asked])
    assert tokens == REST + STEPS
    assert report.bypass_reason is None


@pytest.mark.parametrize("asked", NOT_ASKED)
def test_what_concerns_new_tokens_only_costs_nothing(moe: Any, asked: str) -> None:
    for returned in (False, True):
        tokens, report = generated(moe, return_dict_in_generate=returned, **NOT_ASKED[asked])
        assert tokens == REST + STEPS
        assert report.bypass_reason is None


@pytest.mark.parametrize("name", ["gpt2", "bloom", "mistral", "qwen3_next"])
def test_with_other_architectures(name: str) -> None:
    model = eager(name)
    asked: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
    tokens, _ = generated(model, **asked)
    assert tokens < EVERYTHING
    tokens, _ = generated(model, return_dict_in_generate=True, **asked)
    assert tokens == EVERYTHING + STEPS


@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
def test_with_other_attention(attention: str) -> None:
    """kvboost_fa2 has no attention weights, and says so, with reuse as without."""
    model = make_model("llama")
    model.set_attn_implementation(attention)
    assert generated(model, output_hidden_states=True)[0] == REST + STEPS
    assert generated(model, output_hidden_states=True, return_dict_in_generate=True)[0] == EVERYTHING + STEPS
    if attention == "sdpa":  # which has none, either
        for returned in (False, True):
            tokens, report = generated(model, output_attentions=True, return_dict_in_generate=returned)
            assert tokens == EVERYTHING + STEPS
            assert report.bypass_reason == "`output_attentions=True` may change what sdpa attention computes"
    else:
        attach(model, warm(model))
        with pytest.raises(ValueError, match="`output_attentions` is not taken"):
            model.generate(**as_inputs(PROMPT), max_new_tokens=2, output_attentions=True)


def test_it_may_stand_in_the_configuration_of_generate() -> None:
    model = eager()
    model.generation_config.output_hidden_states = True
    assert generated(model)[0] == REST + STEPS
    model.generation_config.return_dict_in_generate = True
    assert generated(model)[0] == EVERYTHING + STEPS


def test_what_the_model_returns_by_its_configuration_does_not_reach_who_calls_generate() -> None:
    model = eager()
    model.config.output_hidden_states = True
    for returned in (False, True):  # transformers reads the configuration of generate() only
        assert generated(model, return_dict_in_generate=returned)[0] == REST + STEPS
    unknown = eager()
    unknown.config.output_hidden_states = True
    cache = ChunkReuseCache(unknown, ChunkStore(unknown))
    for reused in (0, EVERYTHING - 1):  # the first one is stored, though hooks of transformers came with it
        unknown.generate(**as_inputs(PROMPT), past_key_values=cache, max_new_tokens=2)
        assert (cache.report.reused_tokens, cache.report.bypass_reason) == (reused, None)
    cache = ChunkReuseCache(model, warm(model))
    with torch.no_grad():
        found = model(PROMPT, past_key_values=cache, logits_to_keep=1)
        assert_same(found, model(PROMPT, logits_to_keep=1))
    assert (cache.report.bypass_reason or "").startswith(STORED_WITHOUT)


@pytest.mark.daily
@pytest.mark.parametrize(("pieces", "last"), [(48, EVERYTHING - 2 * 48), (80, EVERYTHING - 80)])
def test_of_a_prompt_in_pieces_only_the_last_is_returned(plain: Any, pieces: int, last: int) -> None:
    """Plain generate() returns the hidden states of the last piece, and nobody sees those of the others."""
    asked: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True, "prefill_chunk_size": pieces}
    cheap, report = generated(plain, **asked)
    assert (report.prompt_tokens, report.bypass_reason) == (EVERYTHING, None)
    tokens, report = generated(plain, return_dict_in_generate=True, **asked)
    before = (EVERYTHING - last) // pieces  # each piece computes its last token
    assert tokens == before + last + STEPS
    assert cheap <= tokens
    assert (report.prompt_tokens, report.forwarded_tokens) == (EVERYTHING, before + last)
    assert "output_hidden_states=True" in (report.bypass_reason or "")
    assert "Nothing more was reused: `output_hidden_states" in report.explain()


def test_with_beams_and_padding(plain: Any) -> None:
    asked: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True, "num_beams": 2}
    assert generated(plain, **asked)[0] == 2 * (REST + STEPS)
    assert generated(plain, return_dict_in_generate=True, **asked)[0] == 2 * (EVERYTHING + STEPS)
    batch, store = left_pad(PROMPT, KNOWN[:, :70]), warm(plain)
    asked = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 1, "do_sample": False}
    expected, real = plain.generate(**batch, **asked), batch["attention_mask"].bool()
    for least, most in ((EVERYTHING, 2 * EVERYTHING), (REST, 2 * REST), (REST, 2 * REST)):
        with counted(plain) as work:
            found = plain.generate(**batch, **asked, past_key_values=ChunkReuseCache(plain, store))
        assert least <= work.tokens <= most
        for ours, theirs in zip(found.hidden_states[0], expected.hidden_states[0], strict=True):
            torch.testing.assert_close(ours[real], theirs[real], atol=5e-4, rtol=5e-4)  # those of padding are 0


def test_with_drafts(plain: Any) -> None:
    asked: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True, "prompt_lookup_num_tokens": 2}
    cheap, _ = generated(plain, **asked)
    assert cheap < EVERYTHING <= generated(plain, return_dict_in_generate=True, **asked)[0]
    generated(plain, assistant_model=eager(), output_hidden_states=True, return_dict_in_generate=True)


class ReadsHidden(PromptLookupCandidateGenerator):
    """Drafts nothing, and wants the hidden states of the model, as drafts by heads of the model do."""

    requires_model_outputs = True

    def __init__(self) -> None:
        self.model_kwargs_overrides = {"output_hidden_states": -1}
        self.seen: list[Any] = []

    def get_candidates(self, input_ids: torch.Tensor, model_outputs: Any = None, **_: Any) -> Any:
        self.seen += [model_outputs.hidden_states[-1]] if model_outputs is not None else []
        return input_ids, None

    def update_candidate_strategy(self, *_: Any) -> None:
        pass


def test_drafts_that_read_hidden_states_get_those_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = eager()
    seen, store = [], warm(model)
    caches = [ChunkReuseCache(model, store) for _ in range(2)]
    for cache in (DynamicCache(config=model.config), *caches):
        drafting = ReadsHidden()
        monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda *_, drafting=drafting, **__: drafting)
        options: dict[str, Any] = {"max_new_tokens": 3, "prompt_lookup_num_tokens": 2, "past_key_values": cache}
        model.generate(**as_inputs(PROMPT), **options)
        seen.append(tuple(drafting.seen))
    assert seen[0][0].shape[1] == EVERYTHING
    assert_same(seen[1], seen[0])
    assert_same(seen[2], seen[0])
    assert (caches[0].report.bypass_reason or "").startswith(STORED_WITHOUT)
    assert (caches[1].report.bypass_reason, caches[1].report.forwarded_tokens) == (None, REST)


def test_attention_that_is_computed_in_another_way_for_its_weights_is_not_stored() -> None:
    """Falcon attends to later tokens, too, where it returns weights of a prompt that needs no mask for padding."""
    model, ids = make_architecture("falcon"), text_ids(60, seed=1)
    store = ChunkStore(model, chunk_size=16)
    options = {**as_inputs(ids), "max_new_tokens": 4, "do_sample": False}
    model.generate(**options, past_key_values=ChunkReuseCache(model, store), output_attentions=True)
    assert len(store) == 0
    found = model.generate(**options, past_key_values=ChunkReuseCache(model, store))
    assert torch.equal(found, model.generate(**options))


class AsksAgain(LogitsProcessor):
    """Runs the model on the prompt from within generate(), which returns ids only."""

    def __init__(self, model: Any, store: ChunkStore) -> None:
        self.model, self.store, self.hidden = model, store, torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        cache = ChunkReuseCache(self.model, self.store)
        found = self.model(PROMPT, past_key_values=cache, output_hidden_states=True, logits_to_keep=1)
        self.hidden = found.hidden_states[-1]
        return scores


def loop_of_its_own(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **kwargs: Any,
) -> Any:
    """A `custom_generate` that returns hidden states, whatever generate() was told to return."""
    return model._prefill(input_ids, generation_config, kwargs).hidden_states


def test_others_get_what_they_ask_for_within_generate(plain: Any) -> None:
    expected = plain(PROMPT, output_hidden_states=True).hidden_states
    store = warm(plain)
    asks = AsksAgain(plain, store)
    cache = ChunkReuseCache(plain, store)
    options = {**as_inputs(PROMPT), "max_new_tokens": 2, "output_hidden_states": True}
    plain.generate(**options, past_key_values=cache, logits_processor=LogitsProcessorList([asks]))
    torch.testing.assert_close(asks.hidden, expected[-1], atol=5e-4, rtol=5e-4)
    assert cache.report.bypass_reason is None

    found = plain.generate(**options, past_key_values=ChunkReuseCache(plain, store), custom_generate=loop_of_its_own)
    assert_same(found, expected)

    seen: list[Any] = []
    handle = plain.register_forward_hook(lambda module, args, output: seen.append(output.hidden_states))
    for _ in range(2):  # what a new hook does is part of what stored K/V is known by
        plain.generate(**options, past_key_values=ChunkReuseCache(plain, store))
    handle.remove()
    assert_same(seen[0], expected)
    assert_same(seen[STEPS], expected)


class OwnLoop(type(make_model("llama"))):
    """A class that keeps something of what forwards return, as speech models do."""

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.kept = [*getattr(self, "kept", []), outputs.hidden_states]
        return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)


@pytest.mark.filterwarnings("ignore:OwnLoop is not among the architectures")
def test_a_class_that_reads_outputs_itself_gets_those_of_all_tokens() -> None:
    model = OwnLoop(make_model("llama").config).eval()
    model.load_state_dict(make_model("llama").state_dict())
    options = {**as_inputs(PROMPT), "max_new_tokens": 2, "output_hidden_states": True}
    model.generate(**options)
    model.generate(**options, past_key_values=ChunkReuseCache(model, warm(model)))
    kept = model.kept
    assert_same(tuple(kept[len(kept) // 2 :]), tuple(kept[: len(kept) // 2]))


BARE: dict[str, tuple[dict[str, Any], bool]] = {
    **{name: (asked, True) for name, asked in ASKED.items()},
    "router logits": ({"output_router_logits": True}, True),
    "a loss of the router": ({"output_router_logits": True, "attention_mask": torch.ones_like(PROMPT)}, True),
    "nothing": ({"output_hidden_states": False, "output_attentions": None, "output_router_logits": False}, False),
    "a cache as it is set": ({"use_cache": None}, False),
    "columns": ({"cache_position": torch.arange(EVERYTHING)}, False),
    "the old name": ({"num_logits_to_keep": 1}, False),
    "a size for a loss": ({"num_items_in_batch": torch.tensor(3)}, False),
    "no varlen": ({"cu_seq_lens_q": None, "max_length_q": None, "seq_idx": None, "is_causal": None}, False),
}


@torch.no_grad()
@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("case", BARE)
def test_a_bare_forward_returns_what_it_returns_without_reuse(moe: Any, case: str, returned: bool) -> None:
    moe.set_attn_implementation("eager")
    given, whole = BARE[case]
    asked = {"logits_to_keep": 1, "return_dict": returned, **given}
    expected, cache = moe(PROMPT, **asked), ChunkReuseCache(moe, warm(moe))
    with counted(moe) as work:
        found = moe(PROMPT, past_key_values=cache, **asked)
    assert_same(found, expected)
    assert isinstance(found, tuple) != returned
    assert work.tokens == (EVERYTHING if whole else REST)
    assert (cache.report.bypass_reason is not None) == whole
    if whole:
        name, value = next(iter(given.items()))
        # Hidden states of a prompt that was stored without them are computed once more.
        served = name == "output_hidden_states" and returned and not isinstance(value, tuple)
        reason = "without the hidden states" if served else f"`{name}={value!r}`"
        assert reason in (cache.report.bypass_reason or "")
    # What follows is computed whole in any case, and returned as it is without reuse.
    more, again = random_ids(3, seed=5), DynamicCache(config=moe.config)
    moe(PROMPT, past_key_values=again)
    asked = {name: value for name, value in asked.items() if name not in ("attention_mask", "cache_position")}
    assert_same(moe(more, past_key_values=cache, **asked), moe(more, past_key_values=again, **asked))


def test_router_logits_that_nobody_reads_are_not_asked_of_a_part(moe: Any) -> None:
    """transformers makes a loss of them, and fails where the mask covers more tokens than were computed."""
    batch = left_pad(PROMPT, PROMPT[:, 7:])
    options = {**batch, "max_new_tokens": 1, "output_router_logits": True}
    expected, cache = moe.generate(**options), ChunkReuseCache(moe, warm(moe))
    moe.generate(**{**options, **batch}, past_key_values=cache)
    cache.reset()
    assert torch.equal(moe.generate(**options, past_key_values=cache), expected)
    assert cache.report.reused_tokens > 0


@torch.no_grad()
@pytest.mark.parametrize(
    "given", [{"is_causal": False}, {"cu_seq_lens_q": torch.tensor([0, 50, EVERYTHING])}, {"max_length_q": 50}],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_what_changes_attention_is_neither_reused_nor_stored(given: dict[str, Any]) -> None:
    """False is something to say where the default is True: K/V of attention both ways is not what others need."""
    model = make_model("llama")
    store = warm(model)
    chunks, cache = len(store), ChunkReuseCache(model, store)
    expected = model(PROMPT, logits_to_keep=1, **given)
    assert_same(model(PROMPT, logits_to_keep=1, past_key_values=cache, **given), expected)
    assert cache.report.bypass_reason == f"`{next(iter(given))}` was passed, which K/V may depend on"
    cache.reset()
    assert len(store) == chunks
    plain_tokens = model.generate(**as_inputs(PROMPT), max_new_tokens=4)
    assert torch.equal(model.generate(**as_inputs(PROMPT), max_new_tokens=4, past_key_values=cache), plain_tokens)
