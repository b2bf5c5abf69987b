"""What a report says, and what it must not."""

from functools import partial

import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReuseReport
from kvboost_hf.assets import load_embedded
from tests.conftest import as_inputs, random_ids


def test_counts() -> None:
    report = ReuseReport(
        prompt_tokens=1114, exact_tokens=1100, forwarded_tokens=14, tier_tokens={"live": 1100, "ram": 0}
    )
    assert str(report) == "prompt 1114 tokens, 1100 reused (99%), 14 computed [1100 live]"
    assert report.reuse_ratio == 1100 / 1114
    assert ReuseReport().reuse_ratio == 0.0
    assert ReuseReport().explain().endswith("No prompt was seen yet.")


def test_a_line_says_what_moved_and_what_it_cost() -> None:
    report = partial(ReuseReport, 6000, 40, moved_tokens=5900, recomputed_tokens=16, forwarded_tokens=76)
    line = "prompt 6000 tokens, 5924 reused (99%), 76 computed, 5900 moved{} (16 computed again)"
    for moved_by, said in (
        ({3: 5900}, " by +3"),
        ({0: 5900}, " by 0"),
        ({3: 5000, -40: 900}, " by -40 and +3"),
        ({0: 10, 5: 20, -2: 30, 9: 5840}, " by -2 to +9"),
        ({}, ""),  # moved for an earlier prompt, and still in the cache
    ):
        assert str(report(moved_by=moved_by)) == line.format(said)


def explained(first: str, second: str) -> str:
    """What is said of `second` after `first`."""
    model, tokenizer = load_embedded()
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for text in (first, second):
        inputs = tokenizer(text, return_tensors="pt")
        model.generate(**as_inputs(inputs["input_ids"]), past_key_values=cache, max_new_tokens=1)
        cache.reset() if text is first else None
    return cache.report.explain(tokenizer)  # type: ignore[arg-type]


COMMON = "The lamp is red. The box is blue. Anna lives in Rome. " * 3


def test_a_timestamp_is_recognized() -> None:
    said = explained(f"{COMMON} Today is 2026-11-20 and {COMMON}", f"{COMMON} Today is 2026-11-21 and {COMMON}")
    assert "looks like a date or time" in said


def test_a_plain_difference_shows_both_texts() -> None:
    said = explained(f"{COMMON} The cat sleeps. {COMMON}", f"{COMMON} The dog eats. {COMMON}")
    assert "where a stored prompt has" in said
    assert "dog" in said
    assert "date" not in said


def test_retokenized_text_is_recognized() -> None:
    model, tokenizer = load_embedded()
    whole = tokenizer(COMMON + COMMON)["input_ids"]
    pieces = list(whole)
    at = next(i for i in range(60, len(pieces)) if len(tokenizer.decode([pieces[i]])) >= 4)
    text = tokenizer.decode([pieces[at]])
    pieces[at : at + 1] = [tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in text]
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for ids in (whole, pieces):
        model.generate(**as_inputs(torch.tensor([ids])), past_key_values=cache, max_new_tokens=1)
        said = cache.report.explain(tokenizer)  # type: ignore[arg-type]
        cache.reset()
    assert "same text in other tokens" in said


def test_eviction_is_named(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, chunk_size=32, max_bytes=4 * (2 * 2 * 2 * 16 * 4 + 8) * 32)
    ids = random_ids(120, seed=1)
    for prompt in (ids, random_ids(120, seed=2), random_ids(120, seed=3), ids):
        cache = ChunkReuseCache(llama, store)
        llama.generate(**as_inputs(prompt), past_key_values=cache, max_new_tokens=1)
    assert "has been evicted" in cache.report.explain()
