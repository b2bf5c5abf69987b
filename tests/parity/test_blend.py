"""Moved chunks: everything repaired is plain generate(); a part repaired costs a part; nothing moved is told why."""

import contextlib
import gc
import math
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.assisted import branch_reason
from tests.internals.cache import REPAIRS, RepairRow, admission, blend_reason, only_looks, repair_later, scatter
from tests.internals.compat import probe_reason

MOVABLE = ["llama", "qwen2", "qwen3", "phi", "mistral", "gemma2", "deepseek_v3"]
DOCUMENTS = [random_ids(64, seed=100 + i) for i in range(4)]


def blend(repair: str = "first_k", ratio: float = 0.15, **settings: Any) -> ReusePolicy:
    settings = {"min_prefill_saving": 0, "sink_tokens": 0, "progressive": False, **settings}
    return ReusePolicy(mode="blend", repair=repair, recompute_ratio=ratio, **settings)  # type: ignore[arg-type]


def prompt(order: Sequence[int], *, head: int = 21, tail: int = 20, seed: int = 0) -> torch.Tensor:
    """Documents in some order between a beginning and an end of their own."""
    parts = [random_ids(head, seed=seed), *(DOCUMENTS[i] for i in order), random_ids(tail, seed=seed + 50)]
    return torch.cat(parts, dim=1)


def generate(model: PreTrainedModel, inputs: dict[str, Any], cache: Any = None, **kwargs: Any) -> Any:
    kwargs = {"max_new_tokens": 8, "do_sample": False, **kwargs}
    call: Any = model.generate
    return call(**inputs, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **kwargs)


def store_with_documents(model: PreTrainedModel) -> ChunkStore:
    """Each document is stored at a position, and after a history, that no later prompt has."""
    store = ChunkStore(model, chunk_size=32)
    cache = ChunkReuseCache(model, store)
    for i, document in enumerate(DOCUMENTS):
        other = random_ids(32 * (i + 1), seed=900 + i)
        ids = torch.cat([other, document], dim=1).to(model.device)
        generate(model, as_inputs(ids), cache, max_new_tokens=1)
    cache.reset()
    return store


def assert_same(found: Any, expected: Any) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    for step, (one, other) in enumerate(zip(found.logits, expected.logits, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=lambda m, step=step: f"step {step}: {m}")


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        (name, attention)
        for name in MOVABLE
        for attention in ("sdpa", "eager", "kvboost_fa2")
        if (name, attention) != ("gemma2", "sdpa")
    ],
)
@pytest.mark.parametrize("repair", ["first_k", "cacheblend", "query"])
def test_with_everything_repaired_it_is_plain_generate(name: str, repair: str, attention: str) -> None:
    model = make_model(name)
    model.set_attn_implementation(attention)
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    cache = ChunkReuseCache(model, store_with_documents(model), blend(repair, 1.0))
    found = generate(model, inputs, cache)
    assert cache.report.moved_tokens == cache.report.recomputed_tokens == 256, cache.report.moved_reason
    assert_same(found, generate(model, inputs))


def test_a_chunk_behind_another_text_that_stands_where_it_stood() -> None:
    """Nothing is rotated."""
    model = make_model("llama")
    inputs = as_inputs(prompt([0], head=32))
    cache = ChunkReuseCache(model, store_with_documents(model), blend("first_k", 1.0))
    found = generate(model, inputs, cache)
    assert cache.report.moved_tokens == cache.report.recomputed_tokens == 64, cache.report.moved_reason
    assert_same(found, generate(model, inputs))


@pytest.mark.parametrize("name", MOVABLE)
@pytest.mark.parametrize("repair", [name for name in REPAIRS if name != "cacheblend"])
def test_forwarded_tokens_are_those_counted(name: str, repair: str) -> None:
    model = make_model(name)
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    assert blend_reason(model, REPAIRS[repair].measure) is None  # found out once, and not counted
    cache = ChunkReuseCache(model, store_with_documents(model), blend(repair))
    with counted(model) as work:
        generate(model, inputs, cache, max_new_tokens=1)
    report = cache.report
    looked = 20 if repair == "query" else 0  # the end of the prompt goes through twice
    assert report.moved_tokens == 256
    assert report.forwarded_tokens == work.tokens == 41 + report.recomputed_tokens + looked
    assert set(report.layer_tokens) == {work.tokens}
    assert report.prompt_tokens == 297
    most = {"none": 0, "first_k": 39, "query": 39, "selective": 64}[repair]
    assert most - 4 <= report.recomputed_tokens <= most


@pytest.mark.parametrize(("ratio", "calls"), [(0.0, 1), (0.15, 2)])
def test_the_end_is_asked_only_where_something_is_to_be_chosen(ratio: float, calls: int) -> None:
    model = make_model("llama")
    assert blend_reason(model, REPAIRS["query"].measure) is None
    cache = ChunkReuseCache(model, store_with_documents(model), blend("query", ratio))
    with counted(model) as work:
        generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=1)
    assert work.calls == calls


@pytest.mark.parametrize(("name", "like"), [("llama", "cacheblend"), ("deep_llama", "cacheblend")])
def test_a_model_of_few_layers_is_measured_layer_by_layer(name: str, like: str) -> None:
    model = make_model(name)
    layers = []
    for repair in ("auto", like):
        cache = ChunkReuseCache(model, store_with_documents(model), blend(repair))
        generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=1)
        layers.append(cache.report.layer_tokens)
    assert layers[0] == layers[1]


def test_a_deep_model_is_asked_what_it_attends_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_FEW_LAYERS", 7)
    model = make_model("deep_llama")
    cache = ChunkReuseCache(model, store_with_documents(model), blend("auto"))
    generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=1)
    assert cache.report.layer_tokens == (41 + 39 + 20,) * 8


@pytest.mark.parametrize("name", MOVABLE)
@torch.no_grad()
def test_progressive_repair_ends_with_the_kv_of_a_plain_forward(name: str) -> None:
    """Logits are those of plain from the second token on; the next turn is exact, and so is another cache with that
    prompt. The first token, which stands on what was moved, must not be."""
    model = make_model(name)
    if name == "gemma2":
        model.set_attn_implementation("eager")
    assert blend_reason(model, REPAIRS["none"].measure) is None
    store = store_with_documents(model)
    cache = ChunkReuseCache(model, store, blend("none", progressive=True))
    asked = prompt([2, 0, 3, 1])
    with counted(model) as work:
        found = generate(model, as_inputs(asked), cache, max_new_tokens=10, min_new_tokens=10)
    report = cache.report
    assert (report.moved_tokens, report.recomputed_tokens, report.forwarded_tokens) == (256, 0, 41)
    assert report.repaired_tokens == 276  # all behind the head, once
    assert (work.tokens, work.calls) == (41 + 276 + 9, 1 + 1 + 9)
    assert "276 repaired after the first token" in str(report)
    first, *later = off_from_plain(model, found)
    assert first > 1e-3 or name == "mistral"  # its window ends behind what was moved
    assert max(later) < 1e-4
    second = torch.cat([found.sequences, random_ids(30, seed=4)], dim=1)
    assert_same(generate(model, as_inputs(second), cache), generate(model, as_inputs(second)))
    assert cache.report.moved_tokens == 0
    assert cache.report.exact_tokens == found.sequences.shape[1] - 1
    other = ChunkReuseCache(model, store)
    assert_same(generate(model, as_inputs(asked), other), generate(model, as_inputs(asked)))
    assert other.report.exact_tokens >= 288


def off_from_plain(model: PreTrainedModel, found: Any) -> list[float]:
    """How far the logits of each token behind `prompt()` are from those of a plain forward, at most."""
    plain = model(found.sequences).logits[0]
    return [float((step[0] - plain[296 + at]).abs().max()) for at, step in enumerate(found.logits)]


@pytest.mark.parametrize(("at_once", "steps"), [(276, 1), (200, 2), (139, 2), (1, 3)])
@torch.no_grad()
def test_a_longer_prompt_is_repaired_in_thirds(monkeypatch: pytest.MonkeyPatch, at_once: int, steps: int) -> None:
    """As few tokens wait as the number of columns at once allows, and three at most. Only then it is plain."""
    monkeypatch.setattr(repair_later, "_AT_ONCE", at_once)
    model = make_model("llama")
    assert blend_reason(model, REPAIRS["none"].measure) is None
    cache = ChunkReuseCache(model, store_with_documents(model), blend("none", progressive=True))
    with counted(model) as work:
        found = generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=7, min_new_tokens=7)
    assert work.calls == 1 + steps + 6
    assert cache.report.repaired_tokens == 276 + steps - 1  # and the tokens decoded meanwhile
    off = off_from_plain(model, found)
    assert min(off[:steps]) > 1e-3
    assert max(off[steps:]) < 1e-4


def test_rows_are_repaired_each_from_its_own_first_moved_column() -> None:
    """One of them has nothing moved, and the rows are of unequal lengths."""
    model = make_model("llama")
    rows = left_pad(prompt([2, 0, 3, 1]), prompt([1, 3], head=40), random_ids(200, seed=77))
    cache = ChunkReuseCache(model, store_with_documents(model), blend("none", progressive=True))
    found = generate(model, rows, cache, max_new_tokens=10, min_new_tokens=10)
    assert cache.report.repaired_tokens > 256
    mask = torch.nn.functional.pad(rows["attention_mask"], (0, 10), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    plain = model(found.sequences, attention_mask=mask, position_ids=positions).logits
    for at, step in enumerate(found.logits[3:], 3):
        torch.testing.assert_close(step, plain[:, 296 + at], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["beams", "lookup", "crop", "forward"])
@torch.no_grad()
def test_progressive_repair_beside_what_else_happens_to_a_cache(way: str) -> None:
    """Beams are reordered, candidates are thrown away, the cache is cut, and several tokens come at once."""
    model = make_model("llama")
    asked = prompt([2, 0, 3, 1])
    cache = ChunkReuseCache(model, store_with_documents(model), blend("none", progressive=True))
    if way == "forward":
        model(asked, past_key_values=cache, logits_to_keep=1)
        more = random_ids(12, seed=8)
        logits = model(more, past_key_values=cache).logits
        assert cache.report.repaired_tokens == 276
        expected = model(torch.cat([asked, more], dim=1)).logits[:, -12:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        return
    options = {"beams": {"num_beams": 3}, "lookup": {"prompt_lookup_num_tokens": 3}, "crop": {}}[way]
    said = generate(model, as_inputs(asked), cache, max_new_tokens=8, min_new_tokens=8, **options).sequences
    if way == "crop":
        cache.crop(-6)
    second = torch.cat([said[:1], random_ids(20, seed=9)], dim=1)
    found = generate(model, as_inputs(second), cache)
    assert_same(found, generate(model, as_inputs(second)))
    assert cache.report.moved_tokens == 0


@pytest.mark.daily
@pytest.mark.parametrize("progressive", [True, 64])
@torch.no_grad()
def test_an_interrupted_repair_leaves_nothing_wrong(progressive: Any) -> None:
    model = make_model("llama")
    asked = prompt([2, 0, 3, 1])
    store = store_with_documents(model)
    cache = ChunkReuseCache(model, store, blend("none", progressive=progressive))
    model(asked, past_key_values=cache, logits_to_keep=1)
    with pytest.raises(RuntimeError, match="out of luck") as raised, OutOfLuck(torch.Tensor.scatter_):
        model(random_ids(1), past_key_values=cache)
    assert cache.repair() > 0
    assert cache.get_seq_length() == 297
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    assert raised.tb  # which may hold the forward whose hooks are gone
    longer = torch.cat([asked, random_ids(9, seed=4)], dim=1)
    assert_same(generate(model, as_inputs(longer), cache), generate(model, as_inputs(longer)))
    assert cache.report.moved_tokens == 0
    assert not store.check_integrity().wrong


def asked_of_a_cache(policy: ReusePolicy | None = None, **model: Any) -> tuple[Any, ChunkReuseCache, torch.Tensor]:
    """A model, a cache that holds a prompt with moved chunks, and that prompt with a few tokens more."""
    asked, llama = prompt([2, 0, 3, 1]), make_model("llama")
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = model.get("dropout", 0.0)
    cache = ChunkReuseCache(llama, store_with_documents(llama), policy or blend("none", progressive=True))
    generate(llama, as_inputs(asked), cache, max_new_tokens=1)
    assert cache.report.moved_tokens == 256
    return llama, cache, torch.cat([asked, random_ids(9, seed=4)], dim=1)


@pytest.mark.parametrize("change", ["training", "autocast", "hook", "attention"])
def test_an_idle_cache_is_repaired_by_the_model_of_its_prompt_only(change: str) -> None:
    """What is computed otherwise for a while is neither held nor stored; later the repair goes on."""
    model, cache, longer = asked_of_a_cache(dropout=0.5)
    with contextlib.ExitStack() as meanwhile:
        if change == "training":
            meanwhile.callback(model.train().eval)
        elif change == "autocast":
            meanwhile.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        elif change == "attention":
            model.set_attn_implementation("eager")
            meanwhile.callback(model.set_attn_implementation, "sdpa")
        else:
            handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
            meanwhile.callback(handle.remove)
        assert cache.repair() == 0
    assert cache.repair() == 276
    assert_same(generate(model, as_inputs(longer), cache), generate(model, as_inputs(longer)))
    assert cache.report.moved_tokens == 0
    assert not cache.store.check_integrity().wrong


def test_an_interrupted_repair_of_an_idle_cache_can_be_repeated() -> None:
    model, cache, longer = asked_of_a_cache()
    with pytest.raises(RuntimeError, match="out of luck"), OutOfLuck():
        cache.repair()
    assert cache.repair() == 276
    assert_same(generate(model, as_inputs(longer), cache), generate(model, as_inputs(longer)))
    assert cache.report.moved_tokens == 0


def test_a_cache_that_becomes_exact_lets_go_of_what_has_moved() -> None:
    model, cache, longer = asked_of_a_cache()
    cache.policy = ReusePolicy(min_prefill_saving=0)
    assert_same(generate(model, as_inputs(longer), cache), generate(model, as_inputs(longer)))
    assert (cache.report.moved_tokens, cache.report.exact_tokens) == (0, 21)


def test_a_repair_that_was_done_with_is_not_taken_up_for_the_next_prompt() -> None:
    model, cache, longer = asked_of_a_cache()
    cache.policy = blend("none")
    other = torch.cat([longer[:, :21], DOCUMENTS[1], random_ids(30)], dim=1)
    generate(model, as_inputs(other), cache, min_new_tokens=8)
    assert (cache.report.moved_tokens, cache.report.repaired_tokens) == (64, 0)


def test_rows_that_have_less_to_repair_are_counted_as_they_are_computed() -> None:
    """All rows of a forward are of the same length: those with fewer moved columns compute exact ones once more."""
    model = make_model("llama")
    rows = torch.cat([prompt([2, 0, 3, 1]), prompt([1, 3], head=85, tail=84)])
    cache = ChunkReuseCache(model, store_with_documents(model), blend("none"))
    generate(model, as_inputs(rows), cache, max_new_tokens=1)
    with counted(model) as work:
        assert cache.repair() == work.tokens == 2 * 276


def test_deviation_costs_two_layers_and_then_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("deep_llama")
    cache = ChunkReuseCache(model, store_with_documents(model), blend("cacheblend"))
    assert blend_reason(model, REPAIRS["cacheblend"].measure) is None
    taken: list[torch.Tensor] = []
    take = scatter._take

    def noted(value: Any, rows: torch.Tensor, width: int) -> Any:
        taken.extend([value] if isinstance(value, torch.Tensor) else [])
        return take(value, rows, width)

    monkeypatch.setattr(scatter, "_take", noted)
    generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=1)
    # In front of two layers: hidden states, positions, and cosines and sines, which are the same for those behind.
    assert len(taken) == 2 * 4
    report = cache.report
    # Then a little more than wanted, 1.15 times 15% of 256, and then as many.
    assert report.layer_tokens == (297, 297, 41 + 45, *(41 + 39,) * 5)
    assert report.forwarded_tokens == 135 < 0.5 * report.prompt_tokens
    assert report.moved_tokens == 256


def test_what_has_every_column_is_taken_for_those_that_go_on() -> None:
    """Wherever it is among the arguments of a layer; all else is left as it is."""
    rows = torch.tensor([[1, 3], [0, 2]])
    alike, own = torch.arange(4)[None, :, None], torch.arange(8).view(2, 4)
    others = torch.arange(4), torch.zeros(2, 5), torch.zeros(3, 4), "text", None
    found = scatter._take({"a": alike, "b": [own, (own, *others)]}, rows, 4)
    taken = [[1, 3], [4, 6]]
    assert found["a"][..., 0].tolist() == rows.tolist()
    assert found["b"][0].tolist() == found["b"][1][0].tolist() == taken
    assert all(one is other for one, other in zip(found["b"][1][1:], others, strict=True))


def test_what_is_as_it_was_stored_deviates_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("deep_llama")
    cache = ChunkReuseCache(model, store_with_documents(model), blend("cacheblend"))
    found: list[Any] = []
    deviation = scatter.ScatterPass._deviation

    def noted(self: Any, *args: Any) -> Any:
        found.append(deviation(self, *args))
        return found[-1]

    monkeypatch.setattr(scatter.ScatterPass, "_deviation", noted)
    generate(model, as_inputs(prompt([0, 2, 3, 1])), cache, max_new_tokens=1)
    assert 20 < (found[0] < 1e-6 * found[0].max()).sum() < 150


@pytest.mark.daily
@pytest.mark.parametrize("slack", [1.0, 1.15, 1.3])
def test_only_what_was_measured_goes_on(slack: float) -> None:
    """However even the deviations of those are that an earlier layer has kept."""
    moved = np.ones(100, dtype=bool)
    scores = np.where(np.arange(100) < 40, 1.0, -1.0)
    policy = blend("cacheblend", 0.1, max_recompute_ratio=1.0, min_coverage=0.95)
    chosen = REPAIRS["cacheblend"].choose(RepairRow(~moved, moved, (0,)), policy, scores, slack)
    assert not chosen[40:].any()
    assert chosen.sum() == min(40, math.ceil(slack * 38))


@pytest.mark.parametrize("repair", ["none", "selective", "cacheblend", "query"])
def test_padded_rows_of_unequal_length(repair: str) -> None:
    model = make_model("mistral")
    rows = [prompt([2, 0, 3, 1]), prompt([1, 3], seed=7), prompt([], head=40, seed=8)[:, :50]]
    for ratio in (1.0, 0.2):
        cache = ChunkReuseCache(model, store_with_documents(model), blend(repair, ratio))
        found = generate(model, left_pad(*rows), cache)
        assert cache.report.moved_tokens == 256 + 128 if repair != "cacheblend" else True
        if ratio == 1.0 and repair in ("cacheblend", "query"):
            assert_same(found, generate(model, left_pad(*rows)))


@pytest.mark.parametrize("repair", ["first_k", "cacheblend", "query"])
def test_a_row_of_which_nothing_is_stored(repair: str) -> None:
    """Without padding, it has no column that is there before it is computed."""
    model = make_model("llama")
    inputs = as_inputs(torch.cat([prompt([2, 0, 3, 1]), random_ids(297, seed=8)]))
    cache = ChunkReuseCache(model, store_with_documents(model), blend(repair, 1.0))
    found = generate(model, inputs, cache)
    assert cache.report.moved_tokens == 256
    assert_same(found, generate(model, inputs))


@pytest.mark.parametrize("repair", ["first_k", "cacheblend", "query"])
def test_a_row_that_begins_in_a_later_piece(repair: str) -> None:
    model = make_model("llama")
    inputs = left_pad(prompt([2, 0, 3, 1]), random_ids(40, seed=8))
    cache = ChunkReuseCache(model, store_with_documents(model), blend(repair, 1.0))
    found = generate(model, inputs, cache, prefill_chunk_size=100)
    assert cache.report.moved_tokens > 100
    assert_same(found, generate(model, inputs))


def test_rows_of_a_batch_get_what_they_would_get_alone() -> None:
    model = make_model("llama")
    first, second = prompt([2, 0, 3, 1]), prompt([1, 3, 2, 0], seed=7)
    both = generate(
        model, left_pad(first, second), ChunkReuseCache(model, store_with_documents(model), blend("selective"))
    )
    for row, alone in enumerate((first, second)):
        cache = ChunkReuseCache(model, store_with_documents(model), blend("selective"))
        expected = generate(model, as_inputs(alone), cache)
        torch.testing.assert_close(both.logits[0][row], expected.logits[0][0], rtol=1e-3, atol=1e-3)


def test_keys_that_are_not_rotated_give_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for all others: with a wrong rotation, logits of moved K/V are far off."""
    from tests.internals.compat import KeyRotation

    model = make_model("llama")
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    plain = generate(model, inputs).logits[0]
    right = generate(model, inputs, ChunkReuseCache(model, store_with_documents(model), blend("none"))).logits[0]
    monkeypatch.setattr(KeyRotation, "rotate", lambda self, idx, keys, shift, out: out.copy_(keys))
    wrong = generate(model, inputs, ChunkReuseCache(model, store_with_documents(model), blend("none"))).logits[0]
    assert (wrong - right).abs().max() > 0.1
    assert (right - plain).abs().max() > 0.01  # it is a repair that is missing there


def test_the_same_history_elsewhere_needs_no_repair() -> None:
    """All of a text, further on: rotated keys alone must give what the text gives there, without what is before it."""
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=32)
    text = torch.cat(DOCUMENTS, dim=1)
    generate(model, as_inputs(text), ChunkReuseCache(model, store), max_new_tokens=1)
    shifted = torch.cat([random_ids(37, seed=1), text, random_ids(17, seed=2)], dim=1)
    cache = ChunkReuseCache(model, store, blend("none"))
    generate(model, as_inputs(shifted), cache, max_new_tokens=1)
    assert cache.report.moved_tokens >= 224
    fresh = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    generate(model, as_inputs(text), fresh, max_new_tokens=1)
    for layer, other in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(layer.values[:, :, 37 : 37 + 224], other.values[:, :, :224])


def test_what_is_behind_moved_chunks_never_continues_exact_ones() -> None:
    """Not even where somebody else has stored the same tokens, cut at the same places."""
    model = make_model("llama")
    store = ChunkStore(model, chunk_size=16)
    moved = random_ids(16, seed=1)
    generate(model, as_inputs(torch.cat([random_ids(32, seed=2), moved], dim=1)), ChunkReuseCache(model, store))
    cache = ChunkReuseCache(model, store, blend("none"))
    asked = torch.cat([random_ids(16, seed=3), moved, random_ids(20, seed=4)], dim=1)
    generate(model, as_inputs(asked), cache, max_new_tokens=1)
    assert cache.report.moved_tokens == 16
    exact = ChunkReuseCache(model, store)
    generate(model, as_inputs(asked), exact, max_new_tokens=1)
    longer = torch.cat([asked, random_ids(40, seed=5)], dim=1)
    generate(model, as_inputs(longer), cache, max_new_tokens=1)
    exact.reset()
    assert_same(generate(model, as_inputs(longer), exact), generate(model, as_inputs(longer)))
    assert exact.report.exact_tokens == 48


def test_a_blended_cache_stays_so_in_later_turns() -> None:
    model = make_model("llama")
    store = store_with_documents(model)
    cache = ChunkReuseCache(model, store, blend("none"))
    first = generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=4)
    second = torch.cat([first.sequences, random_ids(60, seed=4)], dim=1)
    generate(model, as_inputs(second), cache, max_new_tokens=4)
    report = cache.report
    assert report.moved_tokens > 256  # all that was computed behind moved chunks
    assert report.exact_tokens <= 21
    assert report.forwarded_tokens <= 62
    cache.reset()
    exact = ChunkReuseCache(model, store)
    assert_same(generate(model, as_inputs(second), exact), generate(model, as_inputs(second)))
    assert exact.report.exact_tokens <= 21


def test_what_is_before_the_moved_chunks_can_be_gone_on_from() -> None:
    """Where a blended prompt was cut says nothing of the one that takes its place."""
    model = make_model("llama")
    store = store_with_documents(model)
    start = random_ids(21)
    other = torch.cat([start, random_ids(100, seed=7)], dim=1)
    generate(model, as_inputs(other), ChunkReuseCache(model, store), max_new_tokens=1)
    cache = ChunkReuseCache(model, store, blend("none"))
    generate(model, as_inputs(torch.cat([start, DOCUMENTS[1], random_ids(20)], dim=1)), cache, max_new_tokens=1)
    assert cache.report.moved_tokens == 64
    found = generate(model, as_inputs(other), cache)
    assert cache.report.exact_tokens == 96
    assert_same(found, generate(model, as_inputs(other)))
    third = torch.cat([start, random_ids(100, seed=8)], dim=1)
    generate(model, as_inputs(third), cache, max_new_tokens=1)
    exact = ChunkReuseCache(model, store)
    generate(model, as_inputs(third), exact, max_new_tokens=1)
    assert exact.report.exact_tokens == 96


def test_new_documents_of_a_blended_pass_are_found_later() -> None:
    model = make_model("llama")
    store = store_with_documents(model)
    fresh = random_ids(64, seed=500)
    asked = torch.cat([random_ids(21), DOCUMENTS[1], fresh, DOCUMENTS[2], random_ids(20, seed=50)], dim=1)
    cache = ChunkReuseCache(model, store, blend("selective"))
    generate(model, as_inputs(asked), cache, max_new_tokens=1)
    assert cache.report.moved_tokens == 128
    later = torch.cat([random_ids(33, seed=6), fresh, random_ids(20, seed=51)], dim=1)
    cache = ChunkReuseCache(model, store, blend("selective"))
    generate(model, as_inputs(later), cache, max_new_tokens=1)
    assert cache.report.moved_tokens == 64


def test_after_a_blended_prompt_candidates_are_verified() -> None:
    model = make_model("llama")
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    plain = generate(model, inputs, ChunkReuseCache(model, store_with_documents(model), blend("selective")))
    cache = ChunkReuseCache(model, store_with_documents(model), blend("selective"))
    assisted = generate(model, inputs, cache, prompt_lookup_num_tokens=3)
    assert cache.report.moved_tokens == 256
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    draft = make_model("llama", seed=1)
    cache = ChunkReuseCache(model, store_with_documents(model), blend("selective"))
    assisted = generate(model, inputs, cache, assistant_model=draft)
    assert assisted.sequences.tolist() == plain.sequences.tolist()


def test_beams_after_a_blended_prompt() -> None:
    model = make_model("llama")
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    cache = ChunkReuseCache(model, store_with_documents(model), blend("query", 1.0))
    found = generate(model, inputs, cache, num_beams=3)
    assert cache.report.moved_tokens == 3 * 256
    assert found.sequences.tolist() == generate(model, inputs, num_beams=3).sequences.tolist()


def test_a_prompt_in_pieces_finds_moved_chunks() -> None:
    model = make_model("llama")
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    cache = ChunkReuseCache(model, store_with_documents(model), blend("query", 1.0))
    found = generate(model, inputs, cache, prefill_chunk_size=100)
    assert cache.report.moved_tokens > 100
    assert found.sequences.tolist() == generate(model, inputs).sequences.tolist()


def test_pieces_without_moved_chunks_count_too() -> None:
    model = make_model("llama")
    assert blend_reason(model, REPAIRS["first_k"].measure) is None
    inputs = as_inputs(prompt([2, 0, 3, 1], tail=150))
    cache = ChunkReuseCache(model, store_with_documents(model), blend())
    with counted(model) as work:
        generate(model, inputs, cache, prefill_chunk_size=100, max_new_tokens=1)
    report = cache.report
    assert report.moved_tokens > 100
    assert report.forwarded_tokens == work.tokens
    assert report.layer_tokens == (work.tokens,) * 2
    assert report.moved_reason is None
    assert "Nothing was moved" not in report.explain()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = make_model("llama").to(dtype)
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    cache = ChunkReuseCache(model, store_with_documents(model), blend("cacheblend", 1.0))
    found = generate(model, inputs, cache, max_new_tokens=1).logits[0].float()
    plain = generate(model, inputs, max_new_tokens=1).logits[0].float()
    assert cache.report.moved_tokens == 256
    assert (found - plain).abs().max() < 0.1 * plain.std()


@pytest.mark.parametrize("name", ["gpt2", "bloom", "qwen3_next", "falcon_h1"])
def test_what_cannot_be_moved_is_computed(name: str) -> None:
    model = make_model(name)
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    cache = ChunkReuseCache(model, store_with_documents(model), blend())
    assert_same(generate(model, inputs, cache), generate(model, inputs))
    assert cache.report.moved_tokens == 0
    assert cache.report.moved_reason is not None
    assert "Nothing was moved" in cache.report.explain()


def test_little_is_not_moved() -> None:
    model = make_model("llama")
    inputs = as_inputs(prompt([2]))
    cache = ChunkReuseCache(model, store_with_documents(model), blend("none", min_prefill_saving=65))
    assert_same(generate(model, inputs, cache), generate(model, inputs))
    assert "min_prefill_saving" in str(cache.report.moved_reason)
    cache = ChunkReuseCache(model, store_with_documents(model), blend("none", min_prefill_saving=64))
    generate(model, inputs, cache)
    assert cache.report.moved_tokens == 64


@pytest.mark.parametrize(("repair", "saves"), [("none", 128), ("query", 128 - 2 * 20 - 2 * 10)])
def test_what_is_saved_is_what_is_not_forwarded(repair: str, saves: int) -> None:
    """The end of the prompt goes through twice for some repairs, in each row."""
    model = make_model("llama")
    inputs = as_inputs(torch.cat([prompt([2]), prompt([1], seed=7)]))
    store = store_with_documents(model)
    cache = ChunkReuseCache(model, store, blend(repair, min_prefill_saving=saves + 1, seam_tokens=4))
    generate(model, inputs, cache, max_new_tokens=1)
    assert cache.report.moved_tokens == 0
    assert "min_prefill_saving" in str(cache.report.moved_reason)
    cache = ChunkReuseCache(model, store_with_documents(model), blend(repair, min_prefill_saving=saves, seam_tokens=4))
    generate(model, inputs, cache, max_new_tokens=1)
    assert cache.report.forwarded_tokens == cache.report.prompt_tokens - saves


def test_sinks_are_not_moved() -> None:
    model = make_model("llama")
    asked = torch.cat([DOCUMENTS[3], DOCUMENTS[1], random_ids(20)], dim=1)
    cache = ChunkReuseCache(model, store_with_documents(model), blend("none", sink_tokens=16))
    generate(model, as_inputs(asked), cache)
    assert 64 <= cache.report.moved_tokens < 128


def test_other_salts_and_other_weights_are_never_moved() -> None:
    model = make_model("llama")
    store = store_with_documents(model)
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    other = ChunkReuseCache(model, store, blend("none"), salt="somebody else")
    generate(model, inputs, other)
    assert other.report.moved_tokens == 0
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    changed = ChunkReuseCache(model, store, blend("none"))
    generate(model, inputs, changed)
    assert changed.report.moved_tokens == 0


class OutOfLuck(TorchFunctionMode):
    """Fails at the second call of a function: in the MLP of the second layer."""

    def __init__(self, function: Any = torch.nn.functional.silu) -> None:
        super().__init__()
        self._function, self.seen = function, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._function:
            self.seen += 1
            if self.seen == 2:
                raise RuntimeError("out of luck")
        return func(*args, **(kwargs or {}))


@pytest.mark.daily
@pytest.mark.parametrize("function", [torch.nn.functional.silu, torch.Tensor.scatter_], ids=["MLP", "writing K/V"])
def test_an_error_in_the_middle_leaves_the_cache_usable(function: Any) -> None:
    model = make_model("llama")
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    store = store_with_documents(model)
    generate(model, inputs, ChunkReuseCache(model, store, blend("selective")))
    cache = ChunkReuseCache(model, store, blend("selective"))
    with pytest.raises(RuntimeError, match="out of luck") as raised, OutOfLuck(function):
        generate(model, inputs, cache)
    expected = generate(model, inputs, ChunkReuseCache(model, store_with_documents(model), blend("selective")))
    found = generate(model, inputs, cache)
    assert cache.report.moved_tokens == 256
    assert_same(found, expected)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    assert raised.tb  # which may hold the forward whose hooks are gone


def test_a_failed_forward_leaves_nothing_on_the_model() -> None:
    model = make_model("llama")
    assert blend_reason(model, REPAIRS["selective"].measure) is None
    cache = ChunkReuseCache(model, store_with_documents(model), blend("selective"))
    with pytest.raises(RuntimeError, match="out of luck"), OutOfLuck():
        generate(model, as_inputs(prompt([2, 0, 3, 1])), cache)
    # With `kernels`, the models of transformers 5.17 themselves cannot be pickled.
    pickle.dumps([module._forward_pre_hooks for module in model.modules()])
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_another_cache_may_end_its_forward_at_any_time() -> None:
    """torch reads which hooks a layer has, and before it calls each, with what."""
    model = make_model("llama")
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    plain = generate(model, inputs)
    other = ChunkReuseCache(model, store_with_documents(model), blend("selective"))
    assert blend_reason(model, REPAIRS["selective"].measure) is None
    with pytest.raises(RuntimeError, match="out of luck"), OutOfLuck():
        generate(model, inputs, other)
    layer: Any = model.model.layers[1]
    assert len(layer._forward_pre_hooks) == 1
    handle = layer.register_forward_pre_hook(lambda module, args: other.reset(), prepend=True)
    assert_same(generate(model, inputs), plain)
    assert sum(not only_looks(hook) for hook in layer._forward_pre_hooks.values()) == 1
    handle.remove()
    generate(model, inputs, ChunkReuseCache(model, other.store))
    assert not layer._forward_pre_hooks


def test_repair_tells_kvboost_fa2_where_its_queries_are() -> None:
    """No matrix of queries and columns is made for the forward over scattered columns."""
    model = make_model("mistral")
    model.set_attn_implementation("kvboost_fa2")
    inputs = as_inputs(prompt([2, 0, 3, 1]))
    cache = ChunkReuseCache(model, store_with_documents(model), blend("first_k", 0.3))
    calls: list[tuple[bool, bool]] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func) == "kvboost_hf.attend.default":
                _, columns, _, mask = args[4]
                calls.append((columns is not None, mask is not None))
            return func(*args, **(kwargs or {}))

    assert blend_reason(model, REPAIRS["first_k"].measure) is None
    with Watch():
        generate(model, inputs, cache, max_new_tokens=1)
    assert cache.report.moved_tokens > cache.report.recomputed_tokens > 0
    assert calls == [(True, False)] * model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers sets it
def test_an_attention_without_masks_of_ones_own_is_refused_and_the_others_are_named() -> None:
    """Of moved chunks, and of trees."""
    model = make_model("llama")
    measure = REPAIRS["first_k"].measure
    for kind in ("sdpa", "eager", "kvboost_fa2"):
        model.set_attn_implementation(kind)
        assert (blend_reason(model, measure), branch_reason(model)) == (None, None)
    model.set_attn_implementation("flex_attention")
    if (broken := probe_reason(model)) is not None:
        pytest.skip(f"What PyTorch compiles of flex_attention for this CPU is wrong: {broken}.")
    for reason in (blend_reason(model, measure), branch_reason(model)):
        assert reason is not None
        assert reason.endswith("use sdpa, eager or kvboost_fa2")
