"""Drafts by a model's own heads, which read hidden states of the whole prompt: warm as cold, and the prompt reused."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    DynamicCache,
    GenerationConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextGenerationPipeline,
)
from transformers.modeling_layers import MtpModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    DraftTreeConfig,
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


class Rounds:
    """What heads were given and have drafted in one call, round by round."""

    def __init__(self) -> None:
        self.drafts: list[list[int]] = []
        self.shown: list[torch.Tensor] = []

    def accepted(self, text: list[int]) -> int:
        """How many drafted tokens are in the answer: those of a round follow the token that the target gave."""
        count = at = 0
        for draft in self.drafts:
            agree = 0
            while agree < len(draft) and text[at + 1 + agree : at + 2 + agree] == draft[agree : agree + 1]:
                agree += 1
            count, at = count + agree, at + 1 + agree
        return count


@contextmanager
def watched(heads: Any, states: str = "last_hidden_states") -> Iterator[Rounds]:
    """Record what heads draft."""
    rounds, forward = Rounds(), heads.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        rounds.shown.append(kwargs[states].clone())
        if isinstance(output, tuple):
            rounds.drafts.append(output[0][0].tolist())
        return output

    heads.forward = wrapped
    try:
        yield rounds
    finally:
        del heads.forward


def assert_alike(found: Rounds, expected: Rounds) -> None:
    """As many rounds, the same drafts, from the same hidden states."""
    assert found.drafts == expected.drafts
    for ours, theirs in zip(found.shown, expected.shown, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


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
        assert_alike(rounds, stock)
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
            counts.append((rounds.accepted(answer), rounds.shown[0].abs().sum() == 0))
    accepted = [count for count, _ in counts]
    assert 0 < sum(accepted[::3]) < NEW * len(FAMILIES)
    assert accepted[::3] == accepted[1::3]
    assert [zero for _, zero in counts] == [False, False, True] * len(FAMILIES)


@pytest.mark.slow
def test_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns, a shorter prompt, one that parts early, three tokens, plain calls and drafts in turn: one cache."""
    model = probed(make_target("glm4_moe", 2))
    heads, store = use_layers(model, monkeypatch), ChunkStore(model, chunk_size=32)
    cache, text = ChunkReuseCache(model, store), PROMPT[:, :80]
    for turn in range(4):
        parted = torch.cat([text[:, :35], random_ids(30, seed=turn)], dim=1)
        prompts = text, text[:, : 40 + turn], parted, text[:, :3]
        for prompt in prompts:
            for given in ({"use_mtp": True}, {}, {"use_mtp": True, "past_key_values": ChunkReuseCache(model, store)}):
                plain = model.generate(prompt, **GREEDY)
                with watched(heads) as stock:
                    model.generate(prompt, **GREEDY, use_mtp=True)
                with watched(heads) as rounds:
                    found = model.generate(prompt, **{"past_key_values": cache, **GREEDY, **given})
                assert torch.equal(found, plain)
                if "use_mtp" in given:
                    assert_alike(rounds, stock)
        text = torch.cat([model.generate(text, **GREEDY), random_ids(20, seed=50 + turn)], dim=1)


def test_sampling_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = probed(make_target("mimo_v2_flash"))
    use_layers(model, monkeypatch)
    store, seen = ChunkStore(model, chunk_size=32), []
    for cache in (None, ChunkReuseCache(model, store), ChunkReuseCache(model, store)):
        torch.manual_seed(5)
        given = {"past_key_values": cache} if cache is not None else {}
        seen.append(model.generate(PROMPT, max_new_tokens=NEW, do_sample=True, top_k=20, use_mtp=True, **given))
    assert torch.equal(seen[1], seen[0])
    assert torch.equal(seen[2], seen[0])


def test_what_fails_in_the_middle_of_a_draft_leaves_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = probed(make_target("glm4_moe"))
    heads, store = use_layers(model, monkeypatch), ChunkStore(model, chunk_size=32)
    plain, cache = model.generate(PROMPT, **GREEDY), ChunkReuseCache(model, store)
    for fails_at in (0, 1, 5):
        calls, forward = [0], heads.forward

        def failing(*args: Any, forward: Any = forward, calls: Any = calls, at: int = fails_at, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] > at:
                raise KeyboardInterrupt
            return forward(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(heads, "forward", failing)
            with pytest.raises(KeyboardInterrupt):
                model.generate(PROMPT, **GREEDY, use_mtp=True, past_key_values=cache)
        for use in (cache, ChunkReuseCache(model, store)):
            for given in ({"use_mtp": True}, {}):
                assert torch.equal(model.generate(PROMPT, **GREEDY, **given, past_key_values=use), plain)


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


def make_blocks(model: Any, layers: list[int]) -> Any:
    """A tiny drafter of blocks for a model."""
    config = model.config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MuseGlimmerAssistantModel(
            MuseGlimmerAssistantConfig(
                hidden_size=config.hidden_size,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                block_size=4,
                mask_token_id=5,
                target_layer_ids=layers,
                bos_token_id=1,
                eos_token_id=None,
                pad_token_id=0,
                sliding_window=64,
            )
        ).eval()


@pytest.mark.parametrize("name", ["deep_llama", "gemma2"])
def test_blocks_of_drafts(name: str) -> None:
    """DFlash reads hidden states of several layers."""
    model = probed(make_model(name))
    drafter, store = make_blocks(model, [0, 1]), ChunkStore(model, chunk_size=32)
    blocks = {**GREEDY, "assistant_model": drafter, "speculation_type": "dflash"}
    plain = model.generate(PROMPT, **GREEDY)
    with watched(drafter, "context_hidden_states") as stock, counted(model) as work:
        model.generate(PROMPT, **blocks)
    cold, cache = work.tokens, ChunkReuseCache(model, store)
    for computed in (200, 8, 1):
        cache = ChunkReuseCache(model, store) if computed > 1 else cache
        with watched(drafter, "context_hidden_states") as rounds, counted(model) as work:
            found = model.generate(PROMPT, **blocks, past_key_values=cache)
        assert torch.equal(found, plain)
        assert_alike(rounds, stock)
        assert cold - work.tokens == 200 - computed
        assert cache.report.bypass_reason is None


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
        assert_alike(rounds, stock)
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


@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe 2", "mimo_v2_flash", "blocks"])
def test_rounds_of_trees(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TreeDecoding` runs heads as it runs drafts: any processors and criteria, padding, and over any cache."""
    family, _, layers = kind.partition(" ")
    if kind == "blocks":
        model: Any = probed(make_model("deep_llama"))
        heads: Any = load_assistant(make_blocks(model, [0, 1]), target=model)
    else:
        model = probed(make_target(family, int(layers or 1)))
        use_layers(model, monkeypatch)
        heads = load_assistant(model)
    trees = TreeDecoding(heads, DraftTreeConfig(policy="tree"))
    name = "context_hidden_states" if kind == "blocks" else "last_hidden_states"
    store = ChunkStore(model, chunk_size=32)
    given: dict[str, Any] = {
        **GREEDY,
        "repetition_penalty": 1.1,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    plain = model.generate(PROMPT, **given)
    seen = []
    for computed in (None, 200, 1, 1):
        cache = {"past_key_values": ChunkReuseCache(model, store)} if computed is not None else {}
        with watched(heads, name) as rounds, counted(model) as work:
            found = model.generate(PROMPT, **given, **cache, custom_generate=trees)
        assert torch.equal(found.sequences, plain.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4)
        seen.append((rounds, trees.stats.accepted, work.tokens))
        if computed is not None:
            assert cache["past_key_values"].report.bypass_reason is None
            assert cache["past_key_values"].report.forwarded_tokens <= max(computed, 8)
    for (rounds, accepted, _), (before, earlier, _) in zip(seen[1:], seen, strict=False):
        assert_alike(rounds, before)
        assert accepted > earlier or kind == "blocks"
    longest = {"glm4_moe 2": 2, "blocks": 3}.get(kind, 1)
    assert trees.stats.drafted > 0.8 * longest * trees.stats.rounds
    assert store.check_integrity().wrong == 0
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), PROMPT], dim=1)
    mask = (torch.arange(209) >= 9)[None].long()
    given = {**GREEDY, "attention_mask": mask, "do_sample": False}
    plain = model.generate(padded, **given)
    assert torch.equal(model.generate(padded, **given, custom_generate=trees), plain)


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


def test_heads_that_do_not_fit_are_refused(llama: PreTrainedModel, tmp_path: Any) -> None:
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
