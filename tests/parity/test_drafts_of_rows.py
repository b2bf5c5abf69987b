"""Drafts for the rows of a batch: each row says what it says under plain generate(), in fewer passes."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, StoppingCriteria, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    DraftTreeConfig,
    ReusePolicy,
    TreeDecoding,
    attach,
    detach,
    lookup_assistant,
    speculation_stats,
)
from kvboost_hf.assets import load_embedded
from tests.conftest import CHOOSES, PAD, Work, left_pad, make_model, random_ids
from tests.heads import Pair, make_pair
from tests.internals.assisted import Account, Branches, PassTimes
from tests.internals.top import Continued
from tests.parity.test_assistants import noisy

WIDE = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=40)
CHAINS = DraftTreeConfig(policy="tree", max_nodes=7)
MODELS = ["llama", "qwen2", "gpt2", "deepseek_v3", "gemma2", "mistral", "gpt_oss", "phi"]
UNEVEN = (30, 7, 19, 1, 25, 2, 30, 11)


def batch(lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of these lengths."""
    return left_pad(*(random_ids(length, seed + row) for row, length in enumerate(lengths)))


class Told:
    """A store that knows the answers, and gets some tokens wrong."""

    def __init__(self, answers: torch.Tensor, wrong: float, seed: int = 0) -> None:
        self._answers, self._wrong, self._chance = answers.tolist(), wrong, random.Random(seed)

    def continued(self, ids: Any, length: int, **_: Any) -> Continued:
        tail = np.asarray(ids)[-3:].tolist()
        for row in self._answers:
            for at in range(len(row) - len(tail)):
                if row[at : at + len(tail)] == tail:
                    said = row[at + len(tail) : at + len(tail) + length]
                    told = [token if self._chance.random() > self._wrong else token % 90 + 2 for token in said]
                    return Continued(told, [1.0] * len(told), 3)
        return Continued.nothing()


def looked_up(target: PreTrainedModel, answers: torch.Tensor, wrong: float, config: DraftTreeConfig) -> TreeDecoding:
    return TreeDecoding(lookup_assistant(target, Told(answers, wrong)), config)


@pytest.mark.parametrize("name", MODELS)
def test_tokens(name: str) -> None:
    target, trees = make_model(name), TreeDecoding(noisy(make_model(name), 0.08), WIDE)
    for lengths in ((30, 30), UNEVEN):
        told = {**batch(lengths), "max_new_tokens": 13}
        wanted = target.generate(**told)
        for cache in (None, DynamicCache(config=target.config), ChunkReuseCache(target)):
            assert torch.equal(target.generate(**told, custom_generate=trees, past_key_values=cache), wanted)
    assert speculation_stats(trees).committed_per_round > 1.5


@pytest.mark.parametrize("attention", ["eager", "kvboost_fa2"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_attention(name: str, attention: str) -> None:
    target = make_model(name)
    told = {**batch(UNEVEN), "max_new_tokens": 13}
    wanted = target.generate(**told)
    target.set_attn_implementation(attention)
    trees = looked_up(target, wanted, 0.2, CHAINS)
    for cache in (None, ChunkReuseCache(target)):
        assert torch.equal(target.generate(**told, custom_generate=trees, past_key_values=cache), wanted)
    assert speculation_stats(trees).committed_per_round > 2


def random_case(chance: random.Random, seed: int) -> tuple[dict[str, Any], float, DraftTreeConfig]:
    """Arguments of generate() with sizes around each border, the share of wrong drafts, and the trees."""
    rows = chance.choice([1, 2, 3, 5, 8])
    lengths = [chance.choice([1, 2, 3, 15, 16, 17, 24]) for _ in range(rows)]
    if chance.random() < 0.2:
        lengths = [24, *[1] * (rows - 1)]  # all padded except one
    told = {**batch(lengths, seed), "max_new_tokens": chance.choice([1, 2, 3, 7, 8, 9, 16, 21])}
    most = chance.choice([1, 2, 7, 8, 30])
    policy: Any = chance.choice(["tree", "tree", "auto"])
    return told, chance.choice([0.0, 0.1, 0.5, 1.0]), DraftTreeConfig(policy=policy, max_nodes=most)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("seed", range(8))
def test_any_batch(name: str, seed: int) -> None:
    target, chance = make_model(name), random.Random(seed)
    for turn in range(6):
        told, wrong, config = random_case(chance, 100 * seed + 10 * turn)
        free = target.generate(**told, eos_token_id=None, pad_token_id=PAD)
        new = free[:, told["input_ids"].shape[1] :]
        ends = [
            int(new[chance.randrange(len(new)), chance.randrange(new.shape[1])]) for _ in range(chance.choice([1, 2]))
        ]
        ends = [*ends, int(new[0, 1])] if new.shape[1] > 1 and chance.random() < 0.3 else ends
        told |= {"eos_token_id": chance.choice([ends, None]), "pad_token_id": PAD}
        wanted = target.generate(**told)
        trees = looked_up(target, free, wrong, config)
        store = ChunkStore(target, chunk_size=16)
        for cache in (None, ChunkReuseCache(target, store), ChunkReuseCache(target, store)):
            found = target.generate(**told, custom_generate=trees, past_key_values=cache)
            assert torch.equal(found, wanted), (seed, turn)
        store.check_consistency()
        stats = speculation_stats(trees)
        assert stats.accepted < stats.committed + 1 <= stats.accepted + stats.rounds + 1
        if (
            wrong == 0
            and config.max_nodes >= 7
            and policy_is_fixed(config)
            and wanted.shape[1] - told["input_ids"].shape[1] > 8
        ):
            assert stats.passes_per_token < 0.9


def policy_is_fixed(config: DraftTreeConfig) -> bool:
    return config.policy == "tree"


def test_fewer_passes() -> None:
    """Tokens and passes of the target are counted at its embeddings: 8 rows, of which all drafts are right."""
    target = make_model()
    told = {**batch(UNEVEN), "max_new_tokens": 25}
    wanted = target.generate(**told)
    trees = looked_up(target, wanted, 0.0, CHAINS)
    with Work(target) as work:
        assert torch.equal(target.generate(**told, custom_generate=trees), wanted)
    assert work.calls <= 8  # the prompt, and up to eight tokens of each row a pass
    stats = speculation_stats(trees)
    assert stats.committed + stats.plain == wanted[:, -25:].numel()


def test_rows_that_end_early_cost_no_pass() -> None:
    """Padding behind a row that has ended is computed with the tokens of the others, as in plain decoding."""
    target = make_model()
    told = {**batch((9, 9)), "max_new_tokens": 20, "pad_token_id": PAD}
    first, second = target.generate(**told, eos_token_id=None)[:, 9:].tolist()
    told["eos_token_id"] = next(token for token in first if token not in second)
    wanted = target.generate(**told)
    assert wanted[:, -1].tolist() == [PAD, second[-1]]
    trees = looked_up(target, wanted[:0], 0.0, CHAINS)
    target.generate(**batch((3, 2)), max_new_tokens=1, custom_generate=trees)  # tries the model once
    with Work(target) as by_itself:
        target.generate(**told)
    with Work(target) as work:
        assert torch.equal(target.generate(**told, custom_generate=trees), wanted)
    assert work.calls == by_itself.calls  # no draft was right
    told["pad_token_id"] = PAD + 1
    assert target.generate(**told, custom_generate=trees)[0, -1] == PAD + 1


def test_wrong_masks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows that see all tails, those of other rows' lengths included, say something else."""
    target = make_model()
    told = {**batch(UNEVEN), "max_new_tokens": 21}
    wanted = target.generate(**told)
    see = Branches.see

    def all_seen(self: Any, window: int, columns: int, queries: int, device: torch.device) -> Any:
        found = see(self, window, columns, queries, device)
        if found.mask is not None:
            found.mask[:] = True
        return found

    monkeypatch.setattr(Branches, "see", all_seen)
    assert not torch.equal(target.generate(**told, custom_generate=looked_up(target, wanted, 0.3, CHAINS)), wanted)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_a_cache_is_left_as_plain_decoding_leaves_it(name: str) -> None:
    """Layers and store, with a row that ends early; and a next turn begins from there."""
    target = make_model(name)
    told: dict[str, Any] = {**batch(UNEVEN), "max_new_tokens": 40, "pad_token_id": PAD}
    free = target.generate(**told, eos_token_id=None)
    told["eos_token_id"] = [int(free[2, -36]), int(free[5, -20])]
    stores = [ChunkStore(target, chunk_size=16) for _ in range(2)]
    kept = [ChunkReuseCache(target, store) for store in stores]
    trees = looked_up(target, free, 0.2, CHAINS)
    texts = [
        target.generate(**told, past_key_values=cache, **more)
        for cache, more in zip(kept, ({}, {"custom_generate": trees}), strict=True)
    ]
    assert torch.equal(*texts)
    assert kept[0].get_seq_length() == kept[1].get_seq_length() == texts[0].shape[1] - 1
    for plain, ours in zip(*(cache.layers for cache in kept), strict=True):
        assert (plain.keys - ours.keys[:, :, -plain.keys.shape[2] :]).abs().max() < 1e-4
        assert (plain.values - ours.values[:, :, -plain.values.shape[2] :]).abs().max() < 1e-4
    assert len(stores[0]) == len(stores[1]) > 3
    mask = torch.nn.functional.pad(
        told["attention_mask"], (0, texts[0].shape[1] - told["input_ids"].shape[1]), value=1
    )
    again = {"input_ids": texts[0], "attention_mask": mask, "max_new_tokens": 5}
    with Work(target) as work:
        found = target.generate(**again, past_key_values=kept[1], custom_generate=trees)
    assert torch.equal(found, target.generate(**again))
    assert work.tokens < texts[0].numel() / 2


@pytest.mark.skipif(not CHOOSES, reason="this release of transformers takes no choice of layers")
def test_hidden_states_are_kept() -> None:
    """As plain decoding keeps them, of all rows."""
    target = make_model()
    told = {**batch((20, 9, 14)), "max_new_tokens": 20}
    policy = ReusePolicy(keep_hidden_states=-1)
    caches = [ChunkReuseCache(target, policy=policy) for _ in range(2)]
    wanted = target.generate(**told, past_key_values=caches[0])
    trees = looked_up(target, wanted, 0.3, CHAINS)
    assert torch.equal(target.generate(**told, past_key_values=caches[1], custom_generate=trees), wanted)
    assert speculation_stats(trees).accepted > 10
    mask = torch.nn.functional.pad(batch((20, 9, 14))["attention_mask"], (0, wanted.shape[1] - 20), value=1)
    again: dict[str, Any] = {"input_ids": wanted, "attention_mask": mask, "return_dict_in_generate": True}
    again["max_new_tokens"] = 1
    shown, works = list[torch.Tensor](), []
    for cache in caches:
        with Work(target) as work:
            found = target.generate(**again, past_key_values=cache, output_hidden_states=-1)
        works.append(work.tokens)
        states = found.hidden_states[0]
        shown.append((states[-1] if isinstance(states, tuple) else states)[mask.bool()])
    assert works[1] == len(wanted)  # the first had a probe
    assert len(shown[0]) == int(mask.sum())
    assert torch.allclose(shown[0], shown[1], atol=1e-4)


def test_a_stock_cache_is_left_as_plain_decoding_leaves_it() -> None:
    target = make_model("gemma2")
    told = {**batch((20, 9, 14)), "max_new_tokens": 30, "return_dict_in_generate": True}
    plain = target.generate(**told)
    found = target.generate(**told, custom_generate=looked_up(target, plain.sequences, 0.2, CHAINS))
    assert torch.equal(plain.sequences, found.sequences)
    for theirs, ours in zip(plain.past_key_values.layers, found.past_key_values.layers, strict=True):
        assert theirs.get_seq_length() == ours.get_seq_length()
        shared = min(theirs.keys.shape[2], ours.keys.shape[2])
        assert (theirs.keys[:, :, -shared:] - ours.keys[:, :, -shared:]).abs().max() < 1e-4


def test_attached() -> None:
    target = make_model()
    told = {**batch((40, 33)), "max_new_tokens": 20}
    wanted = target.generate(**told)
    attach(target)
    try:
        for _ in range(2):
            assert torch.equal(target.generate(**told, custom_generate=looked_up(target, wanted, 0.3, CHAINS)), wanted)
        with Work(target) as work:
            target.generate(**told, custom_generate=looked_up(target, wanted, 0.0, CHAINS))
        assert work.tokens < 73
    finally:
        detach(target)


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 6},
        {"suppress_tokens": [5, 6, 7], "bad_words_ids": [[9, 10]]},
        {"exponential_decay_length_penalty": (3, 1.2), "renormalize_logits": True, "eos_token_id": 5},
        {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    ],
)
def test_processors(more: dict[str, Any]) -> None:
    """They see padding, as under plain generate()."""
    target = make_model()
    told = {**batch(UNEVEN), "max_new_tokens": 15, **more}
    wanted = target.generate(**told)
    for trees in (looked_up(target, wanted, 0.2, CHAINS), TreeDecoding(noisy(make_model()), WIDE)):
        assert torch.equal(target.generate(**told, custom_generate=trees), wanted)


@pytest.mark.parametrize("lengths", [(1, 30), (30, 1, 12)])
def test_new_ids_behind_padding_that_a_cache_holds(lengths: tuple[int, ...]) -> None:
    """Padding is counted among the ids that are passed: here among none of them."""
    target, told = make_model(), batch(lengths)
    trees = TreeDecoding(noisy(make_model()), WIDE)
    for rows in (slice(None), slice(0, 1), slice(1, 2)):
        ids, mask = told["input_ids"][rows], told["attention_mask"][rows]
        wanted = target.generate(ids, attention_mask=mask, max_new_tokens=15, eos_token_id=None)
        for cache in (ChunkReuseCache(target), DynamicCache(config=target.config)):
            more: dict[str, Any] = {"past_key_values": cache, "eos_token_id": None}
            first = target.generate(ids, attention_mask=mask, max_new_tokens=3, **more)
            more["attention_mask"] = torch.nn.functional.pad(mask, (0, 3), value=1)
            found = target.generate(first[:, -1:], max_new_tokens=12, custom_generate=trees, **more)
            assert torch.equal(found[:, 1:], wanted[:, -12:])


def test_stop_strings() -> None:
    model, tokenizer = load_embedded()
    tokenizer.padding_side = "left"
    asked = ["Maria lives in Rome. Where does Maria live?", "Tom owns the red lamp and the book. What does Tom own?"]
    told = {**tokenizer(asked, return_tensors="pt", padding=True), "max_new_tokens": 20}
    wanted = model.generate(**told)
    stop = {"stop_strings": tokenizer.decode(wanted[0, told["input_ids"].shape[1] + 1]), "tokenizer": tokenizer}
    expected = model.generate(**told, **stop)
    trees = looked_up(model, wanted, 0.1, CHAINS)
    assert torch.equal(model.generate(**told, **stop, custom_generate=trees), expected)


def test_sampling_keeps_the_distribution() -> None:
    """Of 64 rows with the same prompt, over some calls, the shares of first and second tokens."""
    target = make_model()
    told = {"input_ids": random_ids(9, 3), "do_sample": True, "top_k": 4, "max_new_tokens": 3, "temperature": 0.7}
    trees = TreeDecoding(noisy(make_model(), 0.1), DraftTreeConfig(policy="tree", depth=2, max_nodes=6))
    shares = []
    for more in ({}, {"custom_generate": trees}):
        counts = torch.zeros(2, target.config.vocab_size)
        for seed in range(8):
            torch.manual_seed(seed)
            found = target.generate(**told, **more, num_return_sequences=64, eos_token_id=None, pad_token_id=PAD)
            for place in range(2):
                counts[place] += torch.bincount(found[:, 10 + place], minlength=target.config.vocab_size)
        shares.append(counts / counts.sum(-1, keepdim=True))
    assert (shares[0] - shares[1]).abs().max() < 0.09
    assert speculation_stats(trees).accepted > 100


def joint_shares(model: PreTrainedModel, prompt: torch.Tensor, count: int, likeliest: int) -> Any:
    """Chances of all answers of some tokens to one prompt, by the answer, from forwards without a cache."""
    shares = {(): 1.0}
    for _ in range(count):
        texts = torch.cat([prompt.expand(len(shares), -1), torch.tensor(list(shares)).long()], dim=1)
        logits, ids = model(texts).logits[:, -1].detach().topk(likeliest)
        chances = logits.double().softmax(-1)
        shares = {
            (*said, token): share * chance
            for (said, share), each, found in zip(shares.items(), ids.tolist(), chances.tolist(), strict=True)
            for token, chance in zip(each, found, strict=True)
        }
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("kind", ["llama", "eagle", "glm4_moe"])
def test_answers_of_sampled_rows_are_as_likely_as_they_should_be(
    kind: str, is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of all answers of 4 tokens to 3 prompts. Drafts that are taken twice as often show in it."""
    pair = make_pair(kind, tmp_path) if kind != "llama" else Pair(make_model(), noisy(make_model(), 0.05))
    model, config = pair.model, DraftTreeConfig(policy="tree", depth=3, width=2, branching=2, max_nodes=8)
    prompts = [random_ids(length, seed=length) for length in (9, 4, 14)]
    told = {"do_sample": True, "top_k": 2, "max_new_tokens": 4, "num_return_sequences": 96}
    if is_wrong:
        forward = Branches.forward

        def off(self: Any, tokens: Any, parents: Any) -> torch.Tensor:
            logits = forward(self, tokens, parents)
            for row, (drafts, behind) in enumerate(zip(tokens, parents, strict=True)):
                for node in range(1, len(drafts)):
                    found = logits[row, behind[node]]
                    found[drafts[node]] += 0.7 * (drafts[node] in found.topk(2).indices)
            return logits

        monkeypatch.setattr(Branches, "forward", off)
    trees, answers = TreeDecoding(pair.heads, config), []
    for seed in range(4):
        torch.manual_seed(seed)
        found = model.generate(
            **left_pad(*prompts), **told, custom_generate=trees, eos_token_id=None, pad_token_id=PAD
        )
        answers.append(found[:, -4:].reshape(len(prompts), -1, 4))
    assert speculation_stats(trees).accepted > 100
    total, cells = 0.0, 0
    for prompt, said in zip(prompts, torch.cat(answers, dim=1), strict=True):
        shares = joint_shares(model, prompt, 4, 2)
        counts = Counter(map(tuple, said.tolist()))
        assert set(counts) <= set(shares)
        for answer, share in shares.items():
            total += (counts[answer] - share * len(said)) ** 2 / (share * len(said))
        cells += len(shares) - 1
    assert cells == 45
    assert (total > 88) == is_wrong  # by chance once in 10,000 times


def test_scores_and_logits() -> None:
    """Of each token of each row, as plain generate() returns them; zeros behind the end of a row."""
    target = make_model()
    told = {**batch(UNEVEN), "max_new_tokens": 12, "temperature": 0.5, "repetition_penalty": 1.2, "pad_token_id": PAD}
    free = target.generate(**told)
    told["eos_token_id"] = int(free[1, -8])
    told |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = target.generate(**told)
    found = target.generate(**told, custom_generate=looked_up(target, free, 0.2, CHAINS))
    assert torch.equal(found.sequences, plain.sequences)
    new = found.sequences[:, -len(plain.scores) :]
    assert len(found.scores) == len(found.logits) == len(plain.scores)
    for name in ("scores", "logits"):
        for step, (ours, theirs) in enumerate(zip(found[name], plain[name], strict=True)):
            for row in range(len(new)):
                if told["eos_token_id"] in new[row, :step]:
                    assert not ours[row].any()
                else:
                    assert torch.allclose(ours[row], theirs[row], atol=1e-4)


def test_a_seed_gives_the_same_answers_whatever_is_drafted() -> None:
    target = make_model()
    told: dict[str, Any] = {**batch(UNEVEN), "max_new_tokens": 12, "do_sample": True}
    torch.manual_seed(3)
    first = target.generate(**told, custom_generate=looked_up(target, told["input_ids"], 0.0, CHAINS))
    torch.manual_seed(3)
    other = target.generate(**told, custom_generate=looked_up(target, first, 1.0, CHAINS))
    torch.manual_seed(4)
    assert torch.equal(first, other)
    assert not torch.equal(first, target.generate(**told, custom_generate=looked_up(target, first, 0.0, CHAINS)))


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_states_are_decoded_without_drafts(name: str, caplog: pytest.LogCaptureFixture) -> None:
    target = make_model(name)
    told = {**batch((20, 9, 14)), "max_new_tokens": 12}
    wanted = target.generate(**told)
    trees = TreeDecoding(lookup_assistant(target))
    for cache in (None, ChunkReuseCache(target), DynamicCache(config=target.config)):
        assert torch.equal(target.generate(**told, custom_generate=trees, past_key_values=cache), wanted)
    assert "keeps states" in caplog.text


class _Processor(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class _Criterion(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _Streamer(BaseStreamer):
    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def test_what_cannot_be_done_is_said() -> None:
    target = make_model()
    told = {**batch((8, 5)), "max_new_tokens": 4}
    trees = TreeDecoding(lookup_assistant(target))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"logits_processor": [_Processor()]}, "_Processor"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [row + 2]}, "PrefixConstrained"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFree"),
        ({"stopping_criteria": [_Criterion()]}, "_Criterion"),
        ({"max_time": 1.0}, "MaxTime"),
        ({"streamer": _Streamer()}, "streamer"),
        ({"stop_strings": "a", "tokenizer": load_embedded()[1], "eos_token_id": None}, "eos_token_id"),
        ({"num_beams": 2}, "num_beams"),
    ]
    for more, named in refused:
        with pytest.raises(ValueError, match=named):
            target.generate(**told, **more, custom_generate=trees)


class _Clock:
    """Time passes with the tokens that the target computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("wrong", [1.0, 0.9, 0.5, 0.0])
@pytest.mark.parametrize("per_token", [0.0, 0.02, 0.125, 0.5])
def test_never_two_percent_slower(wrong: float, per_token: float) -> None:
    """On a clock by which a pass takes 1 s, and so much more for each token beyond one of each row."""
    target, clock = make_model(), _Clock()
    told = {**batch((12, 4, 9, 12)), "max_new_tokens": 60, "eos_token_id": None, "pad_token_id": PAD}
    wanted = target.generate(**told)

    def charge(_: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
        clock.now += 1.0 + per_token * (out.shape[0] * (out.shape[1] - 1))

    trees = TreeDecoding(lookup_assistant(target, Told(wanted, wrong)), clock=clock)
    hook = target.get_input_embeddings().register_forward_hook(charge)
    try:
        target.generate(**batch((3, 2)), max_new_tokens=1, custom_generate=trees)  # tries the model once
        clock.now = 0.0
        target.generate(**told)
        plain = clock.now
        for _ in range(3):
            clock.now = 0.0
            assert torch.equal(target.generate(**told, custom_generate=trees), wanted)
            assert clock.now <= 1.02 * plain
        if wrong == 0 and per_token < 0.1:
            assert clock.now < 0.5 * plain
    finally:
        hook.remove()


def test_a_row_without_drafts_is_not_held_up() -> None:
    """Columns of drafts that bring one row forward, but not the last one, are paid for 16 tokens long at most."""
    times = PassTimes()
    for columns, seconds in ((0, 1.0), (2, 1.2), (4, 1.4)):
        times.learn(2, columns, seconds)
    account = Account(times, 2, 1000)
    sure = [[1.0] * 4, []]
    account.note(4, 8, 0.0, 1.4)  # has gained time
    assert account.columns(sure, [10, 10]) == 4
    assert account.columns(sure, [30, 10]) == 0
    assert account.columns(sure, [10, 30]) == 4
