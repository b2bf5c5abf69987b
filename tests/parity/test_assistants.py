"""Drafts by another model, in stock generate(): what is said is what plain generate() says."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVQuantConfig,
    TreeDecoding,
    attach,
    last_cache,
    load_assistant,
    speculation_stats,
)
from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.compat import decoder_layers
from tests.speculation import retokenize
from tests.streaming import make_layers, stream_except

MODELS = ["llama", "qwen2", "gpt2", "deepseek_v3"]
if not transformers.__version__.startswith("5.17"):  # which cannot draft beyond a window
    MODELS.append("gemma2")


def noisy(model: PreTrainedModel, share: float = 0.02) -> Any:
    """A draft that often agrees with `model`: its weights, somewhat changed."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter += share * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0
    return model


def pair(name: str = "llama", **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft for it."""
    target = make_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is no smaller
        return target, load_assistant(noisy(make_model(name)), target=target, **kwargs)


@pytest.mark.parametrize("schedule", ["adaptive", "constant", "heuristic"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens(name: str, schedule: Any) -> None:
    target, draft = pair(name, schedule=schedule)
    cache, tokens = ChunkReuseCache(target), 0
    for seed in range(4):
        told = {**as_inputs(random_ids(30 + seed, seed)), "max_new_tokens": 20}
        wanted = target.generate(**told)
        assert torch.equal(target.generate(**told, assistant_model=draft), wanted)
        assert torch.equal(target.generate(**told, assistant_model=draft, past_key_values=cache), wanted)
        longer = {"input_ids": torch.cat([wanted, random_ids(9, seed + 50)], 1), "max_new_tokens": 12}
        answer = target.generate(**longer)
        assert torch.equal(target.generate(**longer, assistant_model=draft, past_key_values=cache), answer)
        tokens += 2 * (wanted.shape[1] - 30 - seed) + answer.shape[1] - longer["input_ids"].shape[1]  # type: ignore[attr-defined]
    stats = speculation_stats(draft)
    assert stats.rounds - 12 <= stats.committed - stats.accepted <= stats.rounds  # an answer may end with its draft
    assert tokens - 24 <= stats.committed <= tokens - 12  # the first is not drafted, nor one that is left to an answer
    assert sum(stats.histogram.values()) == stats.rounds
    assert stats.acceptance > 0.2


WAYS = [
    {"max_new_tokens": 1},
    {"max_new_tokens": 2},
    {"min_new_tokens": 8, "max_new_tokens": 9},
    {"max_new_tokens": 12, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("told", WAYS, ids=str)
def test_ways_of_generating(told: dict[str, Any]) -> None:
    target, draft = pair()
    for seed in range(6):
        inputs = as_inputs(random_ids(20, seed))
        assert torch.equal(target.generate(**inputs, **told, assistant_model=draft), target.generate(**inputs, **told))


def test_an_end_within_a_draft() -> None:
    """Nothing comes behind it, and nothing is drafted on from it."""
    target, draft = pair(schedule="constant", num_assistant_tokens=12)
    inputs = as_inputs(random_ids(20, 3))
    plain = target.generate(**inputs, max_new_tokens=20)[0, 20:].tolist()
    ends = 0
    for token in dict.fromkeys(plain):
        told = {**inputs, "max_new_tokens": 20, "eos_token_id": token}
        wanted = target.generate(**told)
        assert torch.equal(target.generate(**told, assistant_model=draft), wanted)
        ends += wanted.shape[1] < 40
    assert ends > 3


def test_padding_and_a_confidence() -> None:
    target, draft = pair(confidence_threshold=0.3)
    ids = random_ids(20, 4)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], 1)
    told = {"input_ids": padded, "attention_mask": mask, "max_new_tokens": 12}
    assert torch.equal(target.generate(**told, assistant_model=draft), target.generate(**told))
    drafted = speculation_stats(draft).drafted
    target, bold = pair()
    target.generate(**told, assistant_model=bold)
    assert drafted <= speculation_stats(bold).drafted


@pytest.mark.slow
def test_sampling_keeps_the_distribution() -> None:
    """The first two tokens of many answers, against the probabilities that the target gives them."""
    sizes: dict[str, Any] = {
        "vocab_size": 4,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    target, draft = (
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=n, initializer_range=0.6)) for n in (2, 1)
    )
    target, draft = target.eval(), load_assistant(draft.eval(), target=target, schedule="constant")  # type: ignore[assignment]
    ids = torch.tensor([[1, 2, 3]])
    count, seen = 1500, Counter[tuple[int, ...]]()
    for _ in range(count):
        said = target.generate(
            ids, do_sample=True, top_k=0, max_new_tokens=3, eos_token_id=None, assistant_model=draft
        )
        seen[tuple(said[0, 3:5].tolist())] += 1
    with torch.no_grad():
        first = target(ids).logits[0, -1].softmax(-1)
        every = torch.stack([
            first[a] * target(torch.cat([ids, torch.tensor([[a]])], 1)).logits[0, -1].softmax(-1) for a in range(4)
        ])  # fmt: skip
    chi2 = sum((seen[a, b] - count * every[a, b].item()) ** 2 / (count * every[a, b].item())
               for a in range(4) for b in range(4))  # fmt: skip
    assert chi2 < 37.7  # 15 degrees of freedom, one in a thousand


def test_a_warm_prompt_is_warm_for_both() -> None:
    target, draft = pair()
    attach(draft, ChunkStore(draft, chunk_size=16))
    store = ChunkStore(target, chunk_size=16)
    told = {**as_inputs(random_ids(100, 7)), "max_new_tokens": 8}
    wanted = target.generate(**told)
    for warm in (False, True):
        cache = ChunkReuseCache(target, store)
        assert torch.equal(target.generate(**told, assistant_model=draft, past_key_values=cache), wanted)
        kept = last_cache(draft)
        assert kept is not None
        assert kept.report.reused_tokens >= (96 if warm else 0)
        assert cache.report.reused_tokens >= (96 if warm else 0)
        assert (kept.report.reused_tokens == 0) is not warm
    assert speculation_stats(draft).acceptance > 0.2


def test_with_streamed_layers_and_codes() -> None:
    target, plain = make_layers(5), make_layers(5)
    draft = load_assistant(make_layers(2), target=target)
    stream_except(target, (0,))
    told = {**as_inputs(random_ids(40, 2)), "max_new_tokens": 10}
    config = KVQuantConfig(exact_layers=1, window=16, sink_tokens=4)
    assert torch.equal(target.generate(**told, assistant_model=draft), plain.generate(**told))
    found, wanted = (
        model.generate(**told, past_key_values=ChunkReuseCache(model, live_quant=config), **more)
        for model, more in ((target, {"assistant_model": draft}), (plain, {}))
    )
    assert torch.equal(found, wanted)


def test_the_draft_itself_generates_as_before() -> None:
    _, draft = pair()
    told = {**as_inputs(random_ids(10, 1)), "max_new_tokens": 6}
    assert torch.equal(draft.generate(**told), noisy(make_model()).generate(**told))


def test_fewer_passes_of_the_target() -> None:
    """What it is for, counted."""
    target, tokenizer = load_embedded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draft = load_assistant(str(EMBEDDED_MODEL_DIR), target=target, schedule="constant", num_assistant_tokens=12)
    passes = [0]
    target.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    inputs = tokenizer("Maria lives in Rome. She owns the lamp. Where does Maria live?", return_tensors="pt")
    target.generate(**inputs, assistant_model=draft, max_new_tokens=24, eos_token_id=None)
    assert passes[0] <= 3
    stats = speculation_stats(draft)
    assert stats.acceptance == 1


def test_drafts_that_do_not_fit() -> None:
    target = make_model()
    other = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1))
    with pytest.raises(ValueError, match="vocabulary of its target, of 200 tokens, got 300"):
        load_assistant(other, target=target)
    with pytest.raises(ValueError, match="must be another model"):
        load_assistant(target, target=target)
    with pytest.raises(ValueError, match="`schedule` must be"):
        load_assistant(make_layers(1), target=target, schedule="clever")  # type: ignore[arg-type]
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="`num_assistant_tokens` must be 1 or more"):
            load_assistant(make_layers(1), target=target, num_assistant_tokens=wrong)  # type: ignore[arg-type]
    for given in ({"target": target}, {}):
        with pytest.raises(TypeError, match="takes 'num_assistent_tokens' only with the name of a draft"):
            load_assistant(make_layers(1), num_assistent_tokens=3, **given)
    with pytest.raises(ValueError, match="`confidence_threshold` must be"):
        load_assistant(make_layers(1), target=target, confidence_threshold=1)
    with pytest.warns(UserWarning, match="will take longer than it saves"):
        load_assistant(make_model(seed=1), target=target)
    target.config.quantization_config = {"quant_method": "awq"}
    load_assistant(make_model(seed=1), target=target)  # weights in codes are not counted
    with pytest.warns(UserWarning, match=r"in torch.float32 and its target in torch.bfloat16"):
        load_assistant(make_layers(1), target=make_layers(2).bfloat16())
    with pytest.warns(UserWarning, match="on meta and its target on cpu"):
        load_assistant(make_layers(1).to("meta"), target=make_layers(2))
    with pytest.raises(ValueError, match="must be a model that load_assistant"):
        speculation_stats(target)


@pytest.mark.parametrize("size", [193, 210])
def test_a_vocabulary_that_is_padded_otherwise(size: int) -> None:
    """As that of Qwen2.5 is, by its size."""
    target = make_model()
    inputs = {**as_inputs(random_ids(20, 3)), "max_new_tokens": 24}
    wanted = target.generate(**inputs)
    drafts = [noisy(make_model()) for _ in range(2)]
    for draft in drafts:
        draft.resize_token_embeddings(size, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is no smaller
        assistant = load_assistant(drafts[0], target=target)
    assert torch.equal(target.generate(**inputs, assistant_model=assistant), wanted)
    trees = TreeDecoding(drafts[1])
    assert torch.equal(target.generate(**inputs, custom_generate=trees), wanted)
    for each in (assistant, trees):
        assert speculation_stats(each).committed_per_round > 1.3
    assert assistant.config.vocab_size == target.config.vocab_size
    for draft in drafts:  # the caller's own
        assert draft.config.vocab_size == draft(random_ids(3)).logits.shape[-1] == size
        assert "generate" not in vars(draft)
    layers = [decoder_layers(model) for model in (assistant, drafts[0])]
    assert layers[0][0] is layers[1][0]  # no weight but those of the tables is copied
    table: Any = assistant.get_input_embeddings().weight
    assert torch.equal(table[-1], table[min(size, 200) - 1])


def test_an_attached_draft_of_another_tokenizer() -> None:
    """transformers has it read ids in two ways, the first forward of a text in one and the others in another."""
    target, tokenizer = load_embedded()
    draft = load_embedded()[0]
    inputs = {**tokenizer("Maria lives in Rome. Where does Maria live?", return_tensors="pt"), "max_new_tokens": 8}
    other = retokenize(draft, tokenizer)
    given = {"assistant_model": attach(draft), "tokenizer": tokenizer, "assistant_tokenizer": other}
    for _ in range(2):
        found = target.generate(**inputs, **given, do_sample=True, temperature=1e-4)
        assert torch.equal(found, target.generate(**inputs))
        assert "maps ids of another tokenizer" in str(last_cache(draft).report.bypass_reason)
