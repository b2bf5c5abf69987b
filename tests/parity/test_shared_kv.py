"""Gemma 4's assistants, which read K/V of their target: as transformers runs them, and by `load_assistant`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVQuantConfig,
    ReusePolicy,
    TreeDecoding,
    attach,
    check_model_compatibility,
    detach,
    last_cache,
    load_assistant,
    speculation_stats,
)
from tests.conftest import make_model, random_ids
from tests.gemma4 import KINDS, WINDOW, make_assistant, make_target
from tests.heads import CHAINS, GREEDY, PROMPT, TREES, watched
from tests.internals.compat import decoder_layers
from tests.speculation import Passes


def make_pair(kind: str = "text", **changes: Any) -> tuple[Any, Any]:
    target = make_target(kind, **changes)
    check_model_compatibility(target)
    return target, make_assistant(target, kind)


def forwarded(model: Any, prompt: torch.Tensor, **given: Any) -> tuple[torch.Tensor, int]:
    """An answer, and the tokens that went through the target's layers for it.

    The first one is counted: behind layers that share K/V transformers cuts a prompt to its last token.
    """
    passes = Passes()
    handle = decoder_layers(model)[0].register_forward_pre_hook(passes.note)
    try:
        return model.generate(prompt, **GREEDY, **given), passes.tokens
    finally:
        handle.remove()


@pytest.mark.parametrize("how", ["stock", "chains", "trees"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_warm_is_as_cold(kind: str, how: str) -> None:
    """The tokens of plain generate(), the drafts of a cold call, and only the rest forwarded."""
    model, assistant = make_pair(kind)
    if how != "stock":
        load_assistant(assistant, target=model, **CHAINS)

    def given() -> dict[str, Any]:
        return (
            {"custom_generate": TreeDecoding(assistant, TREES)} if how == "trees" else {"assistant_model": assistant}
        )

    model.generate(random_ids(20), **GREEDY, **given(), cache=ChunkReuseCache(model))  # the model is probed
    for prompt in (PROMPT, PROMPT[:, : WINDOW // 2], PROMPT[:, :129], PROMPT[:, :1]):
        columns, store, floors = prompt.shape[1], ChunkStore(model, chunk_size=16), []
        plain = model.generate(prompt, **GREEDY)
        others = ChunkStore(model, chunk_size=16)
        for plainly in (ChunkReuseCache(model, others), again := ChunkReuseCache(model, others), again):
            model.generate(prompt, **GREEDY, cache=plainly)
            floors.append(plainly.report.forwarded_tokens)
        with watched(assistant) as cold:
            found, work = forwarded(model, prompt, **given())
        assert found.equal(plain)
        cache, least = ChunkReuseCache(model, store), 1 if how == "trees" else 2
        for kept, floor in zip(("cold", "warm", "the same cache", "attached"), (*floors, floors[1]), strict=True):
            cache = ChunkReuseCache(model, store) if kept == "warm" else cache
            if kept == "attached":
                attach(model, store)
            called = given() if kept == "attached" else {**given(), "cache": cache}
            with watched(assistant) as rounds:
                found, warm = forwarded(model, prompt, **called)
            report = (last_cache(model) if kept == "attached" else cache).report
            assert found.equal(plain)
            rounds.assert_like(cold)
            assert report.bypass_reason is None
            expected = min(columns, max(floor, least))
            assert (report.forwarded_tokens, report.prompt_tokens) == (expected, columns), kept
            assert work - warm == columns - expected
        detach(model)


@pytest.mark.parametrize("how", ["chains", "trees"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_prepared_assistant_sees_the_text_and_nothing_else(kind: str, how: str) -> None:
    """The K/V and the hidden state of a plain forward over the text so far, and no rejected token's."""
    model, assistant = make_pair(kind)
    draft = load_assistant(assistant, target=model, **CHAINS)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    given = {"custom_generate": TreeDecoding(draft, TREES)} if how == "trees" else {"assistant_model": draft}
    model.generate(PROMPT, max_new_tokens=1, cache=cache)
    with watched(assistant) as rounds:
        text = model.generate(PROMPT, **GREEDY, **given, cache=cache)
    assert speculation_stats(given.get("custom_generate", draft)).acceptance > 0
    lengths = set()
    for each in rounds.given:
        length = int(each["position_ids"][0, 0])
        if length in lengths:
            continue
        lengths.add(length)
        expected = model(text[:, :length], output_hidden_states=True, return_shared_kv_states=True)
        torch.testing.assert_close(each["inputs_embeds"][:1, :, 32:], expected.hidden_states[-1][:, -1:])
        for name, pair in expected.shared_kv_states.items():
            shown = WINDOW - 1 if name == "sliding_attention" else length
            for n, theirs in enumerate(pair):
                ours = each[f"{name} {n}"]
                assert ours.shape[2] == shown
                torch.testing.assert_close(ours[:1], theirs[:, :, -shown:], atol=1e-4, rtol=1e-4)
    assert len(lengths) > 5


def test_an_edited_prompt() -> None:
    model, assistant = make_pair()
    store, edited = ChunkStore(model, chunk_size=16), PROMPT.clone()
    edited[0, 100] += 1
    model.generate(PROMPT, **GREEDY, assistant_model=assistant, cache=ChunkReuseCache(model, store))
    with watched(assistant) as cold:
        plain, _ = forwarded(model, edited, assistant_model=assistant)
    cache = ChunkReuseCache(model, store)
    with watched(assistant) as warm:
        assert model.generate(edited, **GREEDY, assistant_model=assistant, cache=cache).equal(plain)
    warm.assert_like(cold)
    assert cache.report.forwarded_tokens == 150 - 96


CODES = KVQuantConfig(method="kivi", group_size=16, window=16, sink_tokens=4, exact_layers=0)


@pytest.mark.parametrize("how", ["stock", "chains", "trees"])
@pytest.mark.parametrize(
    "form", ["int8", "blend", "live_quant", "fixed", "disk", "kvboost_fa2", "eager", "hidden states"]
)
def test_forms_of_kv(form: str, how: str, tmp_path: Path) -> None:
    """The tokens of the same cache without drafts, and as many of the prompt reused."""
    model, assistant = make_pair()
    if form in ("kvboost_fa2", "eager"):
        model.set_attn_implementation(form)
    draft = assistant if how == "stock" else load_assistant(assistant, target=model, **CHAINS)
    kept: dict[str, Any] = {"chunk_size": 16}
    if form == "int8":
        kept["codec"] = "int8"
    if form == "disk":
        kept["tiers"] = ["ram:1GB", f"disk:{tmp_path / 'tier'}:1GB"]
    forms: dict[str, dict[str, Any]] = {
        "blend": {"policy": ReusePolicy(mode="blend", min_prefill_saving=0)},
        "live_quant": {"live_quant": CODES},
        "fixed": {"max_cache_len": 400},
        "hidden states": {"policy": ReusePolicy(keep_hidden_states=-1)},
    }
    settings = forms.get(form, {})
    store = ChunkStore(model, **kept)
    first, second = random_ids(96, seed=5), random_ids(96, seed=6)
    prompts = [torch.cat([first, second, PROMPT[:, :9]], dim=1), torch.cat([second, first, PROMPT[:, :12]], dim=1)]
    for prompt in (*prompts, prompts[1]):
        if form == "disk":
            store.close()
            store = ChunkStore(model, **kept)
        reports = []
        for given in (
            {},
            {"custom_generate": TreeDecoding(draft, TREES)} if how == "trees" else {"assistant_model": draft},
        ):
            if form == "fixed" and how == "trees" and given:
                with pytest.raises(ValueError, match="K/V of branches cannot be held"):
                    model.generate(prompt, **GREEDY, **given, cache=ChunkReuseCache(model, store, **settings))
                return
            cache = ChunkReuseCache(model, store, **settings)
            text = model.generate(prompt, **GREEDY, **given, cache=cache)
            reports.append((text.tolist(), cache.report))
        (plain, without), (drafted, report) = reports
        assert drafted == plain
        assert report.bypass_reason is None
        assert report.forwarded_tokens <= without.forwarded_tokens + 1
        assert (report.moved_tokens > 0) == (without.moved_tokens > 0)
    store.close()


@pytest.mark.slow
def test_sampled_answers_have_the_same_distribution() -> None:
    """A prepared assistant draws its drafts where the target draws; that of transformers drafts greedily then."""
    model, assistant = make_pair()
    stock, count = make_assistant(model), 300
    stock.generation_config.num_assistant_tokens = 1
    draft = load_assistant(assistant, target=model, schedule="constant", num_assistant_tokens=1)
    given: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "top_k": 3, "temperature": 2.0}
    found, cache = list[torch.Tensor](), ChunkReuseCache(model)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for drafts in ({}, {"assistant_model": draft}, {"assistant_model": stock}):
            texts = [model.generate(PROMPT[:, :30], **given, **drafts, cache=cache) for _ in range(count)]
            found.append(torch.bincount(torch.cat(texts)[:, 31], minlength=200) / count)
    plain, prepared, greedy = found
    assert (plain - prepared).abs().sum() / 2 < 0.12
    assert (plain - greedy).abs().sum() / 2 > 0.2
    assert speculation_stats(draft).accepted > 20


def test_shared_kv_by_hand() -> None:
    """A call that asks for the K/V that layers lend reuses a prompt, and gets all of it."""
    model, _ = make_pair()
    store = ChunkStore(model, chunk_size=16)
    expected = model(PROMPT, return_shared_kv_states=True, logits_to_keep=1).shared_kv_states
    for computed in (150, 6):
        cache = ChunkReuseCache(model, store)
        with torch.no_grad():
            found = model(PROMPT, return_shared_kv_states=True, logits_to_keep=1, cache=cache).shared_kv_states
        assert cache.report.forwarded_tokens == computed
        for name, shown in (("full_attention", 150), ("sliding_attention", min(150, WINDOW - 1 + computed))):
            for ours, theirs in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(ours, theirs[:, :, -shown:], atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    """With what the assistant has and what the target has."""
    model, assistant = make_pair()
    misfits: list[tuple[Any, dict[str, Any], str]] = [
        (
            model,
            {"backbone": 48},
            "hidden states of 48 numbers, and those of its target, a Gemma4ForCausalLM, have 32",
        ),
        (model, {"vocab_size": 190}, "vocabulary of 190 tokens, and that of its target, a Gemma4ForCausalLM, has 200"),
        (model, {"sliding_window": 12}, "windows of 12 tokens, and its target, a Gemma4ForCausalLM, of 24"),
        (
            model,
            {"global_head_dim": 32},
            "2 heads of 32 numbers of a layer of the type full_attention, and its target",
        ),
        (model, {"num_key_value_heads": 1}, "1 heads of 8 numbers of a layer of the type sliding_attention, and its"),
        (
            make_target(layer_types=["full_attention"] * 4),
            {},
            "the types full_attention, sliding_attention, and its target, a Gemma4ForCausalLM, has full_attention. ",
        ),
        (make_model("gemma2"), {}, "reads keys and values that a Gemma 4 shows, and a Gemma2ForCausalLM shows none"),
    ]
    for target, changes, message in misfits:
        with pytest.raises(ValueError, match=message):
            load_assistant(make_assistant(model, **changes), target=target)
    with pytest.raises(
        ValueError, match=r"it reads K/V of its target, for which load_assistant\(draft, target=model\)"
    ):
        TreeDecoding(assistant)
    draft = load_assistant(assistant, target=model)
    with pytest.raises(ValueError, match="were prepared for another model"):
        make_target().generate(PROMPT, **GREEDY, custom_generate=TreeDecoding(draft))
    rows = torch.cat([PROMPT, PROMPT.flip(1)])
    with pytest.raises(ValueError, match="assisted generate is only supported for batch_size = 1"):
        model.generate(rows, **GREEDY, assistant_model=draft)
