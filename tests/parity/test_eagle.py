"""EAGLE-3 heads from files as the field has them: their layer, the forms of files, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import CandidateGenerator

from kvboost_hf import (
    KVBoost,
    TreeDecoding,
    load_assistant,
    speculation_stats,
)
from tests.conftest import VOCAB, make_model, random_ids
from tests.eagle import make_target, save_heads, weights_of
from tests.heads import CHAINS, GREEDY, NEW, PROMPT, TREES, Rounds, watched
from tests.internals.assisted import EagleHeads, EagleSource, TextStates, lineage


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Any, Path]:
    target = make_target()
    return target, save_heads(tmp_path / "heads", weights_of(target))


def test_the_layer_is_what_its_files_mean(llama: tuple[Any, Path]) -> None:
    """Computed by hand for a whole text, and piece by piece; tokens that branch as each branch alone."""
    model, folder = llama
    heads = load_assistant(str(folder), target=model)
    assert isinstance(heads, EagleHeads)
    weights, layer = heads.state_dict(), "midlayer.self_attn."
    ids, text = PROMPT[:, :31], model(PROMPT[:, :30], output_hidden_states=True)
    hidden = torch.cat([text.hidden_states[n] for n in (2, 3, 4)], dim=-1) @ weights["fc.weight"].T
    embeds = model.get_input_embeddings()(ids[:, 1:])

    def normed(states: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(states, (64,), weights[name], 1e-6)

    both = torch.cat(
        [normed(embeds, "midlayer.input_layernorm.weight"), normed(hidden, "midlayer.hidden_norm.weight")], dim=-1
    )
    q, k, v = (both[0] @ weights[f"{layer}{each}_proj.weight"].T for each in "qkv")
    q, k, v = (each.view(30, 4, 16).transpose(0, 1) for each in (q, k, v))
    angles = torch.arange(30)[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat([each, each], dim=-1) for each in (angles.cos(), angles.sin()))
    q, k = (each * cos + torch.cat([-each[..., 8:], each[..., :8]], dim=-1) * sin for each in (q, k))
    scores = (q @ k.transpose(1, 2) / 4).masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf)
    found = (scores.softmax(-1) @ v).transpose(0, 1).reshape(1, 30, 64) @ weights[f"{layer}o_proj.weight"].T
    out = hidden + found
    inner = normed(out, "midlayer.post_attention_layernorm.weight")
    gate, up, down = (weights[f"midlayer.mlp.{each}_proj.weight"].T for each in ("gate", "up", "down"))
    out = out + (F.silu(inner @ gate) * (inner @ up)) @ down
    logits = torch.full((30, VOCAB), -torch.inf)
    logits[:, weights["t2d"]] = normed(out, "norm.weight")[0] @ weights["lm_head.weight"].T

    def continued(cuts: list[int]) -> tuple[EagleSource, torch.Tensor]:
        states = TextStates((2, 3, 4))
        made = EagleSource(heads, states, (2, 3, 4))
        for start, stop in zip([0, *cuts], [*cuts, 30], strict=True):
            states.append({n: text.hidden_states[n][:, start:stop] for n in (2, 3, 4)})
            assert made.room(stop + 1, 5) == 5
            behind = made.begin(ids[:, : stop + 1])
            assert behind is not None
            torch.testing.assert_close(behind[0], logits[stop - 1], atol=1e-4, rtol=1e-4)
        return made, behind

    for cuts in ([], [29], [7, 8, 20], [1, 2, 3]):
        made, _ = continued(cuts)
    parents, tokens = [-1, -1, 0, 1, 2, 2], [5, 9, 7, 8, 3, 4]
    tree = torch.cat([made.forward(tokens[at : at + 2], parents[at : at + 2]) for at in (0, 2, 4)])
    for node, seen in enumerate(lineage(parents)):
        alone, _ = continued([])
        path = [at for at, is_seen in enumerate(seen) if is_seen]
        for place, at in enumerate(path):
            chain = alone.forward([tokens[at]], [place - 1])
        torch.testing.assert_close(tree[node], chain[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("schedule", ["adaptive", "heuristic", "constant"])
def test_schedules(schedule: Any, llama: tuple[Any, Path]) -> None:
    model, folder = llama
    heads = load_assistant(str(folder), target=model, schedule=schedule, confidence_threshold=0.01)
    for length in (1, 2, 60):
        prompt = random_ids(length, seed=length)
        for count in (1, 2, 30):
            plain = model.generate(prompt, max_new_tokens=count, do_sample=False)
            found = model.generate(prompt, max_new_tokens=count, do_sample=False, assistant_model=heads)
            assert torch.equal(found, plain)
    stats = speculation_stats(heads)
    assert stats.committed + stats.plain >= 3 * 33


def test_forms_of_files(llama: tuple[Any, Path], tmp_path: Path) -> None:
    """Other names of weights, embeddings of their own, the target's head, named layers, and files of PyTorch."""
    model, folder = llama
    weights, rounds = weights_of(model), list[Rounds]()
    renamed = {
        f"model.{name.replace('midlayer.', 'layers.0.')}" if "." in name and "lm_head" not in name else name: each
        for name, each in weights.items()
    }
    embedded = {**weights, "embed_tokens.weight": model.get_input_embeddings().weight.data.clone()}
    whole = weights_of(model, VOCAB)
    headless = {name: each for name, each in whole.items() if name not in ("lm_head.weight", "d2t", "t2d")}
    forms: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = [
        (weights, {}),
        (renamed, {"architectures": ["Eagle3LlamaForCausalLM"]}),
        (embedded, {}),
        (weights, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}),
        (weights, {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}),
        (headless, {"draft_vocab_size": None}),
        (whole, {"draft_vocab_size": VOCAB}),
    ]
    for at, (given, changes) in enumerate(forms):
        found = load_assistant(str(save_heads(tmp_path / str(at), given, **changes)), target=model, **CHAINS)
        with watched(found) as each:
            model.generate(PROMPT, **GREEDY, assistant_model=found)
        rounds.append(each)
    for each in rounds[1:5]:
        each.assert_like(rounds[0])
    rounds[6].assert_like(rounds[5])
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = load_assistant(folder, target=model, **CHAINS)  # type: ignore[arg-type]
    with watched(found) as each:
        model.generate(PROMPT, **GREEDY, assistant_model=found)
    each.assert_like(rounds[0])


def test_heads_that_do_not_fit_are_refused(llama: tuple[Any, Path], tmp_path: Path) -> None:
    """With both numbers, and what would fit."""
    model, _ = llama
    weights = weights_of(model)
    wide = {**weights, "fc.weight": torch.zeros(64, 3 * 96)}
    cases: list[tuple[dict[str, torch.Tensor], dict[str, Any], str]] = [
        (wide, {"target_hidden_size": 96}, "read hidden states of 96 numbers, and those of their target, a Llama"),
        (weights, {"eagle_aux_hidden_state_layer_ids": [2, 9, 30]}, r"read the hidden states \[2, 9, 30\], and their"),
        (weights, {"num_hidden_layers": 2}, "must have 1 layer, got `num_hidden_layers=2`"),
        (weights, {"draft_vocab_size": 120}, "have other sizes than its configuration says"),
        ({**weights, "t2d": torch.ones(300) > 0}, {"vocab_size": 300}, "for a vocabulary of 300 tokens, and that of"),
        ({**weights, "d2t": weights["d2t"] + 100}, {}, "and that of their target, a LlamaForCausalLM, has 200"),
        (
            {name: each for name, each in weights.items() if name != "d2t"},
            {},
            r"with 150 of 200 tokens must say which these are \(`d2t`\)",
        ),
        (
            {name: each for name, each in weights.items() if name != "norm.weight"},
            {},
            r"others: none, missing: \['norm.weight'\]",
        ),
        (
            {**weights, "midlayer.self_attn.q_norm.weight": torch.ones(16)},
            {},
            r"others: \['midlayer.self_attn.q_norm.weight'\], missing: none",
        ),
    ]
    for at, (given, changes, reason) in enumerate(cases):
        with pytest.raises(ValueError, match=reason):
            load_assistant(str(save_heads(tmp_path / f"case {at}", given, **changes)), target=model)
    states = make_model("qwen3_next")
    with pytest.raises(ValueError, match="Qwen3Next"):
        load_assistant(str(save_heads(tmp_path / "states", weights)), target=states)
    other = make_target()
    load_assistant(str(save_heads(tmp_path / "fits", weights)), target=other)
    heads = load_assistant(str(save_heads(tmp_path / "other", weights)), target=model)
    for how in ({"assistant_model": heads}, {"custom_generate": TreeDecoding(heads)}):
        with pytest.raises(ValueError, match="prepared for another model than this LlamaForCausalLM"):
            other.generate(PROMPT, **GREEDY, **how)


def test_a_release_that_shows_drafts_no_hidden_states(
    llama: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains are refused with the remedy; rounds of our own go on."""
    model, folder = llama
    heads = load_assistant(str(folder), target=model)
    monkeypatch.delattr(CandidateGenerator, "requires_model_outputs")
    with pytest.raises(ValueError, match="custom_generate=TreeDecoding"):
        model.generate(PROMPT, **GREEDY, assistant_model=heads)
    plain = model.generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, **GREEDY, custom_generate=TreeDecoding(heads, TREES)), plain)


def test_the_facade_takes_a_folder(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    text = " ".join(f"w{n}" for n in PROMPT[0].tolist())
    plain = KVBoost(model, tokenizer, chat_template=False).generate(text, max_new_tokens=NEW)
    engine = KVBoost(model, tokenizer, assistant=str(folder), chat_template=False)
    for reused in (False, True):
        found = engine.generate(text, max_new_tokens=NEW)
        assert found.output_text == plain.output_text
        assert (found.kv_reuse_ratio > 0.9) == reused
    stats = engine.speculative_stats()
    assert stats is not None
    assert stats.accepted > 0
