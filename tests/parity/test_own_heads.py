"""Drafts by a model's own heads, which read hidden states of the whole prompt: warm as cold, and the prompt reused."""

import copy
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextGenerationPipeline,
)
from transformers.modeling_layers import MtpModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVBoost,
    ReusePolicy,
    ReuseReport,
    TreeDecoding,
    attach,
    check_model_compatibility,
    last_cache,
    load_assistant,
    speculation_stats,
)
from tests.conftest import VOCAB, counted, make_model, random_ids
from tests.heads import make_blocks, watched
from tests.internals.cache import HiddenStates
from tests.internals.compat import hidden_form
from tests.mtp import FAMILIES, make_target, save_with_layers, use_layers

PROMPT = random_ids(200, seed=3)
NEW = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


def probed(model: PreTrainedModel) -> Any:
    check_model_compatibility(model)
    assert not isinstance(hidden_form(model), str)
    return model


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_warm_is_as_cold(family: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of plain generate(), the drafts and acceptance of a cold call, and only the rest forwarded."""
    if layers == 2 and family == "mellum":
        pytest.skip("its configuration takes one layer")
    model = probed(make_target(family, layers))
    heads, store = use_layers(model, monkeypatch), ChunkStore(model, chunk_size=32)
    plain = model.generate(PROMPT, **GREEDY)
    with watched(heads) as stock, counted(model) as work:
        model.generate(PROMPT, **GREEDY, use_mtp=True)
    cold, answer = work.tokens, plain[0, 200:].tolist()
    cache = ChunkReuseCache(model, store)
    for kept, computed in ((None, 200), (None, 8), ("the same cache", 1), ("attached", 1)):
        cache = ChunkReuseCache(model, store) if kept is None else cache
        if kept == "attached":
            attach(model, store)
        given = {"past_key_values": cache} if kept != "attached" else {}
        with watched(heads) as rounds, counted(model) as work:
            found = model.generate(PROMPT, **GREEDY, **given, use_mtp=True)
        assert torch.equal(found, plain)
        rounds.assert_like(stock)
        assert rounds.accepted(answer) == stock.accepted(answer)
        assert cold - work.tokens == 200 - computed
        report = report_of(model) if kept == "attached" else cache.report
        assert (report.forwarded_tokens, report.bypass_reason) == (computed, None)


VIEW = HiddenStates.view


def view_zeroed(self: HiddenStates, layer: int, start: int) -> torch.Tensor:
    return 0 * VIEW(self, layer, start)


def test_drafts_of_these_models_are_accepted_and_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would show little; and without what was kept of hidden states, fewer are accepted."""
    counts = []
    for family in FAMILIES:
        model = probed(make_target(family))
        heads, store = use_layers(model, monkeypatch), ChunkStore(model, chunk_size=32)
        answer = model.generate(PROMPT, **GREEDY)[0, 200:].tolist()
        for zeroed in (False, False, True):
            with monkeypatch.context() as patched, watched(heads) as rounds:
                if zeroed:
                    patched.setattr(HiddenStates, "view", view_zeroed)
                found = model.generate(PROMPT, **GREEDY, use_mtp=True, past_key_values=ChunkReuseCache(model, store))
            assert found[0, 200:].tolist() == answer
            counts.append((rounds.accepted(answer), rounds.given[0]["last_hidden_states"].abs().sum() == 0))
    accepted = [count for count, _ in counts]
    assert 0 < sum(accepted[::3]) < NEW * len(FAMILIES)
    assert accepted[::3] == accepted[1::3]
    assert [zero for _, zero in counts] == [False, False, True] * len(FAMILIES)


def test_a_checkpoint_on_disk_through_a_pipeline(tmp_path: Any) -> None:
    """Nothing is patched: transformers loads the layers from the files of the model."""
    model = probed(save_with_layers("glm4_moe", tmp_path))
    plain = model.generate(PROMPT, **GREEDY)
    pipe = TextGenerationPipeline(model=attach(model, ChunkStore(model, chunk_size=32)), tokenizer=words())
    for computed in (200, 1):
        assert torch.equal(model.generate(PROMPT, **GREEDY, use_mtp=True), plain)
        assert report_of(model).forwarded_tokens == computed
    text = " ".join(f"w{n}" for n in random_ids(100, seed=9)[0].tolist())
    first = pipe(text, **GREEDY, use_mtp=True)
    assert pipe(text, **GREEDY, use_mtp=True) == first
    assert report_of(model).forwarded_tokens == 4  # behind a chunk of three times 32


def report_of(model: PreTrainedModel) -> ReuseReport:
    cache = last_cache(model)
    assert cache is not None
    return cache.report


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of words, one for each id."""
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")


def test_a_store_without_says_what_the_first_call_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = probed(make_target("ernie4_5_moe"))
    use_layers(model, monkeypatch)
    store = ChunkStore(model, chunk_size=32)
    store.warm(PROMPT)
    for reason in ("199 more tokens are stored without the hidden states that the call asks for", ""):
        cache = ChunkReuseCache(model, store)
        model.generate(PROMPT, **GREEDY, use_mtp=True, past_key_values=cache)
        assert (cache.report.bypass_reason or "").startswith(reason)
    assert cache.report.forwarded_tokens == 8
    cache = ChunkReuseCache(model, store, ReusePolicy(keep_hidden_states=False))
    model.generate(PROMPT, **GREEDY, use_mtp=True, past_key_values=cache)
    assert cache.report.bypass_reason == (
        "`output_hidden_states=-1` returns something of each token, and `keep_hidden_states` is False"
    )


def test_what_transformers_refuses_is_refused_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_target("glm4_moe"), PROMPT.expand(2, -1)
    use_layers(model, monkeypatch)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        model.generate(batch, **GREEDY, use_mtp=True, past_key_values=cache)
    assert torch.equal(
        model.generate(PROMPT, **GREEDY, use_mtp=True, past_key_values=cache), model.generate(PROMPT, **GREEDY)
    )
    states = make_model("qwen3_next")
    with pytest.raises(ValueError, match="not supported with stateful models"):
        states.generate(PROMPT, **GREEDY, use_mtp=True, past_key_values=ChunkReuseCache(states))


def test_one_call_finds_the_heads_of_a_checkpoint(tmp_path: Any) -> None:
    """They are loaded once, and passed as any draft: over no cache, over a cold and a warm one, and after attach()."""
    model = probed(save_with_layers("glm4_moe", tmp_path))
    plain = model.generate(PROMPT, **GREEDY)
    heads, store = load_assistant(model), ChunkStore(model, chunk_size=32)
    assert isinstance(heads, MtpModel)
    with watched(heads) as stock:
        model.generate(PROMPT, **GREEDY, assistant_model=heads)
    for file in tmp_path.iterdir():
        file.unlink()
    for given, computed in (({}, 200), (store, 200), (store, 8), ("attached", 200), ("attached", 1)):
        if given == "attached" and computed > 1:
            attach(model, ChunkStore(model, chunk_size=32))
        cache = {"past_key_values": ChunkReuseCache(model, store)} if given is store else {}
        before = speculation_stats(heads).accepted
        with watched(heads) as rounds, counted(model) as work:
            found = model.generate(PROMPT, **GREEDY, **cache, assistant_model=heads)
        assert torch.equal(found, plain)
        rounds.assert_like(stock)
        assert speculation_stats(heads).accepted - before == stock.accepted(plain[0, 200:].tolist())
        assert work.tokens <= computed + 200 + 3 * NEW  # the heads take in the prompt, too
    stats = speculation_stats(heads)
    assert stats.committed + stats.plain == 6 * NEW
    assert stats.plain == 6  # the first token of each answer


def test_the_facade_finds_them(tmp_path: Any) -> None:
    model = probed(save_with_layers("glm4_moe", tmp_path))
    text = " ".join(f"w{n}" for n in PROMPT[0].tolist())
    plain = KVBoost(model, words(), chat_template=False).generate(text, max_new_tokens=NEW)
    engine = KVBoost(model, words(), assistant="auto", chat_template=False)
    for reused in (False, True):
        found = engine.generate(text, max_new_tokens=NEW)
        assert found.output_text == plain.output_text
        assert (found.kv_reuse_ratio > 0.9) == reused
    stats = engine.speculative_stats()
    assert stats is not None
    assert stats.rounds > NEW // 3


def test_stock_drafts_go_on_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = probed(make_target("glm4_moe"))
    use_layers(model, monkeypatch)
    plain, heads = model.generate(PROMPT, **GREEDY), load_assistant(model)
    before = ChunkStore(model, chunk_size=32)
    before.warm(PROMPT)
    for given in ({"use_mtp": True}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": make_model("llama")}, {}):
        assert torch.equal(model.generate(PROMPT, **GREEDY, **given), plain)
    cache = ChunkReuseCache(model, before)
    model.generate(PROMPT, **GREEDY, past_key_values=cache)
    assert cache.report.forwarded_tokens == 1  # the model is the one that it was
    copied = copy.deepcopy(model)
    assert torch.equal(copied.generate(PROMPT, **GREEDY, prompt_lookup_num_tokens=3), plain)
    load_assistant(copied)  # which takes the same heads here
    with pytest.raises(ValueError, match="prepared for another model than this Glm4MoeForCausalLM"):
        model.generate(PROMPT, **GREEDY, assistant_model=heads)
    with pytest.raises(ValueError, match="prepared for another model than this Glm4MoeForCausalLM"):
        model.generate(PROMPT, **GREEDY, custom_generate=TreeDecoding(heads))


def test_what_rounds_of_heads_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_target("glm4_moe")
    use_layers(model, monkeypatch)
    trees = TreeDecoding(load_assistant(model))
    with pytest.raises(ValueError, match="`prefill_chunk_size` must be None with heads"):
        model.generate(PROMPT, **GREEDY, custom_generate=trees, prefill_chunk_size=64)
    filled = DynamicCache(config=model.config)
    model(PROMPT[:, :50], past_key_values=filled)
    with pytest.raises(ValueError, match="of which the cache holds 50 tokens"):
        model.generate(PROMPT, **GREEDY, custom_generate=trees, past_key_values=filled)


@pytest.mark.daily
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "glm4_moe without files"])
def test_without_heads_it_looks_text_up(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_target("glm4_moe") if name.startswith("glm") else make_model(name)
    with caplog.at_level("INFO", "kvboost_hf"):
        assistant = load_assistant(model)
    why = {"llama": "names no multi-token-prediction layers", "qwen3_next": "names no"}.get(name, "cannot be loaded")
    assert why in caplog.text
    repeating = random_ids(20, seed=1).repeat(1, 6)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    plain = model.generate(repeating, **GREEDY)
    given = {"custom_generate": TreeDecoding(assistant)} if name == "qwen3_next" else {"assistant_model": assistant}
    assert torch.equal(model.generate(repeating, **GREEDY, **given, past_key_values=cache), plain)


def test_heads_that_do_not_fit_are_refused(
    llama: PreTrainedModel, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both numbers, and what would fit."""
    with pytest.raises(ValueError, match="Without `target`, load_assistant"):
        load_assistant("a name")
    fits = make_blocks(llama, [0, 1])
    fits.save_pretrained(tmp_path)
    loaded = load_assistant(str(tmp_path), target=llama)
    plain = llama.generate(PROMPT, **GREEDY)
    for _ in range(2):
        cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
        assert torch.equal(llama.generate(PROMPT, **GREEDY, assistant_model=loaded, past_key_values=cache), plain)
    assert speculation_stats(loaded).drafted > 0
    wide = make_blocks(llama, [0, 1])
    wide.config.hidden_size = 96
    deep, other = make_blocks(llama, [0, 7]), make_blocks(llama, [0, 1])
    other.config.mask_token_id = 200  # the first one that is none
    for drafter, reason in (
        (wide, "reads hidden states of 96 numbers, and those of its target, a LlamaForCausalLM, have 64"),
        (deep, r"reads the layers \[0, 7\], and its target has those from 0 to 1"),
        (other, "stands the token 200 for what is to be drafted, and its target has tokens up to 199"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_assistant(drafter, target=llama)
    monkeypatch.delattr("transformers.utils.output_capturing.selected_hidden_states")
    with pytest.raises(ValueError, match=r"in another form than is known here\. Install transformers 5\.24"):
        load_assistant(fits, target=llama)


def test_layers_that_were_loaded_before_make_the_generator_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new field of transformers' generator would be missed otherwise."""
    model = make_target("glm4_moe", 2)
    use_layers(model, monkeypatch)
    config, made = GenerationConfig(do_sample=True), []
    rest = {"input_ids": PROMPT, "inputs_tensor": PROMPT, "model_kwargs": {}, "logits_processor": None}
    for use_mtp in (True, None):
        config.use_mtp = use_mtp
        heads = load_assistant(model) if not use_mtp else None
        made.append(model._get_candidate_generator(config, **rest, assistant_model=heads))
    ours, theirs = vars(made[1]._inner._inner), vars(made[0])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert type(ours[name]) is type(value)
        assert name in ("mtp_cache",) or ours[name] == value or ours[name] is value
