"""Plain generate() against generate() with a ChunkReuseCache: same tokens, same logits, fewer tokens forwarded."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, check_model_compatibility
from tests.conftest import FULL_ATTENTION, as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.cache import history

NEW = 6

# Prompts that share their beginnings: longer, shorter, equal, diverging, unrelated, one token.
BASE, OTHER = random_ids(300, seed=1), random_ids(300, seed=2)
PROMPTS = [
    BASE[:, :200],
    torch.cat([BASE[:, :200], OTHER[:, :20]], dim=1),
    BASE[:, :90],
    BASE[:, :90],
    OTHER[:, :150],
    torch.cat([BASE[:, :77], OTHER[:, :60]], dim=1),
    BASE[:, :1],
    BASE[:, :200],
]
# Tokens of each prompt that no earlier one shares: at least one is always computed.
UNSEEN = [200, 20, 1, 1, 150, 60, 1, 1]


def assistant() -> PreTrainedModel:
    model = make_model("llama", seed=7)
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"num_beams": 3},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
    "assistant": {"assistant_model": assistant},
    "prefill_chunks": {"prefill_chunk_size": 40},
}


def generate(model: PreTrainedModel, ids: torch.Tensor, mode: dict[str, Any], **kwargs: Any) -> Any:
    mode = {name: value() if callable(value) else value for name, value in mode.items()}
    torch.manual_seed(5)
    return model.generate(
        **as_inputs(ids),
        max_new_tokens=NEW,
        output_logits=True,
        return_dict_in_generate=True,
        **mode,
        **kwargs,
    )


def assert_same(plain: Any, reused: Any) -> None:
    assert torch.equal(plain.sequences, reused.sequences)
    assert len(plain.logits) == len(reused.logits)
    for expected, found in zip(plain.logits, reused.logits, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_one_cache_for_any_prompts(name: str, mode: str) -> None:
    model = make_model(name)
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    rows = MODES[mode].get("num_return_sequences", MODES[mode].get("num_beams", 1))
    for ids, unseen in zip(PROMPTS, UNSEEN, strict=True):
        with counted(model) as plain_work:
            plain = generate(model, ids, MODES[mode])
        with counted(model) as work:
            reused = generate(model, ids, MODES[mode], past_key_values=cache)
        assert_same(plain, reused)
        # Up to 16 tokens of a tail may be too few to be found again, and each prefill chunk computes a token.
        slack = 6 if mode == "prefill_chunks" else 0
        saved = rows * max(ids.shape[1] - unseen - 16 - slack, 0)
        assert work.tokens <= plain_work.tokens - saved
        assert work.calls <= plain_work.calls + (rows > 1)  # what rows have alike is computed in a forward of its own
        report = cache.report
        assert report.bypass_reason is None
        assert report.prompt_tokens == report.reused_tokens + report.forwarded_tokens
        if mode in ("greedy", "sampling", "beams", "return_sequences"):
            assert report.prompt_tokens == rows * ids.shape[1]
            assert work.tokens - report.forwarded_tokens == plain_work.tokens - rows * ids.shape[1]


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_left_padded_batches(name: str) -> None:
    model = make_model(name)
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=32)
    cache = ChunkReuseCache(model, store)
    batches = [
        left_pad(BASE[:, :150], OTHER[:, :70]),
        left_pad(BASE[:, :200], OTHER[:, :90]),  # both rows grow
        left_pad(OTHER[:, :90], BASE[:, :200]),  # rows change places
        left_pad(BASE[:, :180], random_ids(170, seed=9)),  # a warm and a cold row
        left_pad(BASE[:, :180], BASE[:, :10], OTHER[:, :60]),
        as_inputs(BASE[:, :120]),
        left_pad(random_ids(33, seed=11), random_ids(5, seed=12)),
    ]
    forwarded = []
    for batch in batches:
        plain = model.generate(**batch, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True)
        with counted(model) as work:
            reused = model.generate(
                **batch, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True, past_key_values=cache
            )
        assert_same(plain, reused)
        assert cache.report.bypass_reason is None
        assert cache.report.prompt_tokens == int(batch["attention_mask"].sum())
        decoded = len(batch["input_ids"]) * (NEW - 1)
        assert work.tokens - decoded >= cache.report.forwarded_tokens  # padding is computed, too
        forwarded.append(cache.report.forwarded_tokens)
    # New tokens of both rows; rows that moved; a cold row that must not cost the warm one its reuse.
    assert forwarded[1] <= 50 + 20 + 2 * 30
    assert forwarded[2] <= 2 * 32
    assert forwarded[3] <= 170 + 32
    assert forwarded[5] <= 32


def test_a_cold_row_costs_no_other_row_its_reuse(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    store.warm(BASE[:, :256])
    batch = {"input_ids": torch.cat([BASE[:, :257], OTHER[:, :257]])}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    plain = llama.generate(**batch, max_new_tokens=NEW)
    cache = ChunkReuseCache(llama, store)
    with counted(llama) as work:
        reused = llama.generate(**batch, max_new_tokens=NEW, past_key_values=cache)
    assert torch.equal(plain, reused)
    assert work.tokens == 256 + 2 * 1 + 2 * (NEW - 1)
    assert cache.report.forwarded_tokens == 256 + 2


def test_zeroed_kv_is_noticed(llama: PreTrainedModel) -> None:
    """The control: were stored K/V not used, or its content without effect, the parity tests would prove nothing."""
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    store.warm(BASE[:, :200])
    plain = generate(llama, BASE[:, :200], {})
    assert_same(plain, generate(llama, BASE[:, :200], {}, past_key_values=ChunkReuseCache(llama, store)))
    for chunk in store.inspect().chunks.values():
        for block in chunk.kv.tensors:
            block.zero_()
    broken = generate(llama, BASE[:, :200], {}, past_key_values=ChunkReuseCache(llama, store))
    with pytest.raises(AssertionError):
        assert_same(plain, broken)


def test_reuse_across_caches_goes_through_the_store(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    generate(llama, BASE[:, :200], {}, past_key_values=ChunkReuseCache(llama, store))
    cache = ChunkReuseCache(llama, store)
    with counted(llama) as work:
        reused = generate(llama, BASE[:, :200], {}, past_key_values=cache)
    assert_same(generate(llama, BASE[:, :200], {}), reused)
    assert cache.report.tier_tokens == {"live": 0, "ram": 192}
    assert work.tokens == 200 - 192 + NEW - 1


def test_growing_chat(llama: PreTrainedModel) -> None:
    """Every turn's prompt is the whole history: of what was forwarded before, at most one token is forwarded again."""
    check_model_compatibility(llama)
    cache = ChunkReuseCache(llama)
    history = random_ids(54, seed=20)
    seen = 0
    for turn in range(6):
        history = torch.cat([history, random_ids(30 + turn, seed=30 + turn)], dim=1)
        plain = llama.generate(**as_inputs(history), max_new_tokens=20)
        with counted(llama) as work:
            reused = llama.generate(**as_inputs(history), max_new_tokens=20, past_key_values=cache)
        assert torch.equal(plain, reused)
        decoded = reused.shape[1] - history.shape[1]
        assert work.tokens == history.shape[1] - seen + decoded - 1
        history = reused
        seen = reused.shape[1] - 1  # the last token was never forwarded


def test_decoded_text_comes_back_as_a_prompt_elsewhere(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    ids = llama.generate(
        **as_inputs(BASE[:, :50]),
        max_new_tokens=120,
        min_new_tokens=120,
        past_key_values=ChunkReuseCache(llama, store),
    )
    cache = ChunkReuseCache(llama, store)
    reused = llama.generate(**as_inputs(ids), max_new_tokens=NEW, past_key_values=cache)
    assert torch.equal(reused, llama.generate(**as_inputs(ids), max_new_tokens=NEW))
    assert cache.report.reused_tokens == 160  # five chunks, decoded tokens among them


def test_eos_inside_a_chunk(llama: PreTrainedModel) -> None:
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32)
    plain = llama.generate(**as_inputs(BASE[:, :40]), max_new_tokens=30, eos_token_id=None)
    eos = int(plain[0, 40 + 9])
    cache = ChunkReuseCache(llama, store)
    for _ in range(2):
        reused = llama.generate(**as_inputs(BASE[:, :40]), max_new_tokens=30, eos_token_id=eos, past_key_values=cache)
        expected = llama.generate(**as_inputs(BASE[:, :40]), max_new_tokens=30, eos_token_id=eos)
        assert torch.equal(reused, expected)


def test_streamer_gets_the_prompt_and_every_token(llama: PreTrainedModel) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.ids: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.ids += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    cache = ChunkReuseCache(llama)
    for _ in range(2):
        recorder = Recorder()
        out = llama.generate(**as_inputs(BASE[:, :60]), max_new_tokens=NEW, past_key_values=cache, streamer=recorder)
        assert recorder.ended
        assert recorder.ids == out[0].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parts_only_where_logits_nearly_tie(llama: PreTrainedModel, dtype: torch.dtype) -> None:
    model = llama.to(dtype)  # type: ignore[arg-type]
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    for seed in range(12):
        ids = torch.cat([BASE[:, :100], random_ids(20, seed=50 + seed)], dim=1)
        plain, reused = generate(model, ids, {}), generate(model, ids, {}, past_key_values=cache)
        differ = (plain.sequences != reused.sequences)[0, 120:].nonzero().flatten()
        if len(differ):
            top = plain.logits[int(differ[0])][0].float().topk(2).values
            assert float(top[0] - top[1]) <= 0.05 * float(plain.logits[int(differ[0])].float().std())


def test_only_new_ids_with_the_whole_mask(llama: PreTrainedModel) -> None:
    """transformers also allows passing only the ids that follow the cache, with a mask over everything."""
    check_model_compatibility(llama)
    cache = ChunkReuseCache(llama)
    whole = torch.cat([BASE[:, :100], OTHER[:, :10]], dim=1)
    with torch.no_grad():
        llama(**as_inputs(BASE[:, :100]), past_key_values=cache)
    with counted(llama) as work:
        found = llama.generate(
            input_ids=OTHER[:, :10], attention_mask=torch.ones_like(whole), past_key_values=cache, max_new_tokens=NEW
        )
    expected = llama.generate(**as_inputs(whole), max_new_tokens=NEW)
    assert torch.equal(found[:, 10:], expected[:, 110:])
    assert work.tokens == 10 + NEW - 1


def test_text_that_never_comes_again_is_no_longer_stored(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where storing has not paid, a chunk is stored when it comes again; what is pinned or asked for, always."""
    monkeypatch.setattr(history, "_STORED_AT_LEAST", 512)
    monkeypatch.setattr(history, "_COMPUTED_AT_LEAST", 0)
    check_model_compatibility(llama)

    def asked(store: ChunkStore, seed: int, policy: ReusePolicy | None = None) -> ChunkReuseCache:
        prompt = random_ids(200, seed=seed)
        cache = ChunkReuseCache(llama, store, policy)
        expected = llama.generate(**as_inputs(prompt), max_new_tokens=2)
        assert torch.equal(llama.generate(**as_inputs(prompt), past_key_values=cache, max_new_tokens=2), expected)
        return cache

    store = ChunkStore(llama, chunk_size=64)
    chunks = []
    for seed in range(6):
        cache = asked(store, seed)
        chunks.append(store.stats()["chunks"])
    assert chunks == [3, 6, 8, 8, 8, 8]  # 512 tokens
    assert "second time" in cache.report.explain()
    store.warm(random_ids(200, seed=7))
    assert asked(store, 7).report.reused_tokens == 199
    cache = asked(store, 8, ReusePolicy(min_prefill_saving=0))
    assert cache.report.unstored_reason is None
    assert asked(store, 8).report.reused_tokens == 192
    # It has paid: what is new is stored at once again.
    asked(store, 9)
    assert asked(store, 9).report.reused_tokens == 192

    store = ChunkStore(llama, chunk_size=64)
    reused = [asked(store, seed).report.reused_tokens for seed in (0, 1, 2, 3, 3, 3)]
    assert reused == [0, 0, 0, 0, 0, 192]


def test_serving_pays_for_what_was_stored_and_for_no_more(llama: PreTrainedModel) -> None:
    """A token that serves pays for four that were stored, up to 65,536 of which may be unpaid."""
    whatever = history.Payback(None, llama)
    for _ in range(2):
        whatever.note_stored(10**9)
        assert whatever.admits(b"a")
        whatever.note_served(1_000)
    payback = history.Payback(4, llama)
    payback.note_stored(70_000)
    assert not payback.admits(b"a")
    payback.note_served(1_000)
    assert not payback.admits(b"b")
    payback.note_served(200)
    assert payback.admits(b"c")
    payback.note_served(1_000_000)
    payback.note_stored(65_535)
    assert payback.admits(b"d")
    payback.note_stored(1)
    assert not payback.admits(b"e")


def test_what_other_processes_may_ask_for_is_always_stored(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    monkeypatch.setattr(history, "_STORED_AT_LEAST", 0)
    monkeypatch.setattr(history, "_COMPUTED_AT_LEAST", 0)
    prompt = random_ids(200, seed=1)
    for tiers, stored in (([], 0), ([disk], 3)):
        with ChunkStore(llama, chunk_size=64, tiers=tiers) as store:
            llama.generate(**as_inputs(prompt), past_key_values=ChunkReuseCache(llama, store), max_new_tokens=1)
            assert store.stats()["chunks"] == stored
