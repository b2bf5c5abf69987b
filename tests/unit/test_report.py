"""What a report says, and what it must not."""

import re
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReuseReport
from kvboost_hf.assets import load_embedded
from tests.conftest import as_inputs, random_ids
from tests.internals.cache import Border, Miss, Missed, MissReport, Tally

pytestmark = pytest.mark.daily


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


class _Letters:
    def decode(self, token_ids: list[int]) -> str:
        assert all(token >= 0 for token in token_ids)
        return "".join(chr(token) for token in token_ids if token != ord("~"))  # which is special


def _said(before: Any, found: Any, expected: Any, cause: str = "diverged", *, at: int = 5, read: bool = True) -> str:
    ids = [
        None if each is None else np.array([ord(c) if c != "#" else -1 for c in each])
        for each in (before, found, expected)
    ]
    before, found, expected = (None if each is None else each.astype(np.int64) for each in ids)
    report = ReuseReport(prompt_tokens=9, misses=(MissReport(2, at, before, found, expected, cause),))
    return report.explain(_Letters() if read else None).splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("ab", "cd", None, "evicted"), "Row 2, token 5: 'cd' was stored once and has been evicted; a larger"),
        (("ab", "cd", None, "fingerprint"), "'cd' is stored, but for other weights, dtype or adapters"),
        (("ab", "cd", None, "slow"), "'cd' is stored in a lower tier, but takes longer to load than to compute."),
        (("ab", "cd", None, "cold"), "'cd' was never seen after what comes before it."),
        (("ab", "cd", "xy"), "Row 2, token 5: 'cd', where a stored prompt has 'xy'."),
        (("ab", "\0", None, "evicted"), "Row 2, token 5: '\\x00' was stored once"),
        (("ab", "cd", "cde"), "the same text in other tokens"),
        (("ab", "~", "cd"), "'', where a stored prompt has 'cd'."),
        (("ab", "cde", "cd"), "the same text in other tokens"),
        (("ab", "##", "#"), "token 5: another image, sound or video than in a stored prompt."),
        (("ab", "#c", "\0y"), "'c', where a stored prompt has '\\x00y'."),
        (("ab", "\0y", "#c"), "'\\x00y', where a stored prompt has 'c'."),
        (("ab", "#c", "xy"), "'c', where a stored prompt has 'xy'."),
        (("ab", "##", "xy"), "an image, sound or video, where a stored prompt has 'xy'."),
        (("a#", "c-", "c-"), "'c-', where a stored prompt has 'c-'."),
        (("at 2026-1", "1-20 x", "1-21 x"), "looks like a date or time"),
        (("at ", "2026-11-20 x", "2026-11-21 x"), "looks like a date or time"),
        (("at", ": 11:20", ": 11:21"), "looks like a date or time"),
        (("at", ":  11:20", ":  11:21"), "where a stored prompt has ':  11:21'."),
        (("at 2026-1", "1-20 x", "x"), "where a stored prompt has 'x'."),
        (("at 2026-1", "x", "1-20 x"), "where a stored prompt has '1-20 x'."),
        (("on 11-20 at", " b", " c"), "where a stored prompt has ' c'."),
        (("", "cd", "xy"), "where a stored prompt has 'xy'."),
    ],
)
def test_where_reuse_ended_is_said(given: tuple[Any, ...], said: str) -> None:
    assert said in _said(*given)
    assert _said(*given).endswith(said.rpartition(";")[2]) or not said.endswith(".")


def test_without_a_tokenizer_tokens_are_shown() -> None:
    assert _said("ab", "cd", "cde", read=False).endswith(
        "tokens [99, 100], where a stored prompt has tokens [99, 100, 101]."
    )
    assert _said("", "cd", None, "cold", at=0).endswith("was never seen at the beginning of a prompt.")


def _missed(at: int, nearest: str | None, *, evicted: bool = False, other: bool = False, border: int = 0) -> Any:
    tokens = np.array([ord(c) for c in "abcdefghijklmnopqrstuvwxyz"])
    stored = None if nearest is None else np.array([ord(c) for c in nearest])
    return Missed(0, tokens, Miss(at, Border(border, b""), None, stored), evicted, other)


def test_a_miss_has_one_cause() -> None:
    tally = Tally()
    tally.misses = [
        _missed(3, "abcxyz", evicted=True, other=True),
        _missed(3, "abc", evicted=True, other=True),
        _missed(0, None, other=True),
        _missed(3, None, other=True),
        _missed(20, "uvxyz", border=20),
    ]
    found = tally.report().misses
    assert [miss.cause for miss in found] == ["diverged", "evicted", "fingerprint", "cold", "diverged"]
    texts = [tuple("".join(map(chr, ids)) for ids in (miss.before, miss.found)) for miss in found]
    assert texts[0] == ("abc", "defghijklmno")
    assert texts[2] == ("", "abcdefghijkl")
    assert texts[4] == ("ijklmnopqrst", "uvwxyz")
    assert "".join(map(chr, found[0].expected)) == "xyz"
    assert "".join(map(chr, found[4].expected)) == "xyz"


def test_counts_add_up() -> None:
    tally = Tally(prompt=100, live=10, tiers=Counter(ram=20, disk=30), moved=12, recomputed=5, forwarded=40)
    report = tally.report()
    assert (report.exact_tokens, report.moved_tokens, report.reused_tokens) == (48, 12, 55)
    assert (report.forwarded_tokens, report.layer_tokens) == (40, ())
    assert dict(report.tier_tokens) == {"live": 10, "ram": 20, "disk": 30}
    tally.layers, tally.moved_reason = (3, 4, 4), "why"
    report = tally.report()
    assert (report.forwarded_tokens, report.layer_tokens) == (44, (43, 44, 44))
    assert report.moved_reason is None  # some were
    assert Tally(moved_reason="why").report().moved_reason == "why"


def test_a_report_says_what_it_has() -> None:
    """Each part by itself, and none without a reason."""
    plain = ReuseReport(prompt_tokens=10, forwarded_tokens=10)
    assert plain.explain().splitlines() == [
        "prompt 10 tokens, 0 reused (0%), 10 computed",
        "Everything that can be reused was.",
    ]
    parts: list[tuple[dict[str, Any], str]] = [
        ({"bypass_reason": "why"}, "; bypassed: why\nNothing was reused: why."),
        ({"bypass_reason": "why", "exact_tokens": 3}, "\nNothing more was reused: why."),
        ({"dropped_reason": "why"}, "\nWhat the cache itself held was dropped: why."),
        ({"unstored_reason": "why"}, "\nNot all of it was stored: why."),
        ({"moved_reason": "why"}, "\nNothing was moved: why."),
        ({"moved_tokens": 4}, "\n4 tokens were computed elsewhere, or behind moved ones; 0 of them"),
        ({"riding_reason": "why"}, "\nNone of the others are computed again along with new tokens: why."),
        ({"repaired_tokens": 4}, ", 4 repaired after the first token"),
        ({"start_reason": "why"}, "; but why"),
        ({"tier_tokens": {"live": 0, "ram": 2, "disk": 3}}, " [2 ram, 3 disk]"),
    ]
    for fields, said in parts:
        found = ReuseReport(prompt_tokens=10, forwarded_tokens=10, **fields).explain()
        assert said in found
        assert said not in plain.explain()
        ends = "Everything that can be reused was." in found
        assert ends == (not fields.keys() & {"bypass_reason", "moved_tokens"})
    assert not re.search("moved|repaired|bypassed|but", str(plain))
