"""EAGLE-3 heads from files as the field has them: chains and trees, over no cache, a cold and a warm one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    DraftTreeConfig,
    KVBoost,
    TreeDecoding,
    attach,
    check_model_compatibility,
    last_cache,
    load_assistant,
    speculation_stats,
)
from kvboost_hf.assets import load_embedded
from tests.conftest import VOCAB, counted, make_model, random_ids
from tests.eagle import DRAFTED, TARGETS, make_target, save_heads, weights_of
from tests.internals.assisted import EagleHeads, EagleSource, TextStates, lineage
from tests.internals.cache import HiddenStates

PROMPT = random_ids(150, seed=3)
NEW = 40
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
TREES = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=20)
CHAINS: dict[str, Any] = {"schedule": "constant", "num_assistant_tokens": 4}


class Rounds:
    """What heads have computed in one call: the tokens that each step was given, and hidden states of the text."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.states: list[torch.Tensor] = []

    def assert_like(self, other: "Rounds") -> None:
        assert self.tokens == other.tokens
        for ours, theirs in zip(self.states, other.states, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@contextmanager
def watched() -> Iterator[Rounds]:
    rounds, forward, fused = Rounds(), EagleHeads.forward, EagleHeads.fused

    def noted(self: EagleHeads, input_ids: torch.Tensor, **given: Any) -> Any:
        rounds.tokens.append(input_ids[0].tolist())
        return forward(self, input_ids, **given)

    def shown(self: EagleHeads, states: Any) -> torch.Tensor:
        rounds.states.append(torch.cat(list(states), dim=-1))
        return fused(self, states)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EagleHeads, "forward", noted)
        patched.setattr(EagleHeads, "fused", shown)
        yield rounds


@pytest.fixture(params=list(TARGETS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A target, and a folder with heads for it."""
    target = make_target(request.param)
    check_model_compatibility(target)
    return target, save_heads(tmp_path / "heads", weights_of(target))


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


def test_chains(pair: tuple[Any, Path]) -> None:
    """The tokens of plain generate(), warm as cold, and one token of a known prompt forwarded."""
    model, folder = pair
    heads, store = load_assistant(str(folder), target=model, **CHAINS), ChunkStore(model, chunk_size=32)
    plain = model.generate(PROMPT, **GREEDY)
    with watched() as stock, counted(model) as work:
        assert torch.equal(model.generate(PROMPT, **GREEDY, assistant_model=heads), plain)
    cold, accepted = work.tokens, speculation_stats(heads).accepted
    assert 0 < accepted < speculation_stats(heads).drafted
    for computed in (150, 1, "attached"):
        cache = ChunkReuseCache(model, store) if computed != "attached" else None
        if cache is None:
            attach(model, store)
        given = {"past_key_values": cache} if cache is not None else {}
        before = speculation_stats(heads).accepted
        with watched() as rounds, counted(model) as work:
            assert torch.equal(model.generate(PROMPT, **GREEDY, **given, assistant_model=heads), plain)
        rounds.assert_like(stock)
        assert speculation_stats(heads).accepted - before == accepted
        used = cache or last_cache(model)
        assert used is not None
        assert used.report.bypass_reason is None
        assert used.report.forwarded_tokens == (1 if cache is None else computed)
        assert cold - work.tokens == 150 - used.report.forwarded_tokens
    known = set(heads.targets.tolist())
    assert len(known) == DRAFTED
    drafted = {token for step in stock.tokens if len(step) == 1 for token in step}
    assert drafted <= known | set(plain[0].tolist())


def test_trees(pair: tuple[Any, Path]) -> None:
    """More tokens a pass than chains of the same heads; warm as cold; and the cache as plain decoding leaves it."""
    model, folder = pair
    heads, store = load_assistant(str(folder), target=model, **CHAINS), ChunkStore(model, chunk_size=32)
    plain, seen = model.generate(PROMPT, **GREEDY), list[tuple[Rounds, Any]]()
    for computed in (None, 150, 1):
        trees = TreeDecoding(heads, TREES)
        cache = ChunkReuseCache(model, store) if computed is not None else None
        given = {"past_key_values": cache} if cache is not None else {}
        with watched() as rounds:
            assert torch.equal(model.generate(PROMPT, **GREEDY, **given, custom_generate=trees), plain)
        seen.append((rounds, trees.stats))
        if cache is not None:
            assert (cache.report.forwarded_tokens, cache.report.bypass_reason) == (computed, None)
            again = cache.fork()
            text = torch.cat([plain, random_ids(3, seed=1)], dim=1)
            assert torch.equal(model.generate(text, **GREEDY, past_key_values=again), model.generate(text, **GREEDY))
            assert again.report.forwarded_tokens <= 4
    for rounds, stats in seen[1:]:
        rounds.assert_like(seen[0][0])
        assert (stats.accepted, stats.drafted, stats.rounds) == tuple(
            getattr(seen[0][1], name) for name in ("accepted", "drafted", "rounds")
        )
    attach(model, store)
    with watched() as rounds:
        assert torch.equal(model.generate(PROMPT, **GREEDY, custom_generate=TreeDecoding(heads, TREES)), plain)
    rounds.assert_like(seen[0][0])
    used = last_cache(model)
    assert used is not None
    assert used.report.forwarded_tokens == 1
    chains = TreeDecoding(heads, DraftTreeConfig(policy="tree", depth=4, width=1, branching=1))
    model.generate(PROMPT, **GREEDY, custom_generate=chains)
    assert seen[0][1].committed_per_round >= chains.stats.committed_per_round > 1
    assert store.check_integrity().wrong == 0


def test_hidden_states_of_the_prompt_matter(llama: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would show little: without what was kept, other tokens are drafted."""
    model, folder = llama
    store, view, drafts = ChunkStore(model, chunk_size=32), HiddenStates.view, list[Any]()
    weights = weights_of(model)
    weights["fc.weight"] *= 20
    heads = load_assistant(str(save_heads(folder, weights)), target=model, **CHAINS)
    for zeroed in (False, False, True):
        if zeroed:
            monkeypatch.setattr(HiddenStates, "view", lambda *args: 0 * view(*args))
        with watched() as rounds:
            cache = ChunkReuseCache(model, store)
            found = model.generate(PROMPT, **GREEDY, assistant_model=heads, past_key_values=cache)
        assert torch.equal(found, model.generate(PROMPT, **GREEDY))
        drafts.append(rounds)
    drafts[1].assert_like(drafts[0])
    assert drafts[2].tokens != drafts[0].tokens


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


class _AtMost(StoppingCriteria):
    """Ends a text at a length that transformers does not know."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= PROMPT.shape[1] + 7)


def test_what_ends_texts(llama: tuple[Any, Path]) -> None:
    """Stop strings, criteria of a user's own, and tokens that end a text, in the middle of what is drafted."""
    model, folder = llama
    tokenizer = load_embedded()[1]
    plain = model.generate(PROMPT, **GREEDY)[0, 150:].tolist()
    asked: list[dict[str, Any]] = [
        {"stop_strings": [tokenizer.decode(plain[6:8])], "tokenizer": tokenizer},
        {"stopping_criteria": StoppingCriteriaList([_AtMost()])},
        {"eos_token_id": plain[7], "pad_token_id": 0},
    ]
    for given in asked:
        heads = load_assistant(str(folder), target=model, **CHAINS)
        expected = model.generate(PROMPT, **GREEDY, **given)
        assert expected.shape[1] < 150 + NEW
        for how in ({"assistant_model": heads}, {"custom_generate": TreeDecoding(heads, TREES)}):
            assert torch.equal(model.generate(PROMPT, **GREEDY, **given, **how), expected)


def test_sampling_and_padding(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    heads, store = load_assistant(str(folder), target=model, **CHAINS), ChunkStore(model, chunk_size=32)
    seen = []
    for cache in (None, ChunkReuseCache(model, store), ChunkReuseCache(model, store)):
        torch.manual_seed(5)
        given = {"past_key_values": cache} if cache is not None else {}
        seen.append(model.generate(PROMPT, max_new_tokens=NEW, do_sample=True, assistant_model=heads, **given))
    assert torch.equal(seen[1], seen[0])
    assert torch.equal(seen[2], seen[0])
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), PROMPT], dim=1)
    mask = (torch.arange(159) >= 9)[None].long()
    plain = model.generate(padded, **GREEDY, attention_mask=mask)
    for how in ({"assistant_model": heads}, {"custom_generate": TreeDecoding(heads, TREES)}):
        with watched() as rounds:
            assert torch.equal(model.generate(padded, **GREEDY, attention_mask=mask, **how), plain)
        assert rounds.tokens[0] == [*PROMPT[0, 1:].tolist(), int(plain[0, 159])]


def test_what_fails_in_the_middle_of_a_draft_leaves_nothing_wrong(
    llama: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = llama
    heads, store = load_assistant(str(folder), target=model, **CHAINS), ChunkStore(model, chunk_size=32)
    plain, forward, cache = model.generate(PROMPT, **GREEDY), EagleHeads.forward, ChunkReuseCache(model, store)
    for how in ({"assistant_model": heads}, {"custom_generate": TreeDecoding(heads, TREES)}):
        for fails_at in (0, 1, 6):
            calls = [0]

            def failing(*args: Any, calls: Any = calls, at: int = fails_at, **given: Any) -> Any:
                calls[0] += 1
                if calls[0] > at:
                    raise KeyboardInterrupt
                return forward(*args, **given)

            with monkeypatch.context() as patched:
                patched.setattr(EagleHeads, "forward", failing)
                with pytest.raises(KeyboardInterrupt):
                    model.generate(PROMPT, **GREEDY, **how, past_key_values=cache)
            for use in (cache, ChunkReuseCache(model, store)):
                assert torch.equal(model.generate(PROMPT, **GREEDY, **how, past_key_values=use), plain)
    assert store.check_integrity().wrong == 0


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
        with watched() as each:
            model.generate(PROMPT, **GREEDY, assistant_model=found)
        rounds.append(each)
    for each in rounds[1:5]:
        each.assert_like(rounds[0])
    rounds[6].assert_like(rounds[5])
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = load_assistant(folder, target=model, **CHAINS)  # type: ignore[arg-type]
    with watched() as each:
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
