"""Calls that want the logits of all tokens, or a loss, reuse with `ReusePolicy(keep_logprobs=True)`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVQuantConfig,
    ReusePolicy,
    attach,
    check_model_compatibility,
    last_cache,
)
from tests import multimodal
from tests.architectures import make_architecture
from tests.conftest import counted, left_pad, make_model, random_ids
from tests.internals.cache import HiddenStates, loading, prompt_plan
from tests.internals.compat import decoder_layers, hidden_states_reason, padding_reason, text_model
from tests.parity.test_audit import corrupt
from tests.parity.test_loading import blobs, flip

KEEP = ReusePolicy(keep_logprobs=True)
BASE = random_ids(200, seed=1)
BRANCH = torch.cat([BASE[:, :140], random_ids(50, seed=2)], dim=1)


@contextmanager
def forwarded(model: PreTrainedModel) -> Iterator[list[int]]:
    """A list with how many tokens have gone through the first decoder layer."""
    count, layer = [0], decoder_layers(model)[0]
    forward = layer.forward

    def wrapped(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        count[0] += hidden_states.shape[0] * hidden_states.shape[1]
        return forward(hidden_states, *args, **kwargs)

    wrapped.leaves_kv_alone = True  # type: ignore[attr-defined]
    layer.forward = wrapped
    try:
        yield count
    finally:
        del layer.forward


def probed(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose first hit costs no more than others."""
    check_model_compatibility(model)
    assert hidden_states_reason(model) is None
    padding_reason(model)
    return model


def close(found: torch.Tensor | None, expected: torch.Tensor | None, atol: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)


@pytest.fixture
def attached(llama: PreTrainedModel) -> PreTrainedModel:
    return attach(probed(llama), ChunkStore(llama, chunk_size=32), KEEP)


def report(model: PreTrainedModel) -> Any:
    cache = last_cache(model)
    assert cache is not None
    return cache.report


# Softcaps and windows, scaled logits, experts, learned positions, heads that are found in other places.
ATTENTION = ["llama", "gemma2", "gemma3_text", "qwen3", "mixtral", "granite", "cohere2", "gpt2", "opt", "llama4_text"]
STATES = ["qwen3_next", "mamba2"]


@torch.no_grad()
@pytest.mark.parametrize("name", [*ATTENTION, *STATES])
def test_logits_and_loss_are_those_of_plain_forwards(name: str) -> None:
    model = probed(make_model(name) if name in ("gemma2", "qwen3_next") else make_architecture(name))
    store = ChunkStore(model, chunk_size=32)
    # A prompt with states goes on from where one was saved: each 64 tokens, the last chunk border, where prompts part.
    computed = [200, 8, 62, 10] if name in STATES else [200, 1, 50, 1]
    for ids, tokens in zip((BASE, BASE, BRANCH, BRANCH[:, :150]), computed, strict=True):
        expected, cache = model(ids, labels=ids), ChunkReuseCache(model, store, KEEP)
        name_of_cache = "cache_params" if name == "mamba2" else "past_key_values"
        with forwarded(model) as count:
            found = model(ids, labels=ids, use_cache=True, **{name_of_cache: cache})
        cache.store_tails()
        assert cache.report.bypass_reason is None
        assert cache.report.forwarded_tokens == count[0] == tokens
        close(found.logits, expected.logits, 5e-4 if name in STATES else 1e-4)
        close(found.loss, expected.loss)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
def test_a_long_rest_is_computed_in_pieces(attention: str, llama: PreTrainedModel) -> None:
    """Forwards of our own keep hidden states, too."""
    plain = make_model("llama")
    for model in (llama, plain):
        model.set_attn_implementation(attention)
    store = ChunkStore(probed(llama), chunk_size=64)
    known, other = random_ids(1300, seed=1), random_ids(1300, seed=2)
    llama(known[:, :128], past_key_values=ChunkReuseCache(llama, store, KEEP))
    prompt = torch.cat([known[:, :128], other[:, 128:]], dim=1)
    policy = ReusePolicy(keep_logprobs=True, min_prefill_saving=0)
    with counted(llama) as work:
        found = llama(prompt, labels=prompt, past_key_values=ChunkReuseCache(llama, store, policy))
    assert (work.calls, work.tokens) == (2 if attention == "sdpa" else 1, 1172)
    expected = plain(prompt, labels=prompt)
    close(found.logits, expected.logits)
    close(found.loss, expected.loss)


@torch.no_grad()
def test_zeroed_hidden_states_are_noticed(attached: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the logits of reused tokens come from what was kept."""
    expected = attached(BASE).logits
    view = HiddenStates.view
    monkeypatch.setattr(HiddenStates, "view", lambda self, layer, start: torch.zeros_like(view(self, layer, start)))
    found = attached(BASE).logits
    assert float((found - expected)[:, :-1].abs().max()) > 0.1


FORMS: dict[str, dict[str, Any]] = {
    "all": {},
    "zero": {"logits_to_keep": 0},
    "indices": {"logits_to_keep": torch.tensor([0, 57, 198])},
    "a slice": {"logits_to_keep": slice(57, 198)},
    "loss": {"labels": BASE},
    "tuple": {"labels": BASE, "return_dict": False},
    "an empty cache": {"past_key_values": None},
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_bare_calls_of_an_attached_model(form: str, attached: PreTrainedModel) -> None:
    given, plain = dict(FORMS[form]), make_model("llama")
    expected = plain(BASE, **given)
    for tokens in (200, 1, 1):
        if "past_key_values" in given:
            given["past_key_values"] = DynamicCache(config=attached.config)
        with forwarded(attached) as count:
            found = attached(BASE, **given)
        assert count == [tokens]
        assert type(found) is type(expected)
        at = (0, 1) if isinstance(found, tuple) else ("logits", "loss")
        for each in at[: 1 + ("labels" in given)]:
            close(found[each], expected[each])


@torch.no_grad()
def test_rows_reuse_what_each_of_them_has(attached: PreTrainedModel) -> None:
    """Padded on the left with a mask, and on the right without one, as lm_eval does."""
    plain, other = make_model("llama"), random_ids(90, seed=3)
    attached(BASE)
    batch = left_pad(BASE, other)
    positions, real = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0), batch["attention_mask"].bool()
    right = torch.cat([torch.nn.functional.pad(other, (0, 110)), BASE])
    for inputs, kept, computed in (
        ({**batch, "position_ids": positions}, real, (91, 2)),
        ({"input_ids": right}, torch.ones_like(right, dtype=torch.bool), (111, 2)),
    ):
        expected = plain(**inputs).logits
        for tokens in computed:
            with forwarded(attached) as count:
                found = attached(**inputs).logits
            assert count == [tokens]
            assert report(attached).bypass_reason is None
            close(found[kept], expected[kept])


@torch.no_grad()
def test_a_cache_keeps_its_meaning(llama: PreTrainedModel) -> None:
    """Ids continue what it holds, and rows and columns of hidden states go with those of K/V."""
    cache, stock = ChunkReuseCache(probed(llama), ChunkStore(llama, chunk_size=32), KEEP), DynamicCache()

    def run(ids: torch.Tensor) -> None:
        found, expected = llama(ids, past_key_values=cache).logits, llama(ids, past_key_values=stock).logits
        close(found, expected)

    for ids in (BASE[:, :70], BASE[:, 70:71], BASE[:, 71:130]):
        run(ids)
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
        with forwarded(llama) as count:
            found = llama(whole, past_key_values=held).logits
        assert count == [2]
        close(found, llama(whole).logits)


def test_generate_and_scores_share_what_was_computed(attached: PreTrainedModel) -> None:
    plain = make_model("llama")
    answer = attached.generate(BASE, max_new_tokens=20, num_beams=2)
    assert torch.equal(answer, plain.generate(BASE, max_new_tokens=20, num_beams=2))
    with torch.no_grad(), forwarded(attached) as count:
        found = attached(answer).logits
    assert count[0] < 60  # what of the best beam has filled a chunk is stored
    close(found, plain(answer).logits)
    for mode in ({"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 64}, {"cache_implementation": "static"}):
        found = attached.generate(BRANCH, max_new_tokens=12, **mode)
        assert torch.equal(found, plain.generate(BRANCH, max_new_tokens=12))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 2), st.integers(1, 40), st.booleans()),
        min_size=2,
        max_size=5,
    )
)
@torch.no_grad()
def test_any_prompts_in_any_order(prompts: list[tuple[int, int, int, int, bool]]) -> None:
    """Prompts that part anywhere, alone or in pairs, on one model and store after the other."""
    store = ChunkStore(LLAMA, chunk_size=16)
    attach(LLAMA, store, ReusePolicy(keep_logprobs=True, min_prefill_saving=0))
    for stem, shared, branch, rest, paired in prompts:
        rows = [
            torch.cat([random_ids(90, seed=stem)[:, :shared], random_ids(40, seed=10 + each)[:, :rest]], dim=1)
            for each in ((branch, branch + 1) if paired else (branch,))
        ]
        ids = torch.cat(rows)
        close(LLAMA(ids).logits, PLAIN(ids).logits)


LLAMA, PLAIN = make_model("llama"), make_model("llama")


@torch.no_grad()
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_they_outlive_the_process_and_never_mix(codec: str, disk: str, loading_is_worth_it: None) -> None:
    expected = make_model("llama")(BASE).logits

    def open_store(policy: ReusePolicy) -> tuple[PreTrainedModel, ChunkStore]:
        model = probed(make_model("llama"))
        store = ChunkStore(model, chunk_size=32, tiers=[disk], codec=codec)
        return attach(model, store, policy), store

    for policy, tokens in ((ReusePolicy(), 200), (KEEP, 200), (KEEP, 1), (ReusePolicy(), 1)):
        model, store = open_store(policy)
        keep = {} if policy is KEEP else {"logits_to_keep": 1}
        with counted(model) as work:  # wrapped layers would be unknown to other processes
            found = model(BASE, **keep).logits
        assert work.tokens == tokens + 8 * (policy is KEEP and tokens == 1)  # they show the form of what is read
        if codec == "raw":
            close(found, expected[:, -found.shape[1] :])
        elif policy is KEEP:  # what is kept of reused tokens has no codec, and that of the last one sees theirs
            close(found[:, :-1], expected[:, :-1])
        for chunk in store.inspect().chunks.values():
            assert len(chunk.kv.places) == 2 + (policy is KEEP)
        store.close()


@torch.no_grad()
@pytest.mark.usefixtures("loading_is_worth_it")
@pytest.mark.parametrize("damaged", [None, 0.3, 0.999])
def test_they_load_while_the_model_computes(
    damaged: float | None, disk: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is damaged, K/V or hidden states, is computed in the middle of the forward."""
    fill = loading.Loading._fill

    def fill_late(self: loading.Loading, idx: int) -> None:
        time.sleep(0.3 * (idx == 8))  # hidden states come last, and the model must wait for them
        fill(self, idx)

    monkeypatch.setattr(loading.Loading, "_fill", fill_late)
    monkeypatch.setattr(prompt_plan, "_MIN_BYTES", 1)
    ids = BASE[:, :129]
    for stored in (False, True):
        model = probed(make_model("deep_llama"))
        store = ChunkStore(model, chunk_size=32, tiers=[disk])
        attach(model, store, KEEP)
        with counted(model) as work:
            found = model(ids).logits
        if stored and damaged is None:
            assert work.tokens == 1 + 8  # which show the form of what is read
        else:
            assert work.tokens > 32  # what a chunk takes
        close(found, make_model("deep_llama")(ids).logits)
        assert report(model).bypass_reason is None
        store.close()
        for path in blobs(tmp_path)[-1:] if damaged else ():
            flip(path, damaged)


@torch.no_grad()
@pytest.mark.parametrize("return_dict", [True, False])
def test_an_audit_puts_logits_and_loss_right(return_dict: bool, llama: PreTrainedModel) -> None:
    store, policy = ChunkStore(probed(llama), chunk_size=32), ReusePolicy(keep_logprobs=True, audit_rate=1.0)
    expected = llama(BASE, labels=BASE)
    llama(BASE, past_key_values=ChunkReuseCache(llama, store, policy))
    corrupt(store, 64)
    cache = ChunkReuseCache(llama, store, policy)
    found = llama(BASE, labels=BASE, past_key_values=cache, return_dict=return_dict)
    assert store.stats()["divergences"] == 1
    close(found[0], expected.loss)
    close(found[1], expected.logits)


@torch.no_grad()
def test_images_are_computed_whole() -> None:
    model, plain = probed(multimodal.make_model("llava")), multimodal.make_model("llava")
    store = ChunkStore(model, chunk_size=16)
    inputs = multimodal.prompt("llava", multimodal.text(20, 1), 1, multimodal.text(30, 2))
    for _ in range(2):
        cache = ChunkReuseCache(model, store, KEEP)
        close(model(**inputs, past_key_values=cache).logits, plain(**inputs).logits)
        assert "logits of all tokens of images" in (cache.report.bypass_reason or "")


def test_what_rules_it_out(attached: PreTrainedModel) -> None:
    plain = make_model("llama")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "gradients are enabled"),
        ({"output_router_logits": True}, "`output_router_logits=True` returns something of each token"),
        ({"use_cache": False}, "use_cache is False"),
    ]
    with torch.no_grad():
        attached(BASE)
    for given_, reason in cases:
        with torch.set_grad_enabled(not given_):
            found = attached(BASE, **given_).logits
            close(found, plain(BASE).logits)
        assert reason in (report(attached).bypass_reason or "")
        assert found.requires_grad is not bool(given_)
    attached.train()
    attached(BASE, labels=BASE).loss.backward()
    assert "training mode" in (report(attached).bypass_reason or "")
    attach(attached.eval(), policy=ReusePolicy())
    with torch.no_grad():
        attached(BASE)
    assert "ReusePolicy(keep_logprobs=True)" in report(attached).bypass_reason


def test_what_it_does_not_go_with(llama: PreTrainedModel) -> None:
    for settings_ in ({"live_quant": KVQuantConfig()}, {"max_cache_len": 64}):
        with pytest.raises(ValueError, match=f"with `{next(iter(settings_))}`"):
            ChunkReuseCache(llama, policy=KEEP, **settings_)
    with pytest.raises(ValueError, match="hidden states of moved tokens"):
        ReusePolicy(mode="blend", keep_logprobs=True)
    with pytest.raises(ValueError, match="must be True or False"):
        ReusePolicy(keep_logprobs=1)  # type: ignore[arg-type]
    cache = ChunkReuseCache(llama, policy=KEEP)
    with pytest.raises(ValueError, match="must stay True"):
        cache.policy = ReusePolicy()
    assert cache.loans.lending_reason is None  # what rows of a batch compute comes with their hidden states


class _WithIds(LlamaForCausalLM):
    """A model whose logits depend on its ids past the hidden states."""

    def forward(self, input_ids: Any, past_key_values: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        given = {"input_ids": input_ids, "past_key_values": past_key_values, "logits_to_keep": logits_to_keep}
        output = super().forward(**given, **kwargs)
        new = min(input_ids.shape[1], output.logits.shape[1])
        output.logits[:, -new:] += input_ids[:, -new:, None] % 7
        return output


@torch.no_grad()
def test_a_head_that_takes_something_else_is_found_out(llama: Any) -> None:
    model = _WithIds(llama.config).eval()
    expected = model(BASE).logits
    attach(model, ChunkStore(model, chunk_size=32), KEEP)
    for _ in range(3):
        close(model(BASE).logits, expected)
    assert "its head gives other logits" in (report(model).bypass_reason or "")
    model(BASE, logits_to_keep=1)
    assert report(model).reused_tokens == 199


@torch.no_grad()
def test_a_model_whose_head_cannot_be_told_computes_all(llama: PreTrainedModel, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvboost_hf.compat.probes.text_model", lambda model: None)
    attach(llama, ChunkStore(llama, chunk_size=32), KEEP)
    for _ in range(2):
        close(llama(BASE).logits, make_model("llama")(BASE).logits)
    assert "its head cannot be told" in (report(llama).bypass_reason or "")
    llama.generate(BASE, max_new_tokens=1)
    assert report(llama).reused_tokens == 199


@torch.no_grad()
def test_hidden_states_that_nobody_has_shown_are_not_stored(llama: PreTrainedModel) -> None:
    """As where a model calls the forwards of its parts past their hooks."""
    cache = ChunkReuseCache(probed(llama), ChunkStore(llama, chunk_size=32), KEEP)
    text_model(llama)._forward_hooks.clear()
    for _ in range(2):
        close(llama(BASE, past_key_values=cache).logits, make_model("llama")(BASE).logits)
        cache.reset()
    assert len(cache.store) == 0


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_others_on_the_same_module(first: bool, llama: PreTrainedModel) -> None:
    """Those that look see what was computed; those that change it end reuse."""
    inner, seen, store = text_model(llama), [], ChunkStore(probed(llama), chunk_size=32)

    def look(module: Any, args: Any, output: Any) -> None:
        seen.append(output.last_hidden_state.shape[1])

    def steer(module: Any, args: Any, output: Any) -> Any:
        output["last_hidden_state"] = output.last_hidden_state * 2
        return output

    handles = [inner.register_forward_hook(look)] if first else []
    attach(llama, store, KEEP)
    handles += [] if first else [inner.register_forward_hook(look)]
    for _ in range(3):
        close(llama(BASE).logits, make_model("llama")(BASE).logits)
    assert report(llama).reused_tokens == 199
    assert seen == [200, 1, 1]
    handles.append(inner.register_forward_hook(steer))
    for _ in range(3):
        close(llama(BASE).logits, make_model("llama")(BASE).logits * 2)
        assert report(llama).reused_tokens == 0
    assert "changes what the model computes" in (report(llama).bypass_reason or "")
    for handle in handles:
        handle.remove()
    close(llama(BASE).logits, make_model("llama")(BASE).logits)


@torch.no_grad()
def test_what_was_stored_without_it_is_still_found(llama: PreTrainedModel) -> None:
    """The hook of a cache that keeps hidden states is no change of the model."""
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    store.warm(BASE)
    ChunkReuseCache(llama, store, KEEP)
    with counted(llama) as work:
        llama(BASE, past_key_values=ChunkReuseCache(llama, store), logits_to_keep=1)
    assert work.tokens == 1
    store.warm(BASE, policy=KEEP)
    with counted(llama) as work:
        llama(BASE, past_key_values=ChunkReuseCache(llama, store, KEEP), logits_to_keep=1)
    assert work.tokens == 1


@torch.no_grad()
def test_rows_of_a_batch_share_what_they_begin_with() -> None:
    """As lm_eval's stock model asks: rows sorted by length, with padding on the right that nothing tells."""
    model, plain = probed(make_model("llama")), make_model("llama")
    attach(model, ChunkStore(model), KEEP)
    head = random_ids(300, seed=1)
    rows = [
        torch.cat([head, random_ids(70, seed=2 + n // 4), random_ids(6 - n % 4, seed=9 + n)], dim=1) for n in range(8)
    ]
    ids = torch.cat([torch.nn.functional.pad(row, (0, 376 - row.shape[1])) for row in rows])
    with counted(model) as work:
        found = model(ids).logits
    close(found, plain(ids).logits)
    assert work.tokens <= 300 + 2 * 70 + 8 * 6 + 2 * 8  # and what the probe of all logits takes
