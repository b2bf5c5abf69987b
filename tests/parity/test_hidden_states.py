"""Calls that ask for hidden states reuse what is stored, and get those of all tokens, as from plain transformers."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVQuantConfig,
    ReusePolicy,
    StreamingConfig,
    attach,
    check_model_compatibility,
    last_cache,
)
from tests import multimodal
from tests.architectures import make_architecture
from tests.architectures.models import MULTIMODAL, TRIED
from tests.architectures.outcome import text_ids
from tests.conftest import CHOOSES, counted, left_pad, make_model, random_ids
from tests.internals.cache import HiddenStates
from tests.internals.compat import hidden_form, known_reason, padding_reason, probe_reason
from tests.parity.test_audit import corrupt
from tests.parity.test_loading import blobs, flip

# transformers 5.17 returns all layers for a number, and numbers those of a list otherwise.
choice = pytest.mark.skipif(not CHOOSES, reason="this release of transformers takes no choice of layers")
BASE = random_ids(200, seed=1)
BRANCH = torch.cat([BASE[:, :140], random_ids(50, seed=2)], dim=1)
ASKED: tuple[Any, ...] = (-1, [1], True) if CHOOSES else (-1, True)
ALL = ["bloom", "falcon", "mamba2"]  # which return all layers for any number


def probed(model: PreTrainedModel) -> Any:
    """The model, whose first call costs no more than others."""
    check_model_compatibility(model)
    padding_reason(model)
    assert not isinstance(hidden_form(model), str)
    return model


def assert_same(found: Any, expected: Any, atol: float = 1e-4) -> None:
    """The same layers are shown, and the same logits."""
    assert list(found) == [*expected] or set(expected) - set(found) <= {"past_key_values", "cache"}
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)
    torch.testing.assert_close(found.logits, expected.logits, atol=atol, rtol=atol)


def asks(
    model: Any, ids: torch.Tensor, asked: Any, store: ChunkStore, **more: Any
) -> tuple[Any, ChunkReuseCache, int]:
    """A forward in a new cache that asks for hidden states: its output, the cache, and the tokens forwarded."""
    cache = ChunkReuseCache(model, store, more.pop("policy", None))
    given_ = {more.pop("named", None) or "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    with counted(model) as work:
        found = model(ids, output_hidden_states=asked, **{**given_, **more})
    return found, cache, work.tokens


@torch.no_grad()
@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "glm4_moe", "llama4_text", "qwen3_next", "lfm2", *ALL])
def test_they_are_those_of_plain_forwards(name: str, asked: Any) -> None:
    known = ("llama", "gemma2", "qwen3_next")
    model, plain = (make_model(name) if name in known else make_architecture(name) for _ in range(2))
    store = ChunkStore(probed(model), chunk_size=32)
    states = name in ("qwen3_next", "lfm2", "mamba2")
    for ids, most in zip((BASE, BASE, BRANCH, BRANCH[:, :150]), (200, 8, 62, 32), strict=True):
        found, cache, tokens = asks(model, ids, asked, store, named="cache_params" if name == "mamba2" else None)
        cache.store_tails()
        assert tokens == cache.report.forwarded_tokens <= most
        assert cache.report.bypass_reason is None
        expected = plain(ids, output_hidden_states=asked, logits_to_keep=1)
        assert_same(found, expected, 2e-3 if states else 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_call_that_wants_all_logits_too_reuses(asked: Any, llama: PreTrainedModel) -> None:
    store, plain = ChunkStore(probed(llama), chunk_size=32), make_model("llama")
    llama(BASE, past_key_values=ChunkReuseCache(llama, store, ReusePolicy(keep_logprobs=True)))  # probes its head
    llama(BASE, past_key_values=ChunkReuseCache(llama, store, ReusePolicy(keep_logprobs=True)))
    for most in (200, 8):
        found, _, tokens = asks(llama, BASE, asked, store, logits_to_keep=0, labels=BASE)
        assert tokens <= most
        expected = plain(BASE, output_hidden_states=asked, labels=BASE)
        assert_same(found, expected)
        torch.testing.assert_close(found.loss, expected.loss)


@choice
@torch.no_grad()
def test_calls_with_and_without_share_a_store(llama: PreTrainedModel) -> None:
    """What is stored with them serves plain calls, and what is stored without is computed once more, and said so."""
    store, other = ChunkStore(probed(llama), chunk_size=32), random_ids(200, seed=7)
    store.warm(BASE)
    _, cache, tokens = asks(llama, BASE, -1, store)
    assert tokens == 200
    assert cache.report.bypass_reason is not None
    assert cache.report.bypass_reason.startswith("199 more tokens are stored without the hidden states")
    assert "computed once more" in cache.report.explain()
    calls = (
        (BASE, -1, 8),
        (BASE, None, 1),
        (BASE, [1, -1], 200),
        (other, None, 200),
        (BASE, False, 1),
        (other, None, 8),
    )
    for ids, asked, computed in calls:
        found, cache, tokens = asks(llama, ids, asked, store)
        assert (found.get("hidden_states") is not None) == bool(asked)
        assert tokens == computed
    assert_only(store, {0, 1, 2})  # the other prompt was stored without


def assert_only(store: ChunkStore, kept: set[int]) -> None:
    """Chunks have K/V of two layers, and of so many layers hidden states."""
    places = [chunk.kv.places for chunk in store.inspect().chunks.values()]
    assert {sum(map(len, each[2:])) for each in places if each is not None} == kept


@torch.no_grad()
def test_zeroed_hidden_states_are_noticed(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: those of reused tokens come from what was kept."""
    store = ChunkStore(probed(llama), chunk_size=32)
    expected, _, _ = asks(llama, BASE, True, store)
    view = HiddenStates.view
    monkeypatch.setattr(HiddenStates, "view", lambda self, layer, start: view(self, layer, start) * 0)
    found, _, tokens = asks(llama, BASE, True, store)
    assert tokens == 8
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) > 0.1


@torch.no_grad()
def test_rows_with_padding(llama: PreTrainedModel) -> None:
    store, plain, other = ChunkStore(probed(llama), chunk_size=32), make_model("llama"), random_ids(90, seed=3)
    asks(llama, BASE, True, store)
    batch = left_pad(BASE, other)
    positions, real = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0), batch["attention_mask"].bool()
    ids = batch.pop("input_ids")
    for most in (200, 130):
        found, cache, tokens = asks(llama, ids, True, store, **batch, position_ids=positions)
        assert tokens <= most
        assert cache.report.bypass_reason is None
        expected = plain(ids, output_hidden_states=True, **batch, position_ids=positions)
        for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(ours[real], theirs[real], atol=1e-4, rtol=1e-4)


@choice
@torch.no_grad()
def test_a_cache_keeps_its_meaning(llama: PreTrainedModel) -> None:
    """Ids continue what it holds, and hidden states go with the rows and columns of K/V."""
    cache, stock = ChunkReuseCache(probed(llama), ChunkStore(llama, chunk_size=32)), DynamicCache()

    def run(ids: torch.Tensor, asked: Any = True) -> None:
        given = {"output_hidden_states": asked, "logits_to_keep": 1}
        found, expected = (llama(ids, past_key_values=each, **given) for each in (cache, stock))
        if asked:
            assert_same(found, expected)
        else:
            assert "hidden_states" not in found

    for ids, asked in ((BASE[:, :70], True), (BASE[:, 70:71], None), (BASE[:, 71:130], [0, 1])):
        run(ids, asked)
    for each in (cache, stock):
        each.crop(-30)
        each.batch_repeat_interleave(3)
        each.reorder_cache(torch.LongTensor([2, 0, 1]))
        each.batch_select_indices(torch.tensor([0, 2]))
    run(random_ids(40, seed=5, batch=2))
    fork = cache.fork()
    run(random_ids(3, seed=6, batch=2))
    whole = torch.cat([BASE[:, :100].expand(2, -1), random_ids(40, seed=5, batch=2)], dim=1)
    for held in (cache, fork):
        held.begin_anew()
        with counted(llama) as work:
            found = llama(whole, past_key_values=held, output_hidden_states=True, logits_to_keep=1)
        assert work.tokens == 2
        assert_same(found, llama(whole, output_hidden_states=True, logits_to_keep=1))


@torch.no_grad()
def test_text_that_has_begun_without_goes_on_without(llama: PreTrainedModel) -> None:
    cache, stock = ChunkReuseCache(probed(llama), ChunkStore(llama, chunk_size=32)), DynamicCache()
    for asked in (None, True, None, -1):
        ids = random_ids(50, seed=8)
        found, expected = (llama(ids, past_key_values=each, output_hidden_states=asked) for each in (cache, stock))
        if asked:
            assert_same(found, expected)


@torch.no_grad()
def test_prompts_of_any_length_in_one_cache(llama: PreTrainedModel) -> None:
    """Shorter than before, longer, all of it known, one token."""
    cache, plain = ChunkReuseCache(probed(llama), ChunkStore(llama, chunk_size=32)), make_model("llama")
    for length in (150, 60, 200, 200, 1, 199, 2):
        for asked in (-1, None, [0]):
            ids = BASE[:, :length]
            options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
            found = llama.generate(ids, past_key_values=cache, output_hidden_states=asked, **options)
            expected = plain.generate(ids, output_hidden_states=asked, **options)
            assert torch.equal(found.sequences, expected.sequences)
            for step in range(3 if asked else 0):
                at = 0 if asked == [0] else -1
                ours, theirs = found.hidden_states[step][at], expected.hidden_states[step][at]
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


LLAMA, PLAIN = make_model("llama"), make_model("llama")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(1, 90), st.integers(0, 2), st.integers(1, 40),
            st.sampled_from([None, -1, 0, True, (1,), (0, -1), 5]),
        ),
        min_size=2,
        max_size=6,
    )
)  # fmt: skip
@torch.no_grad()
def test_any_calls_in_any_order(calls: Sequence[tuple[int, int, int, int, Any]]) -> None:
    """Prompts that part anywhere, and ask for any layers, on one model and store after the other."""
    store = ChunkStore(LLAMA, chunk_size=16)
    for stem, shared, branch, rest, asked in calls:
        shown = (random_ids(90, seed=stem)[:, :shared], random_ids(40, seed=10 + branch)[:, :rest])
        ids = torch.cat(shown, dim=1)
        found, _, _ = asks(LLAMA, ids, asked, store, policy=ReusePolicy(min_prefill_saving=0))
        expected = PLAIN(ids, output_hidden_states=asked, logits_to_keep=1)
        if asked:
            assert_same(found, expected)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)


@choice
@torch.no_grad()
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_they_outlive_the_process(codec: str, disk: str, loading_is_worth_it: None) -> None:
    plain, tokens = make_model("llama"), []
    for asked in ([1], [1], -1, -1):
        model = probed(make_model("llama"))
        with ChunkStore(model, chunk_size=32, tiers=[disk], codec=codec) as store:
            found, _, computed = asks(model, BASE[:, :193], asked, store)
            tokens.append(computed)
        if codec == "raw":
            assert_same(found, plain(BASE[:, :193], output_hidden_states=asked, logits_to_keep=1))
    assert tokens == [193, 1 + 8, 193, 1 + 8]  # a forward over 8 tokens shows the form of what is read


@choice
@torch.no_grad()
def test_what_older_releases_kept_for_logits_is_found(disk: str, loading_is_worth_it: None) -> None:
    """`keep_logprobs` kept last hidden states: calls that ask for these read such blobs, and the other way round."""
    for policy, asked, computed in ((ReusePolicy(keep_logprobs=True), None, 193), (None, -1, 1 + 8)):
        model = probed(make_model("llama"))
        with ChunkStore(model, chunk_size=32, tiers=[disk]) as store:
            _, _, tokens = asks(model, BASE[:, :193], asked, store, policy=policy)
        assert tokens == computed


@torch.no_grad()
@pytest.mark.usefixtures("loading_is_worth_it")
@pytest.mark.parametrize("at", [0.3, 0.999])
def test_a_flipped_byte_is_computed_again(at: float, disk: str, tmp_path: Any) -> None:
    ids, plain = BASE[:, :129], make_model("llama")
    for stored in (False, True):
        model = probed(make_model("llama"))
        with ChunkStore(model, chunk_size=32, tiers=[disk]) as store:
            found, cache, tokens = asks(model, ids, True, store)
        assert_same(found, plain(ids, output_hidden_states=True, logits_to_keep=1))
        assert not stored or 32 < tokens < 129
        assert cache.report.bypass_reason is None
        for path in blobs(tmp_path)[-1:]:
            flip(path, at)


@torch.no_grad()
def test_an_audit_puts_them_right(llama: PreTrainedModel) -> None:
    store, policy = ChunkStore(probed(llama), chunk_size=32), ReusePolicy(audit_rate=1.0)
    asks(llama, BASE, True, store, policy=policy)
    corrupt(store, 64)
    found, _, _ = asks(llama, BASE, True, store, policy=policy)
    assert store.stats()["divergences"] == 1
    assert_same(found, make_model("llama")(BASE, output_hidden_states=True, logits_to_keep=1))


@choice
@torch.no_grad()
def test_bare_calls_of_an_attached_model(llama: PreTrainedModel) -> None:
    attach(probed(llama), ChunkStore(llama, chunk_size=32))
    plain = make_model("llama")
    for asked, computed in ((-1, 200), (-1, 17), (-1, 1), (True, 200), (True, 1), ([0, 2], 1)):
        with counted(llama) as work:
            found = llama(BASE, output_hidden_states=asked)
        assert work.tokens == computed  # the first hit probes the head
        assert_same(found, plain(BASE, output_hidden_states=asked))
    for returned in (True, False):  # a tuple has no names: it is computed whole
        found = llama(BASE, output_hidden_states=-1, return_dict=returned, logits_to_keep=1)
        expected = plain(BASE, output_hidden_states=-1, return_dict=returned, logits_to_keep=1)
        assert type(found) is type(expected)
    assert "`return_dict` is False" in (last_cache(llama).report.bypass_reason or "")


@choice
@torch.no_grad()
def test_policies(llama: PreTrainedModel) -> None:
    plain = make_model("llama")
    expected = plain(BASE, output_hidden_states=[1], logits_to_keep=1)
    for kept, second, held in (
        (False, 200, {0}),
        (None, 8, {0, 1}),
        (-1, 8, {1, 2}),
        ((1, -1), 8, {2}),
        (True, 8, {3}),
    ):
        store = ChunkStore(probed(llama), chunk_size=32)
        policy = ReusePolicy(keep_hidden_states=kept)
        asks(llama, random_ids(100, seed=4), None, store, policy=policy)
        for most in (200, second):
            found, cache, tokens = asks(llama, BASE, [1], store, policy=policy)
            assert tokens <= most
            assert_same(found, expected)
        assert (cache.report.bypass_reason is not None) == (kept is False)
        assert_only(store, held)
    assert "`keep_hidden_states` is False" in reason_of(llama, ReusePolicy(keep_hidden_states=False))
    assert "`live_quant` keeps none" in reason_of(llama, None, live_quant=KVQuantConfig())
    assert "returns something of each token" in reason_of(llama, None, max_cache_len=256)
    assert "something of each token" in reason_of(llama, None, output_attentions=True)


def reason_of(model: Any, policy: ReusePolicy | None, **given_: Any) -> str:
    attention = {name: given_.pop(name) for name in ("output_attentions",) if name in given_}
    if attention:
        model = probed(make_model("llama"))
        model.set_attn_implementation("eager")
    cache = ChunkReuseCache(model, None, policy, **given_)
    model(BASE, past_key_values=cache, output_hidden_states=True, logits_to_keep=1, **attention)
    return cache.report.bypass_reason or ""


@pytest.mark.daily
@pytest.mark.parametrize("kept", ["all", 1.5, (), (1, "a"), (True,), [1]])
def test_bad_policies_are_refused(kept: Any) -> None:
    with pytest.raises(ValueError, match="`keep_hidden_states` must be None, True, False, the number of a layer"):
        ReusePolicy(keep_hidden_states=kept)


def test_what_goes_with_no_hidden_states_says_so(llama: PreTrainedModel) -> None:
    policy = ReusePolicy(keep_hidden_states=-1)
    with pytest.raises(ValueError, match="`keep_hidden_states` must be False with mode 'blend', got -1"):
        ReusePolicy(keep_hidden_states=-1, mode="blend")
    for given_ in ({"live_quant": KVQuantConfig()}, {"max_cache_len": 64}):
        with pytest.raises(ValueError, match="`keep_hidden_states` must be False with `"):
            ChunkReuseCache(llama, None, policy, **given_)
    with pytest.raises(ValueError, match="`keep_hidden_states` of a cache must stay -1, got None"):
        ChunkReuseCache(llama, None, policy).policy = ReusePolicy()


@torch.no_grad()
def test_moved_chunks_are_not_shown(llama: PreTrainedModel) -> None:
    """With mode "blend", a call that asks gets the hidden states of its own text: nothing of it is moved."""
    store, plain = ChunkStore(probed(llama), chunk_size=32), make_model("llama")
    policy = ReusePolicy(mode="blend", min_prefill_saving=0)
    edited = torch.cat([random_ids(20, seed=9), BASE], dim=1)
    asks(llama, BASE, None, store, policy=policy)
    _, cache, tokens = asks(llama, edited, None, store, policy=policy)
    assert cache.report.moved_tokens > 0
    for most in (220, 28):
        found, cache, tokens = asks(llama, edited, -1, store, policy=policy)
        assert (cache.report.moved_tokens, tokens <= most) == (0, True)
        assert "asks for hidden states" in (cache.report.moved_reason or "")
        assert_same(found, plain(edited, output_hidden_states=-1, logits_to_keep=1))


@torch.no_grad()
def test_images_are_computed_whole() -> None:
    model, plain = multimodal.make_model("llava"), multimodal.make_model("llava")
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=16)
    inputs = multimodal.prompt("llava", multimodal.text(20, 1), 1, multimodal.text(30, 2))
    for _ in range(2):
        found, cache, _ = asks(model, inputs.pop("input_ids"), True, store, **inputs)
        inputs = multimodal.prompt("llava", multimodal.text(20, 1), 1, multimodal.text(30, 2))
        assert_same(found, plain(**inputs, output_hidden_states=True, logits_to_keep=1))
        assert cache.report.bypass_reason is not None
    text = torch.tensor([multimodal.text(61, 3)])
    for most in (61, 13):
        found, cache, tokens = asks(model, text, -1, store)
        assert tokens <= most
        assert_same(found, plain(text, output_hidden_states=-1, logits_to_keep=1))


@choice
@torch.no_grad()
def test_streamed_layers(tmp_path: Any) -> None:
    from kvboost_hf import load_streamed

    plain = make_model("deep_llama")
    plain.save_pretrained(tmp_path)
    model = load_streamed(str(tmp_path), streaming=StreamingConfig(residency_mode="full_stream"))
    store = ChunkStore(probed(model), chunk_size=32)
    for most in (200, 8):
        found, _, tokens = asks(model, BASE, [3, -1], store)
        assert tokens <= most
        assert_same(found, plain(BASE, output_hidden_states=[3, -1], logits_to_keep=1))


@torch.no_grad()
def test_a_model_without_hidden_states_of_each_token_is_computed_whole() -> None:
    """Gemma 3n shows several streams a token."""
    model, plain = make_architecture("gemma3n_text"), make_architecture("gemma3n_text")
    check_model_compatibility(model)
    ids, store = BASE[:, :80], ChunkStore(model, chunk_size=16)
    for _ in range(2):
        found, cache, tokens = asks(model, ids, True, store)
        assert tokens >= 80
        assert "hidden states have the shape" in (cache.report.bypass_reason or "")
        assert_same(found, plain(ids, output_hidden_states=True, logits_to_keep=1))


@torch.no_grad()
def test_a_decoder_that_is_run_past_its_hooks_is_told_apart(llama: PreTrainedModel) -> None:
    cache = ChunkReuseCache(probed(llama), ChunkStore(llama, chunk_size=32))
    options = {"past_key_values": cache, "output_hidden_states": -1, "logits_to_keep": 1}
    llama(BASE, **options)
    cache.begin_anew()
    llama.model._forward_hooks.clear()
    with pytest.raises(RuntimeError, match="run its decoder past the hooks"):
        llama(BASE, **options)


@torch.no_grad()
@pytest.mark.slow
def test_of_all_architectures() -> None:
    """What comes from the store is what was computed, and a model that shows several streams a token says so."""
    served = 0
    for name in (each for each in TRIED if each not in MULTIMODAL):
        model = make_architecture(name)
        if known_reason(model) or probe_reason(model):
            continue
        form, ids, store = hidden_form(model), text_ids(80, seed=1), ChunkStore(model, chunk_size=16)
        assert not isinstance(form, str) or "have the shape" in form, name
        named = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else None
        for asked in (-1, True):
            expected = model(ids, output_hidden_states=asked, logits_to_keep=1)
            for _ in range(2):
                found, cache, _ = asks(model, ids, asked, store, named=named)
                assert len(found.hidden_states) == len(expected.hidden_states), name
                for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
                    assert (ours is None) == (theirs is None), name
                    if theirs is not None:
                        assert float((ours - theirs).abs().max()) < 1e-2 * max(1.0, float(theirs.abs().max())), name
            known = isinstance(form, str) or "without position_ids" in (cache.report.bypass_reason or "")
            assert known or cache.report.forwarded_tokens <= 40, name
            served += not known
    assert served > 300


def test_the_first_call_of_a_model_is_kept_whole() -> None:
    """transformers puts its hooks for hidden states on a model in the first call, which are not taken for a change."""
    model = make_model()
    store, ids = ChunkStore(model), random_ids(75, seed=3)
    for _ in range(2):
        cache = ChunkReuseCache(model, store)
        model.generate(
            ids,
            past_key_values=cache,
            output_hidden_states=-1,
            return_dict_in_generate=True,
            max_new_tokens=2,
            do_sample=False,
        )
        cache.store_tails()
    assert cache.report.forwarded_tokens == 1
