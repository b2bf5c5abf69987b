"""What several rows of one call begin with is computed once, and every row gets what plain generate() gives."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedModel, pipeline

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVQuantConfig,
    ReusePolicy,
    attach,
    check_model_compatibility,
    detach,
    last_cache,
)
from tests.architectures.models import make_architecture
from tests.conftest import EOS, as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.cache import PiecedLayer
from tests.internals.compat import padding_reason, steps_reason
from tests.internals.top import handles

CHUNK = 32
HEAD, *TAILS = [random_ids(n, seed=n) for n in (321, 90, 91, 92, 93)]
STATES = ["qwen3_5_text", "nemotron_h", "mamba2", "lfm2", "kimi_linear", "granitemoehybrid", "olmo_hybrid", "zamba2"]
MODELS = ["llama", "gpt2", "bloom", "deepseek_v3", "mistral", "gemma2", "qwen3_next", "falcon_h1"]


def join(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    return model.generate(
        **inputs, **{"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True, **kwargs}
    )


def alone(model: PreTrainedModel, inputs: dict[str, torch.Tensor], step: int, **mode: Any) -> torch.Tensor:
    """The logits of each row at a step, without the others and their padding [rows, vocab]."""
    rows = [ids[keep.bool()] for ids, keep in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    return torch.cat([generate(model, as_inputs(row[None]), **mode).logits[step] for row in rows])


def check(model: PreTrainedModel, cache: ChunkReuseCache, inputs: dict[str, torch.Tensor], **mode: Any) -> int:
    """Parity with plain generate(); returns prompt tokens that were really forwarded, padding included."""
    with counted(model) as plain_work:
        plain = generate(model, inputs, **mode)
    with counted(model) as work:
        found = generate(model, inputs, past_key_values=cache, **mode)
    assert torch.equal(plain.sequences, found.sequences)
    for step, (expected, logits) in enumerate(zip(plain.logits, found.logits, strict=True)):
        if not torch.allclose(logits, expected, atol=5e-4, rtol=5e-4):  # states beside padding err, too
            expected = alone(model, inputs, step, **mode)
        torch.testing.assert_close(logits, expected, atol=5e-4, rtol=5e-4)
    report = cache.report
    assert report.bypass_reason is None
    assert report.prompt_tokens == report.reused_tokens + report.forwarded_tokens
    assert sum(report.row_tokens) == report.reused_tokens
    assert min(report.row_tokens) >= 0
    prompt = inputs["input_ids"].numel() * (mode.get("num_return_sequences") or mode.get("num_beams") or 1)
    return work.tokens - (plain_work.tokens - prompt)


def make(name: str) -> PreTrainedModel:
    model = make_model(name)
    check_model_compatibility(model)  # a probe forwards tokens of its own
    padding_reason(model)
    return model


def tree_tokens(rows: list[list[int]]) -> int:
    """Tokens of the tree of all distinct prefixes."""
    return len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvboost_fa2"])
@pytest.mark.parametrize(
    "mode",
    [{"do_sample": True, "num_return_sequences": 4}, {"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 4}],
    ids=["samples", "beams", "all beams"],
)
def test_a_prompt_is_computed_once_for_all_its_samples(mode: dict[str, Any], attention: str) -> None:
    model = make("llama")
    model.set_attn_implementation(attention)
    torch.manual_seed(3)
    plain = generate(model, as_inputs(HEAD), **mode)
    torch.manual_seed(3)
    cache = ChunkReuseCache(model)
    found = generate(model, as_inputs(HEAD), past_key_values=cache, **mode)
    assert torch.equal(found.sequences, plain.sequences)
    report = cache.report
    assert (report.prompt_tokens, report.forwarded_tokens) == (4 * 321, 320 + 4)
    assert report.tier_tokens["batch"] == 3 * 320
    assert report.row_tokens == (0, 320, 320, 320)


@pytest.mark.parametrize("name", MODELS)
class TestModels:
    def test_equal_rows(self, name: str) -> None:
        model = make(name)
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
        assert check(model, cache, as_inputs(HEAD.expand(4, -1))) == 320 + 4
        # The store has it now, states included: a prompt that goes on computes what is new.
        fresh = ChunkReuseCache(model, cache.store)
        assert check(model, fresh, as_inputs(join(HEAD, TAILS[0]).expand(3, -1))) <= 3 + 90 + 2 * CHUNK

    def test_groups_of_equal_rows_with_padding(self, name: str) -> None:
        model = make(name)
        if name == "bloom":
            pytest.skip("its padding is refused by the probe of this tiny one")
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
        prompts = [HEAD, join(TAILS[0], TAILS[1]), join(TAILS[2], HEAD[:, :100])]
        rows = [prompt for prompt in prompts for _ in range(3)]
        work = check(model, cache, left_pad(*rows))
        most = 320 + 320 + 320 if name in ("qwen3_next", "falcon_h1") else 320 + 180 + 191
        assert work <= most + 9 + 3 * 2 * CHUNK

    def test_a_common_head(self, name: str) -> None:
        model = make(name)
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
        rows = torch.cat([join(HEAD, tail[:, :40]) for tail in TAILS])
        work = check(model, cache, as_inputs(rows))
        assert work <= 321 + 4 * 40 + (4 * CHUNK if name in ("qwen3_next", "falcon_h1") else 0)


class TestShapes:
    def test_a_head_in_front_of_tails_of_different_lengths(self) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model))
        rows = [join(HEAD, tail[:, :n]) for tail, n in zip(TAILS, (5, 60, 33, 80), strict=True)]
        assert check(model, cache, left_pad(*rows)) == 321 + 4 * 80

    def test_a_tree(self) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model))
        rows = [join(HEAD, TAILS[q], TAILS[a][:, :3]) for q in (0, 1, 2) for a in (3, 2, 1, 0)]
        assert check(model, cache, left_pad(*rows)) == 321 + 3 * 92 + 12 * 3  # the shorter questions with padding

    def test_an_outsider_among_equal_rows(self) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model))
        rows = [HEAD, HEAD, join(TAILS[0], TAILS[1], TAILS[2]), HEAD]
        width = max(row.shape[1] for row in rows)
        assert check(model, cache, left_pad(*rows)) <= (width - 1) + 320 + 4

    def test_what_the_store_has_is_not_computed(self) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
        generate(model, as_inputs(HEAD[:, :200]), past_key_values=cache)
        cache.reset()
        rows = torch.cat([join(HEAD, TAILS[0])] * 3)
        assert check(model, cache, as_inputs(rows)) == 321 + 90 - 200 - 1 + 3
        assert cache.report.tier_tokens == {"live": 0, "ram": 600, "batch": 2 * 210}

    def test_behind_what_the_cache_holds(self) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
        first = generate(model, as_inputs(HEAD.expand(3, -1)), past_key_values=cache).sequences
        rows = join(first, TAILS[0].expand(3, -1))
        work = check(model, cache, as_inputs(rows))
        assert work <= 1 + 90 + 3
        assert cache.report.tier_tokens["live"] >= 3 * 321

    def test_in_pieces_of_a_prompt(self) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
        inputs = as_inputs(HEAD.expand(4, -1))
        plain = generate(model, inputs, prefill_chunk_size=100)
        with counted(model) as work:
            found = generate(model, inputs, past_key_values=cache, prefill_chunk_size=100)
        assert torch.equal(found.sequences, plain.sequences)
        # The last token of each piece is computed for each row; the last piece is too short to be worth a forward.
        assert work.tokens - 4 * 3 == 3 * (99 + 4) + 4 * 21

    def test_short_beginnings_are_not_worth_a_forward(self) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model))
        with counted(model) as work:
            generate(model, as_inputs(join(HEAD[:, :20].expand(3, -1), random_ids(60, seed=9, batch=3))),
                     past_key_values=cache, max_new_tokens=1)  # fmt: skip
        assert (work.calls, work.tokens) == (1, 240)

    def test_one_token_prompts_and_rows_that_end_early(self) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model), ReusePolicy(min_prefill_saving=0))
        check(model, cache, as_inputs(HEAD[:, :1].expand(4, -1)))
        check(model, cache, left_pad(HEAD[:, :1], HEAD[:, :2], HEAD[:, :2], HEAD[:, :50], HEAD[:, :50]))

    @given(st.data())
    @settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
    def test_any_tree(self, data: st.DataObject) -> None:
        """Rows cut from few texts, with one cache, so that cold, stored and live parts come together."""
        model = make_model(data.draw(st.sampled_from(["llama", "gemma2", "qwen3_next"])))
        if data.draw(st.booleans()):
            model.set_attn_implementation("kvboost_fa2")
        saving = data.draw(st.sampled_from([0, 8, 64]))
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16), ReusePolicy(min_prefill_saving=saving))
        texts = [random_ids(80, seed=seed) for seed in range(3)]
        for _ in range(2):
            rows = []
            for _ in range(data.draw(st.integers(1, 6))):
                cuts = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), min_size=1, max_size=3))
                rows.append(join(*(texts[text][:, :length] for text, length in cuts)))
            check(model, cache, left_pad(*rows), max_new_tokens=2)


class TestCompositions:
    def test_pieces_are_shared_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(handles._readers, "a test", lambda kind, device: True)
        model = make("llama")
        model.set_attn_implementation("kvboost_fa2")
        cache = ChunkReuseCache(model, ChunkStore(model, max_bytes=40_000, chunk_size=32))
        check(model, cache, as_inputs(HEAD.expand(4, -1)))
        for layer in cache.layers:
            assert isinstance(layer, PiecedLayer)
            assert layer._table is not None
            assert len(layer._table.keys) == 1  # one tensor for four rows
            assert layer._table.keys[0].shape[1] == 320

    def test_with_a_store_that_is_too_small_for_it(self) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model, max_bytes=40_000, chunk_size=32))
        assert check(model, cache, as_inputs(HEAD.expand(4, -1))) == 324

    @pytest.mark.daily
    @pytest.mark.parametrize(
        "options",
        [{"max_cache_len": 400}, {"live_quant": KVQuantConfig(method="kivi", key_bits=8, value_bits=8)}],
        ids=str,
    )
    def test_other_layers(self, options: dict[str, Any]) -> None:
        model = make("llama")
        cache = ChunkReuseCache(model, ChunkStore(model), **options)
        inputs = as_inputs(HEAD.expand(4, -1))
        plain = generate(model, inputs)
        found = generate(model, inputs, past_key_values=cache)
        assert torch.equal(found.sequences, plain.sequences)
        assert cache.report.forwarded_tokens == 324

    def test_attached_pipelines(self) -> None:
        from kvboost_hf.assets import load_embedded

        model, tokenizer = load_embedded()
        tokenizer.padding_side = "left"
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        head = "The lamp is red. " * 30
        texts = [head + question for question in ("The box is blue.", "The cup is on the old table.", "A", "The")]
        config = GenerationConfig(max_new_tokens=4, do_sample=False)
        plain = pipe(texts, batch_size=4, generation_config=config)
        attach(model, ChunkStore(model))
        with counted(model) as work:
            found = pipe(texts, batch_size=4, generation_config=config)
        report = last_cache(model).report
        detach(model)
        assert found == plain
        assert report.tier_tokens["batch"] > 2.5 * len(tokenizer(head)["input_ids"])
        assert work.tokens < 0.5 * report.prompt_tokens

    def test_a_store_that_has_been_filled_by_one_call_serves_the_next(self) -> None:
        model = make("llama")
        store = ChunkStore(model, chunk_size=CHUNK)
        check(model, ChunkReuseCache(model, store), as_inputs(HEAD.expand(4, -1)))
        fresh = ChunkReuseCache(model, store)
        check(model, fresh, as_inputs(join(HEAD[:, :288], TAILS[0])))
        assert fresh.report.tier_tokens == {"live": 0, "ram": 288}

    def test_audits_check_it(self) -> None:
        model = make("llama")
        policy = ReusePolicy(audit_rate=1.0)
        cache = ChunkReuseCache(model, ChunkStore(model), policy)
        check(model, cache, as_inputs(HEAD.expand(4, -1)))
        assert cache.report.audit_tokens == 4 * 321
        assert cache.store.stats()["divergences"] == 0

    def test_negative_control(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the K/V of another row the answers are wrong: the comparison above can fail."""
        from tests.internals.cache import StemReader

        read = StemReader.layer
        monkeypatch.setattr(StemReader, "layer", lambda self, idx: tuple(0.5 * each for each in read(self, idx) or ()))
        model = make("llama")
        with pytest.raises(AssertionError):
            check(model, ChunkReuseCache(model, ChunkStore(model)), as_inputs(HEAD.expand(4, -1)))


def test_counts_of_a_random_tree() -> None:
    """Where all tails have one length, exactly the tree is computed, but for the last token of each row."""
    draw = np.random.default_rng(0)
    model = make("llama")
    for _ in range(3):
        heads = [draw.integers(2, EOS, 100).tolist() for _ in range(2)]
        middles = [draw.integers(2, EOS, 70).tolist() for _ in range(3)]
        rows = [head + middle + [5, 6, 7] for head in heads for middle in middles for _ in range(2)]
        cache = ChunkReuseCache(model, ChunkStore(model), ReusePolicy(min_prefill_saving=0))
        work = check(model, cache, as_inputs(torch.tensor(rows)))
        leaves = 6
        assert work == tree_tokens(rows) - leaves + len(rows)


@pytest.mark.parametrize("name", STATES)
def test_unequal_rows_with_states(name: str) -> None:
    """Cold rows that begin alike compute the tree of their prefixes; when they have grown, mostly what is new."""
    model = make_architecture(name)
    # Where single tokens leave other states than a prompt, they have other logits, too: the last token may be one.
    allowed = 1e-3 if steps_reason(model) is None else 5e-3
    for seed in range(2):
        draw = random.Random(seed)
        heads = [random_ids(draw.randint(150, 250), seed=100 * seed + n) for n in range(2)]
        tails = [random_ids(draw.randint(1, 60), seed=100 * seed + 10 + n) for n in range(5)]
        rows = [join(draw.choice(heads)[:, : draw.choice((90, 250))], tail) for tail in tails]
        store = ChunkStore(model, chunk_size=CHUNK)
        for turn in ("cold", "warm"):
            inputs, cache = left_pad(*rows), ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0))
            plain, found = generate(model, inputs), generate(model, inputs, past_key_values=cache)
            assert torch.equal(plain.sequences, found.sequences)
            for expected, logits in zip(plain.logits, found.logits, strict=True):
                torch.testing.assert_close(logits / expected.std(), expected / expected.std(), atol=allowed, rtol=1e-3)
            report, tree = cache.report, tree_tokens([row[0].tolist() for row in rows])
            assert report.forwarded_tokens <= (tree + CHUNK if turn == "cold" else tree / 2)
            rows = [join(row, random_ids(draw.randint(1, 20), seed=100 * seed + 50 + n)) for n, row in enumerate(rows)]
            draw.shuffle(rows)
