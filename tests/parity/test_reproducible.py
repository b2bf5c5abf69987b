"""`ReusePolicy(reproducible=True)`: logits are the same bit by bit, whatever was reused."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, KVQuantConfig, ReusePolicy, attach, check_model_compatibility
from kvboost_hf import last_cache as last
from recipes.real_model import FLOAT32
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.cache import PIECE, admission, piece_ends, whole_pieces

FIXED = ReusePolicy(reproducible=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def model() -> PreTrainedModel:
    return made("qwen3", torch.bfloat16, "sdpa")


def ask(model: PreTrainedModel, ids: torch.Tensor, cache: Any, tokens: int = 4, **kwargs: Any) -> Any:
    """The answer to ids [1, tokens], of so many tokens."""
    call: Any = model.generate
    return call(
        **as_inputs(ids),
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )


def cold(model: PreTrainedModel, ids: torch.Tensor, policy: ReusePolicy = FIXED, **kwargs: Any) -> Any:
    """The same with nothing stored."""
    return ask(model, ids, ChunkReuseCache(model, ChunkStore(model), policy), **kwargs)


def same_bits(one: Any, other: Any) -> bool:
    """Whether all logits of two answers are equal."""
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one.logits, other.logits, strict=True))


def new_cache(model: PreTrainedModel, policy: ReusePolicy = FIXED, **settings: Any) -> ChunkReuseCache:
    return ChunkReuseCache(model, ChunkStore(model, **{"chunk_size": 64, **settings}), policy)


def made(name: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = make_model(name).to(dtype)
    model.set_attn_implementation(attention)
    check_model_compatibility(model)
    return model


def chat(model: PreTrainedModel, policy: ReusePolicy) -> tuple[int, int]:
    """Turns of a chat and then an edit of it; returns how many there were, and in how many some bit was another."""
    store = ChunkStore(model, chunk_size=64)
    kept, ids, turns, others = ChunkReuseCache(model, store, policy), random_ids(300, seed=1), 0, 0
    for seed in range(2, 5):
        expected = cold(model, ids, policy)
        for cache in (kept, ChunkReuseCache(model, store, policy)):
            with counted(model) as work:
                found = ask(model, ids, cache)
            assert cache.report.bypass_reason is None
            assert work.tokens == cache.report.forwarded_tokens + 3
            if seed > 2:
                assert cache.report.reused_tokens >= PIECE
            turns, others = turns + 1, others + (not same_bits(expected, found))
        ids = torch.cat([found.sequences if seed < 3 else ids[:, :400], random_ids(140, seed=seed)], dim=1)
    return turns, others


CASES = [
    *[("qwen3", "sdpa", dtype) for dtype in DTYPES],
    *[("qwen3", "kvboost_fa2", dtype) for dtype in DTYPES[1:]],
    ("qwen3", "eager", torch.float32),
    ("mistral", "sdpa", torch.float32),  # windows
    ("gemma2", "kvboost_fa2", torch.float32),  # windows in every other layer
    ("gpt_oss", "eager", torch.float32),  # experts
    ("deepseek_v3", "sdpa", torch.float16),  # compressed K/V
    ("qwen3_next", "sdpa", torch.bfloat16),  # states
    ("falcon_h1", "sdpa", torch.float32),  # states and K/V in one layer
]


@pytest.mark.parametrize(("name", "attention", "dtype"), CASES)
def test_a_chat_has_the_bits_of_one_without_reuse(name: str, attention: str, dtype: torch.dtype) -> None:
    model = made(name, dtype, attention)
    assert chat(model, FIXED) == (6, 0)
    assert chat(model, ReusePolicy())[1] > 0  # else this could not fail


@pytest.mark.slow
@pytest.mark.skipif(not FLOAT32.exists(), reason="needs `python -m recipes.real_model`")
def test_a_real_model_has_the_bits_of_one_without_reuse() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FLOAT32, dtype=torch.bfloat16)
    assert chat(model, FIXED) == (6, 0)
    assert chat(model, ReusePolicy())[1] > 0


EDITS = st.tuples(st.integers(0, 900), st.integers(1, 400), st.integers(0, 5), st.integers(1, 6))
MODELS: dict[torch.dtype, PreTrainedModel] = {}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    edits=st.lists(EDITS, min_size=2, max_size=5),
    kept=st.lists(st.booleans(), min_size=5, max_size=5),
    budget=st.sampled_from([300_000, 2**30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cropped=st.integers(0, 40),
)
def test_texts_that_grow_and_part_have_the_bits_of_ones_without_reuse(
    edits: list[tuple[int, int, int, int]], kept: list[bool], budget: int, dtype: torch.dtype, cropped: int
) -> None:
    """With a cache that is kept, new ones, copies, ones that were cropped, and a store that evicts."""
    model = MODELS.get(dtype) or MODELS.setdefault(dtype, made("qwen3", dtype, "sdpa"))
    store = ChunkStore(model, chunk_size=48, max_bytes=budget)
    cache, ids = ChunkReuseCache(model, store, FIXED), random_ids(PIECE, seed=9)
    for (keep, more, seed, tokens), stays in zip(edits, kept, strict=False):
        ids = torch.cat([ids[:, :keep], random_ids(more, seed=seed)], dim=1)
        used = cache if stays else cache.fork() if seed % 2 else ChunkReuseCache(model, store, FIXED)
        found = ask(model, ids, used, tokens)
        assert same_bits(found, cold(model, ids, tokens=tokens))
        if seed == 5 and cropped:
            used.crop(-cropped)
        if seed == 4:
            cache.reset()
        ids = found.sequences


@pytest.mark.parametrize("length", [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 1])
def test_lengths_at_the_ends_of_pieces(model: PreTrainedModel, length: int) -> None:
    ids, cache = random_ids(length + 60, seed=3), new_cache(model)
    for end in (length, length + 60, length):
        for each in (cache, ChunkReuseCache(model, cache.store, FIXED)):
            assert same_bits(ask(model, ids[:, :end], each), cold(model, ids[:, :end]))
        assert cache.report.forwarded_tokens <= end - (cache.report.reused_tokens // PIECE) * PIECE
    assert cache.report.reused_tokens == whole_pieces(length - 1)


def test_decoded_tokens_are_neither_stored_nor_kept(model: PreTrainedModel) -> None:
    cache = new_cache(model)
    answer = ask(model, random_ids(PIECE + 20, seed=1), cache, tokens=PIECE)
    cache.store_all()
    cache.store_tails()
    assert sum(len(chunk.tokens) for chunk in cache.store.inspect().chunks.values()) == PIECE
    more = torch.cat([answer.sequences, random_ids(10, seed=2)], dim=1)
    ask(model, more, cache)
    assert cache.report.reused_tokens == PIECE
    cache.reset()
    ask(model, more, cache)
    assert cache.report.reused_tokens == whole_pieces(more.shape[1] - 1)


def test_heads_of_any_width() -> None:
    """In buffers of other capacities heads lie elsewhere in memory, and products of matrices may round otherwise."""
    config = {"head_dim": 10, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 6}
    for name in ("llama", "mistral"):
        shape = make_model(name).config.to_dict()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = type(make_model(name))(type(make_model(name).config)(**{**shape, **config})).eval()
        cache, long = new_cache(model), random_ids(1500, seed=7)
        for length in (300, 513, 700, 901):
            ask(model, long, cache)
            ids = torch.cat([long[:, :length], random_ids(61, seed=length)], dim=1)
            expected = cold(model, ids)
            for each in (cache, ChunkReuseCache(model, cache.store, FIXED)):
                assert same_bits(ask(model, ids, each), expected)
            assert cache.report.bypass_reason == (admission.NARROW_WINDOW if name == "mistral" else None)


def test_an_interrupted_prompt(model: PreTrainedModel) -> None:
    ids = random_ids(700, seed=1)
    expected, cache = cold(model, ids), new_cache(model)
    for call in (1, 2, 3):
        calls = 0

        def fail(module: Any, args: Any, kwargs: Any, call: int = call) -> None:
            nonlocal calls
            calls += 1
            if calls == call:
                raise KeyboardInterrupt

        fail.leaves_kv_alone = True  # type: ignore[attr-defined]
        handle = model.model.layers[1].register_forward_pre_hook(fail, with_kwargs=True)
        with pytest.raises(KeyboardInterrupt):
            ask(model, ids, cache)
        handle.remove()
    assert same_bits(ask(model, ids, cache), expected)


def test_after_a_restart_from_disk_and_in_other_threads(tmp_path: Path, loading_is_worth_it: None) -> None:
    ids, longer = random_ids(600, seed=1), torch.cat([random_ids(600, seed=1), random_ids(90, seed=2)], dim=1)
    first = made("qwen3", torch.bfloat16, "sdpa")
    expected = cold(first, longer)
    with ChunkStore(first, chunk_size=64, tiers=[f"disk:{tmp_path / 'tier'}:1GB"]) as store:
        ask(first, ids, ChunkReuseCache(first, store, FIXED))
    model = made("qwen3", torch.bfloat16, "sdpa")
    with ChunkStore(model, chunk_size=64, tiers=[f"disk:{tmp_path / 'tier'}:1GB"]) as store:
        found: list[Any] = []

        def work() -> None:
            cache = ChunkReuseCache(model, store, FIXED)
            found.append((ask(model, longer, cache), cache.report))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(report.tier_tokens.get("disk", 0) for _, report in found) >= 512
        assert all(report.reused_tokens == 512 and same_bits(answer, expected) for answer, report in found)


def test_what_was_computed_otherwise_is_not_found(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, cache = random_ids(600, seed=1), new_cache(model)
    ask(model, ids, cache)
    plain = ChunkReuseCache(model, cache.store)
    ask(model, ids, plain)
    assert plain.report.reused_tokens == 0
    other = ChunkReuseCache(model, cache.store, FIXED)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    ask(model, ids, other)
    assert other.report.reused_tokens == 0
    monkeypatch.undo()
    ask(model, ids, other)
    assert other.report.reused_tokens == 512


@pytest.mark.parametrize("size", [100, PIECE, 2 * PIECE])
def test_prefill_chunk_size(model: PreTrainedModel, size: int) -> None:
    """The caller's pieces are reused, but for the last of ours in each, where they end as ours do."""
    ids = random_ids(800, seed=1)
    cache, expected = new_cache(model), cold(model, ids, prefill_chunk_size=size)
    for each in (cache, cache, ChunkReuseCache(model, cache.store, FIXED)):
        assert same_bits(ask(model, ids, each, prefill_chunk_size=size), expected)
        assert each.report.bypass_reason == (admission.OTHER_PIECES if size % PIECE else None)
    assert cache.report.reused_tokens == {100: 0, 256: 0, 512: 512}[size]


def test_logits_of_the_last_tokens(model: PreTrainedModel) -> None:
    """A forward over more than a piece stores no more than the whole pieces before it."""
    ids = random_ids(700, seed=1)
    cache = new_cache(model)
    with torch.no_grad():
        for keep in (1, 150, 300, 600):
            store = ChunkStore(model)
            for each in (ChunkReuseCache(model, store, FIXED), cache, ChunkReuseCache(model, cache.store, FIXED)):
                each.reset()
                found = model(ids, past_key_values=each, logits_to_keep=keep).logits
                if each.store is store:
                    expected = found
                assert torch.equal(found, expected)
    assert same_bits(ask(model, ids, cache), cold(model, ids))


def test_logits_of_all_tokens(model: PreTrainedModel) -> None:
    ids = random_ids(700, seed=1)
    policy = ReusePolicy(reproducible=True, keep_logprobs=True)
    store = ChunkStore(model, chunk_size=64)
    with torch.no_grad():
        expected = model(ids, past_key_values=ChunkReuseCache(model, ChunkStore(model), policy)).logits
        for length in (300, 700, 700):
            cache = ChunkReuseCache(model, store, policy)
            found = model(ids[:, :length], past_key_values=cache).logits
        assert cache.report.reused_tokens == 512
        assert torch.equal(found, expected)
        without = new_cache(model)
        for _ in range(2):
            without.reset()
            found = model(ids, past_key_values=without).logits
            assert without.report.bypass_reason is not None
            assert torch.equal(found, model(ids).logits)


@pytest.mark.parametrize("case", ["rows", "padding"])
def test_what_cannot_be_promised_is_computed_whole(case: str) -> None:
    model = made("qwen3", torch.bfloat16, "sdpa")
    ids = random_ids(300, seed=1)
    inputs = {
        "rows": as_inputs(ids.expand(2, -1)),
        "padding": left_pad(ids, torch.cat([ids, ids], dim=1)),
    }[case]
    if case == "padding":
        inputs = {name: each[:1] for name, each in inputs.items()}
        assert not inputs["attention_mask"].all()
    call: Any = model.generate
    how = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, cache = call(**inputs, **how), new_cache(model)
    for _ in range(2):
        assert same_bits(call(**inputs, past_key_values=cache, **how), expected)
        assert cache.report.bypass_reason == admission.SEVERAL_ROWS
        assert cache.report.reused_tokens == 0


def test_attached(model: PreTrainedModel) -> None:
    ids = random_ids(600, seed=1)
    expected = cold(model, ids)
    attach(model, ChunkStore(model, chunk_size=64), FIXED)
    for _ in range(2):
        assert same_bits(ask(model, ids, None), expected)
    cache = last(model)
    assert cache is not None
    assert cache.report.reused_tokens == 512


def test_bad_input(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="`reproducible` must be True or False, got 1"):
        ReusePolicy(reproducible=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be False with mode 'blend'"):
        ReusePolicy(mode="blend", reproducible=True)
    with pytest.raises(ValueError, match="must be False with `max_cache_len`"):
        ChunkReuseCache(model, policy=FIXED, max_cache_len=500)
    with pytest.raises(ValueError, match="must be False with `live_quant`"):
        ChunkReuseCache(model, policy=FIXED, live_quant=KVQuantConfig())
    with pytest.raises(ValueError, match="a store with codec"):
        new_cache(model, codec="int8")
    with pytest.raises(ValueError, match="`reproducible` of a cache must stay False"):
        ChunkReuseCache(model).policy = FIXED


def test_where_pieces_end() -> None:
    assert [whole_pieces(each) for each in (0, 255, 256, 700)] == [0, 0, 256, 512]
    assert piece_ends(0, 255) == []
    assert piece_ends(0, 512) == [256, 512]
    assert piece_ends(256, 700) == [512]
