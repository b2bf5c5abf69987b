"""Edits of a live cache: its state is that of a blended prompt, and plain once repaired; refusals say why."""

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria, StoppingCriteriaList

from kvboost_hf import CacheInUseError, ChunkReuseCache, ChunkStore, ReusePolicy, StoreClosedError
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.cache import REPAIRS, MovedColumns, blend_reason
from tests.parity.test_blend import MOVABLE, OutOfLuck

TEXT = random_ids(420, seed=1)
SHORT = TEXT[:, :230]
LONG = random_ids(1500, seed=7)  # of which layers with a window of 24 have let go
MORE = random_ids(30, seed=9)
NEW = random_ids(9, seed=5)[0]
# One of each kind; all of them end before column 200.
EDITS: dict[str, dict[str, Any]] = {
    "drop": {"drop": [(60, 110)]},
    "replace": {"replace": [(20, 26, NEW)]},
    "insert": {"replace": [(110, 110, NEW)]},
    "as long as before": {"replace": [(50, 59, NEW)]},
    "move on": {"move": [(40, 80, 140)]},
    "move back": {"move": [(120, 160, 30)]},
    "several": {"drop": [(100, 110)], "replace": [(20, 22, NEW), (150, 170, [])], "move": [(40, 70, 180)]},
}


def blend(repair: str = "none", ratio: float = 0.15, **more: Any) -> ReusePolicy:
    more = {"min_prefill_saving": 0, "progressive": False, **more}
    return ReusePolicy(mode="blend", repair=repair, recompute_ratio=ratio, **more)  # type: ignore[arg-type]


def holding(model: Any, text: torch.Tensor, policy: ReusePolicy | None = None, store: Any = None) -> ChunkReuseCache:
    store = store if store is not None else ChunkStore(model, chunk_size=32)
    cache = ChunkReuseCache(model, store, policy or blend())
    generate(model, text, cache)
    return cache


def generate(model: Any, ids: torch.Tensor, cache: Any = None, new: int = 1) -> Any:
    options = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**as_inputs(ids), past_key_values=cache, **options)


def by_hand(ids: torch.Tensor, edits: dict[str, Any]) -> list[int]:
    """The edited text, from token to token."""
    tokens, gone = ids[0].tolist(), set[int]()
    put: dict[int, list[int]] = {}
    for start, stop in edits.get("drop", ()):
        gone |= set(range(start, stop))
    for start, stop, new in edits.get("replace", ()):
        gone |= set(range(start, stop))
        put.setdefault(start, []).extend(torch.as_tensor(new).tolist())
    for start, stop, to in edits.get("move", ()):
        gone |= set(range(start, stop))
        put.setdefault(to, []).extend(tokens[start:stop])
    found: list[int] = []
    for at in range(len(tokens) + 1):
        found += put.get(at, [])
        found += [tokens[at]] if at < len(tokens) and at not in gone else []
    return [int(token) for token in found]


def assert_same(found: Any, expected: Any) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("name", MOVABLE)
def test_an_edit_that_is_repaired_is_plain(name: str, kind: str) -> None:
    """And the prompt goes on from it at once: its new tokens alone are computed."""
    model = make_model(name)
    if name == "gemma2":
        model.set_attn_implementation("eager")
    cache = holding(model, SHORT)
    ids = cache.edit(**EDITS[kind])
    assert ids.tolist() == [by_hand(SHORT, EDITS[kind])]
    assert cache.get_seq_length() == ids.shape[1]
    assert cache.report.moved_tokens > 0
    asked = torch.cat([ids, MORE], dim=1)
    with counted(model) as work:
        generate(model, asked, cache)
    assert work.tokens == cache.report.forwarded_tokens == MORE.shape[1]
    assert cache.report.moved_tokens > 0
    assert cache.repair() > 0
    assert_same(generate(model, asked, cache, 4), generate(model, asked, None, 4))
    assert cache.report.moved_tokens == 0


@pytest.mark.parametrize("repair", ["first_k", "query", "cacheblend"])
@pytest.mark.parametrize("kind", EDITS)
def test_with_everything_repaired_at_once_it_is_plain(kind: str, repair: str) -> None:
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=32)
    cache = holding(model, SHORT, blend(repair, 1.0), store)
    ids = cache.edit(**EDITS[kind])
    assert cache.report.recomputed_tokens == cache.report.moved_tokens > 0
    asked = torch.cat([ids, MORE], dim=1)
    expected = generate(model, asked, None, 4)
    assert_same(generate(model, asked, cache, 4), expected)
    assert cache.report.moved_tokens == 0
    other = ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0))  # it is stored by its history, too
    assert_same(generate(model, asked, other, 4), expected)
    assert other.report.exact_tokens > 180


@pytest.mark.parametrize("repair", ["none", "first_k", "selective", "query", "cacheblend"])
@pytest.mark.parametrize("kind", ["drop", "replace", "insert", "move on", "move back"])
@torch.no_grad()
def test_the_state_is_that_of_a_blended_prompt(kind: str, repair: str) -> None:
    """The same tokens are moved and computed as if the edited prompt had been searched in a store, logits included."""
    model = make_model("llama")
    assert blend_reason(model, REPAIRS[repair].measure) is None
    cache, other = holding(model, TEXT, blend(repair)), holding(model, TEXT)
    other.store_all()
    with counted(model) as work:
        ids = cache.edit(**EDITS[kind])
    edited = cache.report
    assert work.tokens >= edited.forwarded_tokens
    searched = ChunkReuseCache(model, other.store, blend(repair))
    generate(model, ids, searched)
    report = searched.report
    assert (report.moved_tokens, report.moved_by) == (edited.moved_tokens, edited.moved_by)
    assert (report.recomputed_tokens, report.forwarded_tokens) == (edited.recomputed_tokens, edited.forwarded_tokens)
    assert report.exact_tokens == edited.exact_tokens
    found = model(MORE, past_key_values=cache, logits_to_keep=1).logits
    expected = model(MORE, past_key_values=searched, logits_to_keep=1).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    if repair == "none":  # a control: it is not what a plain forward computes
        plain = model(torch.cat([ids, MORE], dim=1), logits_to_keep=1).logits
        assert float((found - plain).abs().max()) > 1e-2


def test_an_edit_needs_no_store() -> None:
    """And nothing of it is lost with what the store has evicted."""
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=32)
    cache = holding(model, TEXT, store=store)
    store.clear()
    with counted(model) as work:
        ids = cache.edit(drop=[(100, 150)])
    assert work.tokens == cache.report.forwarded_tokens == 16
    assert cache.report.moved_by == {-50: 254}
    assert cache.report.tier_tokens["live"] == 354
    assert store.stats()["hits"] == 0
    generate(model, torch.cat([ids, MORE], dim=1), cache)
    assert cache.report.forwarded_tokens == MORE.shape[1]


def test_edits_one_after_the_other() -> None:
    """What an edit has moved is moved again by the next one, and stays marked until it is repaired."""
    model = make_model("llama")
    cache = holding(model, TEXT)
    text = TEXT
    for turn in range(4):
        edits: dict[str, Any] = {"drop": [(60 + turn, 90)], "replace": [(10, 12 + turn, random_ids(3, seed=turn)[0])]}
        assert cache.edit(**edits).tolist() == [by_hand(text, edits)]
        text = torch.tensor([by_hand(text, edits)])
        assert cache.report.forwarded_tokens < 60
        text = generate(model, text, cache, 4).sequences[:, :-1]  # the last token has no K/V yet
        assert cache.report.moved_tokens > 100
    cache.repair()
    asked = torch.cat([text, MORE], dim=1)
    assert_same(generate(model, asked, cache, 4), generate(model, asked, None, 4))


def test_progressive_repair_goes_on_after_an_edit() -> None:
    model = make_model("llama")
    cache = holding(model, TEXT, blend(progressive=True))
    ids = torch.cat([cache.edit(drop=[(30, 60)]), MORE], dim=1)
    found, plain = generate(model, ids, cache, 5), generate(model, ids, None, 5)
    assert cache.report.repaired_tokens == ids.shape[1] - 30
    later = generate(model, found.sequences, cache), generate(model, found.sequences)
    assert_same(*later)
    assert plain.sequences.shape == found.sequences.shape


def test_an_edit_that_only_cuts_or_appends_is_exact() -> None:
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=32)
    for edits, computed in (({"drop": [(400, 420)]}, 0), ({"replace": [(420, 420, NEW)]}, 9), ({}, 0)):
        cache = holding(model, TEXT, store=store)
        with counted(model) as work:
            ids = cache.edit(**edits)
        assert work.tokens == computed
        assert cache.report.moved_tokens == 0
        asked = torch.cat([ids, MORE], dim=1)
        assert_same(generate(model, asked, cache, 3), generate(model, asked, None, 3))


def test_text_that_is_as_before_is_not_moved() -> None:
    model = make_model("llama")
    cache = holding(model, SHORT)
    with counted(model) as work:
        assert torch.equal(cache.edit(replace=[(20, 60, SHORT[0, 20:60])]), SHORT)
    assert (work.tokens, cache.report.moved_tokens) == (0, 0)
    again = torch.cat([SHORT[0, 20:50], NEW])
    cache.edit(replace=[(20, 60, again)])
    assert cache.report.tier_tokens["live"] >= 50
    cache.store.close()
    with pytest.raises(StoreClosedError):
        cache.edit(drop=[(20, 60)])


def test_text_too_short_to_be_moved_is_computed() -> None:
    model = make_model("llama")
    cache = holding(model, TEXT)
    with counted(model) as work:
        ids = cache.edit(drop=[(380, 390)])  # 30 tokens are behind it, of which 16 are computed in any case
    assert work.tokens == cache.report.forwarded_tokens == 30
    assert cache.report.moved_tokens == 0
    asked = torch.cat([ids, MORE], dim=1)
    assert_same(generate(model, asked, cache, 3), generate(model, asked, None, 3))


def test_rows_of_one_length_are_edited_alike() -> None:
    model = make_model("llama")
    rows = torch.cat([TEXT, random_ids(420, seed=2)])
    cache = ChunkReuseCache(model, ChunkStore(model), blend())
    model.generate(**as_inputs(rows), past_key_values=cache, max_new_tokens=1, do_sample=False)
    new = random_ids(5, seed=3, batch=2)
    ids = cache.edit(drop=[(100, 150)], replace=[(20, 24, new)])
    for row in range(2):
        assert ids[row].tolist() == by_hand(
            rows[row : row + 1], {"drop": [(100, 150)], "replace": [(20, 24, new[row])]}
        )
    assert cache.report.moved_tokens == 2 * (76 + 254)
    cache.repair()
    asked = torch.cat([ids, MORE.repeat(2, 1)], dim=1)
    assert_same(generate(model, asked, cache, 3), generate(model, asked, None, 3))


def test_a_fork_is_edited_on_its_own() -> None:
    model = make_model("llama")
    cache = holding(model, TEXT)
    twin = cache.fork()
    ids = twin.edit(drop=[(100, 150)])
    asked = torch.cat([TEXT, MORE], dim=1)
    assert_same(generate(model, asked, cache, 3), generate(model, asked, None, 3))
    assert cache.report.moved_tokens == 0
    twin.repair()
    asked = torch.cat([ids, MORE], dim=1)
    assert_same(generate(model, asked, twin, 3), generate(model, asked, None, 3))


@pytest.mark.parametrize("kind", ["drop", "move on", "several"])
def test_an_interrupted_edit_leaves_what_is_before_it(kind: str) -> None:
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=32)
    cache = holding(model, TEXT, store=store)
    with pytest.raises(RuntimeError, match="out of luck"), OutOfLuck():
        cache.edit(**EDITS[kind])
    assert cache.get_seq_length() == {"drop": 60, "move on": 40, "several": 20}[kind]
    for asked in (torch.cat([TEXT, MORE], dim=1), torch.tensor([by_hand(TEXT, EDITS[kind])])):
        cache.policy = blend("first_k", 1.0)
        assert_same(generate(model, asked, cache, 3), generate(model, asked, None, 3))
    assert not store.check_integrity().wrong


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"drop": [(400, 421)]}, r"`drop` must be a list of \(start, stop\) with 0 <= start and stop <= 420"),
    ({"drop": [(-3, 4)]}, "got .-3, 4."),
    ({"drop": [(9, 9)]}, "start < stop, got .9, 9."),
    ({"drop": [(9, 5)]}, "got .9, 5."),
    ({"drop": [5]}, "got 5"),
    ({"drop": [(1.5, 2)]}, "got .1.5, 2."),
    ({"move": [(1, 4)]}, r"\(start, stop, to\)"),
    ({"move": [(1, 4, 421)]}, "in front of a token from 0 to 420"),
    ({"move": [(1, 9, 4)]}, "Text cannot be put in front of token 4"),
    ({"drop": [(1, 9)], "move": [(20, 30, 4)]}, "Text cannot be put in front of token 4"),
    ({"drop": [(1, 9), (8, 12)]}, "must not overlap, got .1, 9. and .8, 12.. Make two edits"),
    ({"drop": [(0, 420)]}, "must leave at least one token"),
    ({"replace": [(1, 4, [[1], [2]])]}, r"token ids \[tokens\] or \[1, tokens\], got an array of shape \[2, 1\]"),
    ({"replace": [(1, 4, [1.5])]}, "type float64"),
    ({"replace": [(1, 4, [-1])]}, "must be from 0 to 199, .* got -1.* Tokenize with"),
    ({"replace": [(1, 4, [200])]}, "must be from 0 to 199, .* got 200.* Tokenize with"),
]


@pytest.mark.daily
@pytest.mark.parametrize(("edits", "message"), REFUSED)
def test_refused_edits_change_nothing(edits: dict[str, Any], message: str) -> None:
    model = make_model("llama")
    cache = holding(model, TEXT)
    with pytest.raises(ValueError, match=message):
        cache.edit(**edits)
    asked = torch.cat([TEXT, MORE], dim=1)
    with counted(model) as work:
        found = generate(model, asked, cache)
    assert work.tokens == MORE.shape[1]
    assert_same(found, generate(model, asked))


def _exact(model: Any) -> ChunkReuseCache:
    return holding(model, TEXT, ReusePolicy())


def _of_fixed_size(model: Any) -> ChunkReuseCache:
    cache = ChunkReuseCache(model, policy=blend(), max_cache_len=512)
    generate(model, TEXT, cache)
    return cache


def _of_codes(model: Any) -> ChunkReuseCache:
    cache = ChunkReuseCache(model, policy=blend(), live_quant="int8")
    generate(model, TEXT, cache)
    return cache


def _unequal(model: Any) -> ChunkReuseCache:
    cache = ChunkReuseCache(model, policy=blend())
    model.generate(**left_pad(TEXT, SHORT), past_key_values=cache, max_new_tokens=1)
    return cache


def _unknown(model: Any) -> ChunkReuseCache:
    cache = holding(model, TEXT)
    cache.layers[0].keys.zero_()
    return cache


@torch.no_grad()
def _hidden(model: Any) -> ChunkReuseCache:
    cache = ChunkReuseCache(model, policy=blend())
    model(TEXT, cache=cache, logits_to_keep=1, output_hidden_states=True)
    return cache


CANNOT: list[tuple[str, Callable[[Any], ChunkReuseCache], str]] = [
    ("llama", _exact, "it needs a cache with mode 'blend', and this one has 'exact'"),
    ("llama", _of_fixed_size, "the cache has a fixed size"),
    ("llama", _of_codes, "the cache holds codes"),
    ("llama", _unequal, "a batch of unequal rows"),
    ("llama", _unknown, "nothing is known of what the cache holds"),
    ("llama", _hidden, "the call asks for hidden states"),
    ("llama", lambda model: ChunkReuseCache(model, policy=blend()), "this one is empty"),
    ("gpt2", lambda model: holding(model, TEXT), "its positions are not rotary"),
    ("bloom", lambda model: holding(model, TEXT), "cannot be edited: "),
    ("mistral", lambda model: holding(model, LONG), "layers with a sliding window have let go of tokens before"),
    ("gemma2", lambda model: holding(model, LONG), "layers with a sliding window have let go of tokens before"),
    ("qwen3_next", lambda model: holding(model, TEXT), "only keys and values can be moved"),
]


@pytest.mark.daily
@pytest.mark.parametrize(("name", "make", "message"), CANNOT)
def test_what_cannot_be_edited_says_why_and_goes_on(
    name: str, make: Callable[[Any], ChunkReuseCache], message: str
) -> None:
    model = make_model(name)
    if name == "gemma2":
        model.set_attn_implementation("eager")
    cache = make(model)
    with pytest.raises(ValueError, match=message):
        cache.edit(drop=[(30, 60)])
    if make in (_unequal, _of_codes):
        return
    asked = torch.cat([LONG if "window" in message else TEXT, MORE], dim=1)
    assert_same(generate(model, asked, cache, 3), generate(model, asked, None, 3))


def test_the_remedy_for_windows_works() -> None:
    """The store serves the edited prompt, also where the layers of the cache have let go of a part of it."""
    model = make_model("mistral")
    cache = holding(model, LONG)
    with pytest.raises(ValueError, match="Pass the edited prompt to generate"):
        cache.edit(drop=[(60, 110)])
    generate(model, torch.tensor([by_hand(LONG, {"drop": [(60, 110)]})]), cache)
    assert cache.report.reused_tokens > 1400
    assert cache.report.forwarded_tokens < 30


def test_no_call_may_be_under_way() -> None:
    model = make_model("llama")
    cache = ChunkReuseCache(model, policy=blend())
    seen: list[Exception] = []

    class Edits(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            try:
                cache.edit(drop=[(30, 60)])
            except CacheInUseError as error:
                seen.append(error)
            return torch.ones(len(input_ids), dtype=torch.bool)

    model.generate(**as_inputs(TEXT), cache=cache, max_new_tokens=4, stopping_criteria=StoppingCriteriaList([Edits()]))
    assert len(seen) == 1
    assert cache.edit(drop=[(30, 60)]).shape[1] == cache.get_seq_length()


def served_after_an_edit(model: Any, monkeypatch: pytest.MonkeyPatch | None) -> tuple[Any, Any, ChunkReuseCache]:
    """What an exact cache answers to an edited prompt whose K/V another one holds, moved and not repaired."""
    store = ChunkStore(model, chunk_size=32)
    cache = holding(model, TEXT, store=store)
    if monkeypatch is not None:
        monkeypatch.setattr(MovedColumns, "is_tainted", lambda self, row: False)
    ids = cache.edit(drop=[(60, 110)], move=[(200, 240, 130)])
    asked = torch.cat([ids, MORE], dim=1)
    generate(model, asked, cache, 3)
    cache.store_all()
    cache.reset()
    exact = ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0))
    return generate(model, asked, exact, 3), generate(model, asked, None, 3), exact


def test_the_store_never_serves_edited_text_by_its_history() -> None:
    model = make_model("llama")
    found, expected, exact = served_after_an_edit(model, None)
    assert_same(found, expected)
    assert exact.report.exact_tokens == 60
    assert not exact.store.check_integrity().wrong


def test_and_this_is_noticed_where_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: with a ledger that does not know what has moved, the store serves it, and the answer is another."""
    model = make_model("llama")
    found, expected, exact = served_after_an_edit(model, monkeypatch)
    assert exact.report.exact_tokens > 300
    assert float((torch.stack(found.logits) - torch.stack(expected.logits)).abs().max()) > 1e-2


spans = st.tuples(st.integers(0, 200), st.integers(1, 60))


@settings(max_examples=25, deadline=None)
@given(
    where=st.lists(spans, min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(["drop", "replace", "move"]), min_size=4, max_size=4),
    tos=st.lists(st.integers(0, 230), min_size=4, max_size=4),
)
def test_random_edits(where: list[tuple[int, int]], kinds: list[str], tos: list[int]) -> None:
    """Refused, or the text by hand; and exact once it is repaired."""
    model = make_model("llama")
    edits: dict[str, list[Any]] = {"drop": [], "replace": [], "move": []}
    for (start, n), kind, to in zip(where, kinds, tos, strict=False):
        stop = min(start + n, 230)
        more = {"drop": (), "replace": (random_ids(to % 20 + 1, seed=to)[0],), "move": (to,)}[kind]
        edits[kind].append((start, stop, *more))
    cache = holding(model, SHORT)
    try:
        ids = cache.edit(**edits)
    except ValueError:
        ids = SHORT
        spans_of_all = sorted((each[0], each[1]) for each in chain(*edits.values()))
        overlap = any(b[0] < a[1] for a, b in pairwise(spans_of_all))
        inside = any(a < to < b for _, _, to in edits["move"] for a, b in spans_of_all)
        put = any(a < each[0] < b for each in edits["replace"] for a, b in spans_of_all)
        assert overlap or inside or put or all(start == 0 and stop == 230 for start, stop in spans_of_all)
    else:
        assert ids.tolist() == [by_hand(SHORT, edits)]
    cache.repair()
    asked = torch.cat([ids, MORE], dim=1)
    assert_same(generate(model, asked, cache, 3), generate(model, asked, None, 3))
    assert cache.report.forwarded_tokens <= MORE.shape[1]
