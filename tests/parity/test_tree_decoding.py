"""Trees of drafts: what is said is what plain generate() says, in fewer passes of the target."""

import threading
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StopStringCriteria,
    TextStreamer,
)

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    DraftTreeConfig,
    KVQuantConfig,
    TreeDecoding,
    attach,
    detach,
    last_cache,
    speculation_stats,
)
from kvboost_hf.assets import load_embedded, load_embedded_draft
from recipes.evaluate_draft import held_out_prompts
from tests.architectures.models import make_architecture
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.assisted import as_bits, branches
from tests.parity.test_assistants import noisy
from tests.streaming import make_layers, stream_except

MODELS = ["llama", "qwen2", "gpt2", "deepseek_v3", "gemma2", "mistral", "gpt_oss", "phi"]
WIDE = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=40)


def pair(name: str = "llama", config: DraftTreeConfig | None = WIDE) -> tuple[PreTrainedModel, TreeDecoding]:
    """A target, and trees for it by a draft that often agrees."""
    return make_model(name), TreeDecoding(noisy(make_model(name), 0.08), config)


@pytest.mark.parametrize("policy", ["auto", "tree", "chain"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens(name: str, policy: Any) -> None:
    target, trees = pair(name, DraftTreeConfig(policy=policy, depth=6, max_nodes=24))
    cache = ChunkReuseCache(target)
    for seed in range(3):
        told = {**as_inputs(random_ids(30 + seed, seed)), "max_new_tokens": 20}
        wanted = target.generate(**told)
        assert torch.equal(target.generate(**told, custom_generate=trees), wanted)
        assert torch.equal(target.generate(**told, custom_generate=trees, past_key_values=cache), wanted)
        longer = {**as_inputs(torch.cat([wanted, random_ids(9, seed + 50)], 1)), "max_new_tokens": 12}
        assert torch.equal(
            target.generate(**longer, custom_generate=trees, past_key_values=cache), target.generate(**longer)
        )
        assert cache.report.reused_tokens == wanted.shape[1] - 1  # of the first turn, taken over branch by branch
    stats = speculation_stats(trees)
    assert stats.accepted < stats.committed <= stats.accepted + stats.rounds
    assert sum(stats.histogram.values()) == stats.rounds
    assert stats.committed_per_round > 1.2


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        (name, attention)
        for name in ("llama", "gemma2", "mistral", "gpt_oss")
        for attention in ("sdpa", "eager", "kvboost_fa2")
        if attention != "sdpa" or name in ("llama", "mistral")  # which have it
    ],
)
def test_attention(name: str, attention: str) -> None:
    target, trees = pair(name)
    inputs = {**as_inputs(random_ids(40, 5)), "max_new_tokens": 24}
    wanted = target.generate(**inputs)
    for model in (target, trees.draft):
        model.set_attn_implementation(attention)
    for cache in (None, ChunkReuseCache(target), DynamicCache(config=target.config)):
        assert torch.equal(target.generate(**inputs, custom_generate=trees, past_key_values=cache), wanted)
    assert speculation_stats(trees).committed_per_round > 1.5


def test_what_is_kept_is_what_plain_decoding_leaves() -> None:
    """K/V of the branch that was taken, in the layers and in the store."""
    for name in ("llama", "gemma2"):
        target, trees = pair(name)
        told = {**as_inputs(random_ids(40, 1)), "max_new_tokens": 40}
        stores = [ChunkStore(target, chunk_size=16) for _ in range(2)]
        kept = [ChunkReuseCache(target, store) for store in stores]
        texts = [
            target.generate(**told, past_key_values=cache, **more)
            for cache, more in zip(kept, ({}, {"custom_generate": trees}), strict=True)
        ]
        assert torch.equal(*texts)
        assert kept[0].get_seq_length() == kept[1].get_seq_length()
        for plain, ours in zip(*(cache.layers for cache in kept), strict=True):
            assert (plain.keys - ours.keys[:, :, -plain.keys.shape[2] :]).abs().max() < 1e-4
            assert (plain.values - ours.values[:, :, -plain.values.shape[2] :]).abs().max() < 1e-4
        assert len(stores[0]) == len(stores[1]) > 3


def test_wrong_branches_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that shows every token of a tree to every other gives other texts."""
    target, trees = pair()
    told = [{**as_inputs(random_ids(30, seed)), "max_new_tokens": 20} for seed in range(4)]
    wanted = [target.generate(**each) for each in told]
    assert all(map(torch.equal, [target.generate(**each, custom_generate=trees) for each in told], wanted))
    monkeypatch.setattr(branches, "lineage", lambda parents: torch.ones(len(parents), len(parents)).bool().numpy())
    found = [target.generate(**each, custom_generate=trees) for each in told]
    assert not all(map(torch.equal, found, wanted))


WAYS: list[dict[str, Any]] = [
    {"max_new_tokens": 1},
    {"max_new_tokens": 2},
    {"max_new_tokens": 3},
    {"min_new_tokens": 8, "max_new_tokens": 9},
    {"max_new_tokens": 16, "repetition_penalty": 1.3},
    {"max_new_tokens": 16, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 12, "prefill_chunk_size": 7},
]


@pytest.mark.parametrize("told", WAYS, ids=str)
def test_ways_of_generating(told: dict[str, Any]) -> None:
    target, trees = pair()
    cache = ChunkReuseCache(target)
    for seed in range(3):
        inputs = as_inputs(random_ids(20, seed))
        wanted = target.generate(**inputs, **told)
        assert torch.equal(target.generate(**inputs, **told, custom_generate=trees), wanted)
        assert torch.equal(target.generate(**inputs, **told, custom_generate=trees, past_key_values=cache), wanted)


def test_ends_within_a_tree() -> None:
    target, trees = pair()
    inputs = as_inputs(random_ids(20, 3))
    cache = ChunkReuseCache(target)
    plain = target.generate(**inputs, max_new_tokens=20)[0, 20:].tolist()
    ends = 0
    for token in dict.fromkeys(plain):
        told = {**inputs, "max_new_tokens": 20, "eos_token_id": token}
        wanted = target.generate(**told)
        assert torch.equal(target.generate(**told, custom_generate=trees), wanted)
        assert torch.equal(target.generate(**told, custom_generate=trees, past_key_values=cache), wanted)
        ends += wanted.shape[1] < 40
    assert ends > 3


class _After(StoppingCriteria):
    """Ends a text after a token, as a stop string does."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self._token


def test_other_criteria_stop_at_the_token() -> None:
    """Where stock assisted decoding says the rest of what was drafted first."""
    target, trees = pair()
    inputs = as_inputs(random_ids(20, 3))
    for token in target.generate(**inputs, max_new_tokens=20)[0, 20:].tolist():
        told = {**inputs, "max_new_tokens": 20, "stopping_criteria": [_After(token)]}
        assert torch.equal(target.generate(**told, custom_generate=trees), target.generate(**told))
    told["stopping_criteria"] = [MaxLengthCriteria(29), MaxLengthCriteria(35)]
    assert target.generate(**told, custom_generate=trees).shape[1] == target.generate(**told).shape[1] == 29


def test_stop_strings_and_a_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_embedded()
    trees = TreeDecoding(noisy(load_embedded()[0], 0.05))
    inputs = tokenizer("Maria lives in Rome. She owns the lamp. Where does Maria live?", return_tensors="pt")
    told = {**inputs, "max_new_tokens": 24, "eos_token_id": None, "stop_strings": ["."], "tokenizer": tokenizer}
    wanted = model.generate(**told)
    criteria = [StopStringCriteria(tokenizer, ["."])]
    plain = {**inputs, "max_new_tokens": 24, "eos_token_id": None, "stopping_criteria": criteria}
    found = model.generate(**plain, custom_generate=trees, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert torch.equal(found, wanted)
    text = tokenizer.decode(wanted[0, inputs["input_ids"].shape[1] :])
    assert capsys.readouterr().out.strip() == text.strip()


def test_padding() -> None:
    for name in ("llama", "mistral"):
        target, trees = pair(name)
        ids = random_ids(20, 4)
        padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
        mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], 1)
        told = {"input_ids": padded, "attention_mask": mask, "max_new_tokens": 18}
        wanted = target.generate(**told)
        for cache in (None, ChunkReuseCache(target)):
            assert torch.equal(target.generate(**told, custom_generate=trees, past_key_values=cache), wanted)


def test_a_filled_cache() -> None:
    """Where stock assisted decoding feeds the whole prompt again."""
    target, trees = pair()
    ids = random_ids(40, 8)
    wanted = target.generate(**as_inputs(ids), max_new_tokens=12)
    for held in (1, 20, 39):
        for cache in (DynamicCache(config=target.config), ChunkReuseCache(target)):
            with torch.no_grad():
                target(ids[:, :held], past_key_values=cache)
            found = target.generate(**as_inputs(ids), custom_generate=trees, past_key_values=cache, max_new_tokens=12)
            assert torch.equal(found, wanted)


def test_scores_and_logits() -> None:
    target, trees = pair()
    told = {**as_inputs(random_ids(20, 2)), "max_new_tokens": 10, "repetition_penalty": 1.2}
    told |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted, found = target.generate(**told), target.generate(**told, custom_generate=trees)
    assert torch.equal(found.sequences, wanted.sequences)
    for name in ("scores", "logits"):
        assert len(found[name]) == 10
        for mine, theirs in zip(found[name], wanted[name], strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)
    assert found.past_key_values.get_seq_length() == 29


@pytest.mark.slow
def test_sampling_keeps_the_distribution() -> None:
    """The first two tokens of many answers, against the probabilities that the target gives them."""
    sizes: dict[str, Any] = {
        "vocab_size": 3,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    target, draft = (
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=n, initializer_range=0.6)).eval() for n in (2, 1)
    )
    trees = TreeDecoding(draft, DraftTreeConfig(policy="tree", depth=3, width=2, branching=2))
    ids = torch.tensor([[1, 2, 1]])
    count, seen = 700, Counter[tuple[int, ...]]()
    for _ in range(count):
        said = target.generate(
            ids, do_sample=True, top_k=0, max_new_tokens=3, eos_token_id=None, custom_generate=trees
        )
        seen[tuple(said[0, 3:5].tolist())] += 1
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    with torch.no_grad():
        for _ in range(2):
            chances = {
                (*told, token): chance * odds
                for told, chance in chances.items()
                for token, odds in enumerate(
                    target(torch.cat([ids, torch.tensor([told], dtype=torch.long)], 1))
                    .logits[0, -1]
                    .softmax(-1)
                    .tolist()
                )
            }
    chi2 = sum((seen[text] - count * chance) ** 2 / (count * chance) for text, chance in chances.items())
    assert chi2 < 26.1  # 8 degrees of freedom, one in a thousand


def test_a_warm_prompt_is_warm_for_both() -> None:
    target, trees = pair()
    attach(trees.draft, ChunkStore(trees.draft, chunk_size=16))
    store = ChunkStore(target, chunk_size=16)
    told = {**as_inputs(random_ids(100, 7)), "max_new_tokens": 8}
    wanted = target.generate(**told)
    for warm in (False, True):
        cache = ChunkReuseCache(target, store)
        assert torch.equal(target.generate(**told, custom_generate=trees, past_key_values=cache), wanted)
        kept = last_cache(trees.draft)
        assert kept is not None
        assert kept.report.reused_tokens >= (96 if warm else 0)
        assert cache.report.reused_tokens >= (96 if warm else 0)
        assert (kept.report.reused_tokens == 0) is not warm


def test_attached_to_the_target() -> None:
    target, trees = pair()
    told = {**as_inputs(random_ids(60, 7)), "max_new_tokens": 12}
    wanted = target.generate(**told)
    attach(target, ChunkStore(target, chunk_size=16))
    for reused in (0, 48):
        assert torch.equal(target.generate(**told, custom_generate=trees), wanted)
        kept = last_cache(target)
        assert kept is not None
        assert kept.report.reused_tokens >= reused
    detach(target)


def test_with_streamed_layers_and_codes() -> None:
    target, plain = make_layers(5), make_layers(5)
    trees = TreeDecoding(make_layers(2), WIDE)
    stream_except(target, (0,))
    told = {**as_inputs(random_ids(40, 2)), "max_new_tokens": 40}
    assert torch.equal(target.generate(**told, custom_generate=trees), plain.generate(**told))
    for attention in ("sdpa", "kvboost_fa2"):
        for model in (target, plain):
            model.set_attn_implementation(attention)
        config = KVQuantConfig(exact_layers=1, window=16, sink_tokens=4)
        found, wanted = (
            model.generate(**told, past_key_values=ChunkReuseCache(model, live_quant=config), **more)
            for model, more in ((target, {"custom_generate": trees}), (plain, {}))
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("processed", [False, True])
def test_a_draft_that_is_always_right_is_taken_whole(processed: bool) -> None:
    """What a tree is worth, to a token: each round takes all levels, and one token of the target's, the first too."""
    (target, tokenizer), levels = load_embedded(), 3
    trees = TreeDecoding(load_embedded()[0], DraftTreeConfig(policy="tree", depth=levels, width=4, branching=4))
    told = {"repetition_penalty": 3.0} if processed else {}
    for ids in held_out_prompts(tokenizer, 4, seed=4):
        target.generate(**as_inputs(ids), custom_generate=trees, max_new_tokens=16, eos_token_id=None, **told)
    stats = speculation_stats(trees)
    assert (stats.histogram, stats.committed_per_round) == ({levels: 16}, levels + 1)


def test_fewer_passes_of_the_target() -> None:
    """What trees are for, counted: at the same number of levels, more tokens a pass than a chain."""
    (target, tokenizer), draft = load_embedded(), noisy(load_embedded_draft(), 0.4)
    passes = {}
    for arm, config in {
        "chain": DraftTreeConfig(policy="tree", depth=4, width=1, branching=1),
        "tree": DraftTreeConfig(policy="tree", depth=4),
    }.items():
        trees, count = TreeDecoding(draft, config), [0]
        handle = target.register_forward_hook(lambda *_, count=count: count.append(1))
        for ids in held_out_prompts(tokenizer, 8, seed=4):
            target.generate(**as_inputs(ids), custom_generate=trees, max_new_tokens=16, eos_token_id=None)
        handle.remove()
        passes[arm] = len(count)
    assert passes["tree"] < 0.9 * passes["chain"]


def test_an_interrupted_pass_leaves_the_cache_as_it_was() -> None:
    target, trees = pair()
    cache = ChunkReuseCache(target)
    told = {**as_inputs(random_ids(40, 1)), "max_new_tokens": 20}
    wanted = target.generate(**told)
    calls = [0]

    def fail(*_: object) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt

    handle = target.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**told, custom_generate=trees, past_key_values=cache)
    handle.remove()
    assert not target.model.layers[0]._forward_pre_hooks
    for more in ({}, {"custom_generate": trees}):
        assert torch.equal(target.generate(**told, past_key_values=cache, **more), wanted)


def test_two_threads_on_one_target() -> None:
    target = make_model()
    told = [{**as_inputs(random_ids(30, seed)), "max_new_tokens": 30} for seed in range(2)]
    wanted = [target.generate(**each) for each in told]
    each_trees = [TreeDecoding(noisy(make_model(), 0.08), WIDE) for _ in range(2)]
    found: list[Any] = [None, None]

    def run(i: int) -> None:
        found[i] = [target.generate(**told[i], custom_generate=each_trees[i]) for _ in range(4)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, wanted[i]) for i in range(2) for one in found[i])


def test_what_cannot_be_done_is_said() -> None:
    target, trees = pair()
    inputs = {**as_inputs(random_ids(10, 0)), "max_new_tokens": 4}
    other = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1))
    for wrong in ("Qwen/Qwen2.5-0.5B-Instruct", None, trees):
        with pytest.raises(ValueError, match="`draft` must be a model that is loaded, or what load_assistant"):
            TreeDecoding(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocabulary of the model that generates, of 200 tokens, got 300"):
        target.generate(**inputs, custom_generate=TreeDecoding(other.eval()))
    with pytest.raises(ValueError, match="`num_beams` must be 1 with trees of drafts, got 3"):
        target.generate(**inputs, custom_generate=trees, num_beams=3)
    for other_way in ({"dola_layers": "high"}, {"penalty_alpha": 0.6, "top_k": 4}, {"force_words_ids": [[5]]}):
        with pytest.raises(ValueError, match=r"must ask for greedy decoding or sampling .*, got those of"):
            target.generate(**inputs, custom_generate=trees, **other_way)
    with pytest.raises(ValueError, match="`output_hidden_states` cannot be returned"):
        target.generate(**inputs, custom_generate=trees, output_hidden_states=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="several drafted tokens in one forward: a prompt in two parts gives other"):
        TreeDecoding(make_architecture("jamba"))
    with pytest.raises(ValueError, match="`use_cache` must be True"):
        target.generate(**inputs, custom_generate=trees, use_cache=False)
    with pytest.raises(ValueError, match="layers of the kind StaticLayer"):
        target.generate(**inputs, custom_generate=trees, cache_implementation="static")
    with pytest.raises(ValueError, match="`policy` must be"):
        DraftTreeConfig(policy="clever")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`width` must be"):
        DraftTreeConfig(width=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert target.generate(**inputs, custom_generate=trees).shape[1] == 14


def test_more_tokens_than_bits() -> None:
    target, trees = pair("llama", DraftTreeConfig(policy="tree", depth=5, width=8, branching=4, max_nodes=120))
    for model in (target, trees.draft):
        model.set_attn_implementation("kvboost_fa2")
    told = {**as_inputs(random_ids(30, 3)), "max_new_tokens": 20}
    assert torch.equal(target.generate(**told, custom_generate=trees), target.generate(**told))
    assert speculation_stats(trees).drafted > 64 * 2


def test_bits() -> None:
    seen = torch.eye(64, dtype=torch.bool).numpy()
    assert as_bits(seen).tolist() == [1 << i if i < 63 else -(1 << 63) for i in range(64)]
