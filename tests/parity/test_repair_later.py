"""The repair after the first token: along with decoding steps, and while a cache is idle."""

import copy
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ReusePolicy, TreeDecoding, attach, detach
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.cache import REPAIRS, CacheParts, blend_reason, costs, idle, idle_of, repair_later, scatter
from tests.parity.test_blend import (
    MOVABLE,
    OutOfLuck,
    assert_same,
    blend,
    generate,
    off_from_plain,
    prompt,
    store_with_documents,
)
from tests.server.wire import until


def riding(columns: Any = 64) -> ReusePolicy:
    return blend("none", progressive=columns)


def prepared(name: str = "llama") -> PreTrainedModel:
    model = make_model(name)
    if name == "gemma2":
        model.set_attn_implementation("eager")
    assert blend_reason(model, REPAIRS["none"].measure) is None  # found out once, and not counted
    return model


def wait_until_idle_work_is_done(cache: ChunkReuseCache) -> None:
    assert idle_of(cache).wait(30)


@pytest.fixture
def no_idle_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle.Idle, "begin", lambda *given: None)


# Riding


REASONS = {
    "ride": "on a CPU each further token of a forward takes its time",
    False: "`progressive` is False, or None where much text has moved behind few edits",
    True: None,
    64: None,
}


@pytest.mark.parametrize("columns", REASONS)
def test_the_report_says_why_nothing_rides(columns: Any, no_idle_repair: None) -> None:
    """As long as something is left as it was moved."""
    model = prepared()
    cache = ChunkReuseCache(model, store_with_documents(model), riding(columns))
    generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=1)
    assert cache.report.moved_tokens > 150
    assert cache.report.riding_reason == REASONS[columns]
    assert (str(REASONS[columns]) in cache.report.explain()) is (REASONS[columns] is not None)
    cache.repair()
    assert cache.report.riding_reason is None


@pytest.mark.parametrize("name", MOVABLE)
@pytest.mark.parametrize(("columns", "steps"), [(1000, 1), (276, 1), (275, 2), (64, 5), (50, 6)])
@torch.no_grad()
def test_each_step_takes_some_columns_along(name: str, columns: int, steps: int, no_idle_repair: None) -> None:
    """In as many forwards as plain has. Once all are computed again, logits and K/V are those of plain."""
    model = prepared(name)
    store = store_with_documents(model)
    cache = ChunkReuseCache(model, store, riding(columns))
    asked = prompt([2, 0, 3, 1])
    with counted(model) as work:
        found = generate(model, as_inputs(asked), cache, max_new_tokens=12, min_new_tokens=12)
    again = 276 + steps - 1  # and the tokens decoded meanwhile
    assert (work.calls, work.tokens) == (12, 41 + again + 11)
    assert cache.report.repaired_tokens == again
    off = off_from_plain(model, found)
    assert name == "mistral" or off[0] > 1e-3  # its window ends behind what was moved
    assert name == "mistral" or steps < 3 or max(off[1 : steps - 1]) > 1e-4  # not plain before all is repaired
    assert max(off[steps:]) < 1e-4
    second = torch.cat([found.sequences, random_ids(30, seed=4)], dim=1)
    assert_same(generate(model, as_inputs(second), cache), generate(model, as_inputs(second)))
    assert cache.report.moved_tokens == 0
    other = ChunkReuseCache(model, store)
    assert_same(generate(model, as_inputs(asked), other), generate(model, as_inputs(asked)))
    assert other.report.exact_tokens >= 288
    assert not store.check_integrity().wrong


@torch.no_grad()
def test_an_answer_that_is_too_short_leaves_the_rest_to_the_next_turn(no_idle_repair: None) -> None:
    model = prepared()
    cache = ChunkReuseCache(model, store_with_documents(model), riding(50))
    asked = prompt([2, 0, 3, 1])
    said = generate(model, as_inputs(asked), cache, max_new_tokens=3, min_new_tokens=3).sequences
    assert cache.report.repaired_tokens == 100
    second = torch.cat([said, random_ids(30, seed=4)], dim=1)
    found = generate(model, as_inputs(second), cache, max_new_tokens=12, min_new_tokens=12)
    assert cache.report.moved_tokens > 100
    plain = model(found.sequences).logits[0]
    off = [float((step[0] - plain[second.shape[1] - 1 + at]).abs().max()) for at, step in enumerate(found.logits)]
    assert off[0] > 1e-4
    assert max(off[-4:]) < 1e-4
    assert not cache.store.check_integrity().wrong


def test_rows_ride_each_from_its_own_first_moved_column(no_idle_repair: None) -> None:
    """One of them has nothing moved, and the rows are of unequal lengths."""
    model = prepared()
    rows = left_pad(prompt([2, 0, 3, 1]), prompt([1, 3], head=40), random_ids(200, seed=77))
    generate(model, rows, ChunkReuseCache(model), max_new_tokens=1)  # probes
    cache = ChunkReuseCache(model, store_with_documents(model), riding(100))
    with counted(model) as work:
        found = generate(model, rows, cache, max_new_tokens=10, min_new_tokens=10)
    assert work.calls == 10
    mask = torch.nn.functional.pad(rows["attention_mask"], (0, 10), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    plain = model(found.sequences, attention_mask=mask, position_ids=positions).logits
    for at, step in enumerate(found.logits[4:], 4):
        torch.testing.assert_close(step, plain[:, 296 + at], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["beams", "lookup", "sampled", "crop", "forward", "interrupted", "hidden states"])
@pytest.mark.parametrize("columns", [7, 64, 300])
@torch.no_grad()
def test_riding_beside_what_else_happens_to_a_cache(way: str, columns: int, no_idle_repair: None) -> None:
    model = prepared()
    asked = prompt([2, 0, 3, 1])
    cache = ChunkReuseCache(model, store_with_documents(model), riding(columns))
    if way in ("forward", "interrupted", "hidden states"):
        model(asked, past_key_values=cache, logits_to_keep=1)
        more = random_ids(12, seed=8)
        if way == "interrupted":
            with pytest.raises(RuntimeError, match="out of luck"), OutOfLuck():
                model(more, past_key_values=cache)
        with_states = way == "hidden states"
        out = model(more, past_key_values=cache, output_hidden_states=with_states)
        logits, shown = out.logits, out.hidden_states
        assert logits.shape[1] == 12
        assert not with_states or {tuple(each.shape[:2]) for each in shown} == {(1, 12)}
        assert (cache.report.repaired_tokens == 0) == with_states
        if columns == 300 and not with_states:
            expected = model(torch.cat([asked, more], dim=1)).logits[:, -12:]
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        assert cache.repair() >= 0
        said = torch.cat([asked, more], dim=1)
    else:
        options: dict[str, Any] = {
            "beams": {"num_beams": 3},
            "lookup": {"prompt_lookup_num_tokens": 3},
            "sampled": {"do_sample": True, "num_return_sequences": 2},
        }.get(way, {})
        said = generate(model, as_inputs(asked), cache, max_new_tokens=8, min_new_tokens=8, **options).sequences
        if way == "crop":
            cache.crop(-6)
        cache.repair()
    second = torch.cat([said[:1], random_ids(20, seed=9)], dim=1)
    assert_same(generate(model, as_inputs(second), cache), generate(model, as_inputs(second)))
    assert cache.report.moved_tokens == 0
    assert not cache.store.check_integrity().wrong


@pytest.mark.parametrize(
    ("rows", "progressive", "repaired"),
    [pytest.param(1, True, 276, marks=pytest.mark.daily), (2, True, 276), (1, 64, 0)],
)
@torch.no_grad()
def test_with_trees_nothing_rides(rows: int, progressive: Any, repaired: int, no_idle_repair: None) -> None:
    """They fill the room themselves; what `True` has computed before a token is computed before the first tree."""
    model = prepared()
    cache = ChunkReuseCache(model, store_with_documents(model), riding(progressive))
    asked = [prompt([2, 0, 3, 1]), prompt([1, 3, 0, 2])][:rows]
    trees = TreeDecoding(make_model("llama", seed=3))
    inputs = {"input_ids": torch.cat(asked), "attention_mask": torch.ones(rows, asked[0].shape[1], dtype=torch.long)}
    found = generate(model, inputs, cache, custom_generate=trees, max_new_tokens=12, min_new_tokens=12)
    assert cache.report.repaired_tokens == rows * repaired
    plain = model(found.sequences).logits
    off = [float((step - plain[:, 296 + at]).abs().max()) for at, step in enumerate(found.logits)]
    assert off[0] > 1e-3
    assert (max(off[1:]) < 1e-4) == bool(repaired)
    assert not cache.store.check_integrity().wrong


def test_how_many_columns_are_nearly_free_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared()
    asked: list[int] = []

    def seconds(model: PreTrainedModel, tokens: int) -> float:
        asked.append(tokens)
        return 1.0 + max(0, tokens - 50)

    monkeypatch.setattr(costs, "_seconds_of_forward", seconds)
    monkeypatch.setattr(costs, "weights_come_and_go", lambda model: True)
    cache = ChunkReuseCache(model, store_with_documents(model), riding("ride"))
    for _ in range(2):
        cache.reset()
        generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=3, min_new_tokens=3)
    assert asked == [1, 9, 17, 33, 65]
    assert costs.free_columns(model) == 32
    rows = left_pad(prompt([2, 0, 3, 1]), prompt([0, 2, 1, 3]))
    cache = ChunkReuseCache(model, store_with_documents(model), riding("ride"))
    with counted(model) as work:
        generate(model, rows, cache, max_new_tokens=2, min_new_tokens=2)
    assert work.tokens == 2 * 41 + 2 * (16 + 1)  # of all rows together


def test_the_time_of_a_forward() -> None:
    assert 0 < costs._seconds_of_forward(prepared(), 1) < 60


@pytest.mark.parametrize("streamed", [False, True])
def test_where_nothing_is_free_nothing_rides(
    monkeypatch: pytest.MonkeyPatch, no_idle_repair: None, streamed: bool
) -> None:
    """Nor is anything measured where weights lie in the memory of a CPU."""
    model = prepared()
    monkeypatch.setattr(costs, "weights_come_and_go", lambda model: streamed)
    monkeypatch.setattr(costs, "_seconds_of_forward", lambda model, tokens: 1 / streamed * tokens)
    cache = ChunkReuseCache(model, store_with_documents(model), riding("ride"))
    with counted(model) as work:
        generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=6, min_new_tokens=6)
    assert work.tokens == 41 + 5
    assert cache.report.repaired_tokens == 0


# Idle


@torch.no_grad()
def test_an_idle_cache_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_later, "_IDLE_PIECE", 100)
    model = prepared()
    store = store_with_documents(model)
    cache = ChunkReuseCache(model, store, riding(10))
    asked = prompt([2, 0, 3, 1])
    said = generate(model, as_inputs(asked), cache, max_new_tokens=3, min_new_tokens=3).sequences
    wait_until_idle_work_is_done(cache)
    assert cache.report.repaired_tokens == 278  # all behind the head, and the two tokens that the cache holds
    second = torch.cat([said, random_ids(30, seed=4)], dim=1)
    assert_same(generate(model, as_inputs(second), cache), generate(model, as_inputs(second)))
    assert (cache.report.moved_tokens, cache.report.forwarded_tokens) == (0, 31)
    other = ChunkReuseCache(model, store)
    assert_same(generate(model, as_inputs(asked), other), generate(model, as_inputs(asked)))
    assert other.report.exact_tokens >= 288
    assert not store.check_integrity().wrong


def test_what_an_attached_call_has_left_is_repaired() -> None:
    model = prepared()
    store = store_with_documents(model)
    asked = prompt([2, 0, 3, 1])
    attach(model, store=store, policy=riding(10))
    model.generate(**as_inputs(asked), max_new_tokens=3, min_new_tokens=3)
    until(lambda: ChunkReuseCache(model, store).stored_tokens(asked) >= 296, "nothing was repaired")
    detach(model)
    assert not store.check_integrity().wrong


def test_no_repair_begins_once_another_thread_uses_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread comes at the end of the call, just before what is left of it would begin to be repaired."""
    model = prepared()
    cache = ChunkReuseCache(model, store_with_documents(model), riding(10))
    begin, coming = CacheParts.begin_idle, list[Any]()

    def begin_later(parts: CacheParts) -> None:
        coming.append(pool.submit(cache.store_all))
        wait(coming, timeout=0.3)
        begin(parts)

    monkeypatch.setattr(CacheParts, "begin_idle", begin_later)
    with ThreadPoolExecutor(1) as pool:
        generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=3, min_new_tokens=3)
        assert len(coming) == 1
        assert coming[0].result(30)
    assert not idle_of(cache).busy


@pytest.mark.parametrize("progressive", [False, True])
def test_other_policies_do_nothing_when_idle(progressive: bool) -> None:
    model = prepared()
    cache = ChunkReuseCache(model, store_with_documents(model), blend("none", progressive=progressive))
    generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=1)
    wait_until_idle_work_is_done(cache)
    assert cache.report.repaired_tokens == 0


class Halted:
    """Halts the idle repair in its layer `idx`, until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, idx: int = 1) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        real, main = scatter.ScatterPass.update, threading.get_ident()

        def update(under_way: Any, layer: int, *args: Any) -> Any:
            if layer == idx and threading.get_ident() != main:
                self.reached.set()
                assert self.go_on.wait(30)
            return real(under_way, layer, *args)

        monkeypatch.setattr(scatter.ScatterPass, "update", update)


@pytest.mark.parametrize("comes", ["call", "crop", "copy", "other cache", "plain", "layers", "reset", "reorder"])
@torch.no_grad()
def test_whoever_comes_ends_it_within_a_layer(monkeypatch: pytest.MonkeyPatch, comes: str) -> None:
    """What it has left in the layers is computed again, and neither used as exact nor stored."""
    model = prepared()
    store = store_with_documents(model)
    cache, other = ChunkReuseCache(model, store, riding(10)), ChunkReuseCache(model, store)
    asked = prompt([2, 0, 3, 1])
    halted = Halted(monkeypatch)
    said = generate(model, as_inputs(asked), cache, max_new_tokens=3, min_new_tokens=3).sequences
    assert halted.reached.wait(30)
    threading.Timer(0.2, halted.go_on.set).start()
    second = torch.cat([said, random_ids(30, seed=4)], dim=1)
    if comes == "crop":
        cache.crop(-2)
    elif comes == "copy":
        cache = copy.deepcopy(cache)
    elif comes == "other cache":
        generate(model, as_inputs(asked), other, max_new_tokens=1)
    elif comes == "plain":
        model(asked)
    elif comes == "layers":
        assert len(cache.layers) == model.config.num_hidden_layers
    elif comes == "reset":
        cache.reset()
    elif comes == "reorder":
        cache.reorder_cache(torch.LongTensor([0]))
    if comes != "call":
        wait_until_idle_work_is_done(cache)
        again = comes in ("other cache", "plain")  # it goes on when those have ended
        assert cache.report.repaired_tokens in ((278,) if again else (20, 0))  # 0 of a copy, or after a reset
    found = generate(model, as_inputs(second), cache, max_new_tokens=40, min_new_tokens=40)
    plain = model(found.sequences).logits[0]
    assert float((found.logits[-1][0] - plain[-2]).abs().max()) < 1e-4
    wait_until_idle_work_is_done(cache)
    assert not store.check_integrity().wrong


def left_to_repair(store: Any, model: PreTrainedModel, order: list[int]) -> ChunkReuseCache:
    """A cache whose call has ended before all was repaired."""
    cache = ChunkReuseCache(model, store, riding(10))
    generate(model, as_inputs(prompt(order)), cache, max_new_tokens=3, min_new_tokens=3)
    return cache


def test_caches_that_come_meanwhile_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest of them; one that is used again has none, and one that nobody refers to any more has."""
    monkeypatch.setattr(idle, "_MOST_WAITING", 3)
    first, second = prepared(), make_model("llama", seed=1)
    store, other = store_with_documents(first), store_with_documents(second)
    halted = Halted(monkeypatch)
    worked_on = left_to_repair(store, first, [2, 0, 3, 1])
    assert halted.reached.wait(30)
    orders = [[3, 2, 0, 1], [1, 0, 3, 2], [0, 2, 1, 3], [3, 0, 2, 1], [1, 3, 2, 0]]
    waiting = [left_to_repair(other, second, order) for order in orders]
    assert [idle_of(cache).wait(0) for cache in (worked_on, *waiting)] == [False, True, True, False, False, False]
    left, used = waiting[0], waiting[3]
    used.crop(-1)
    last = waiting.pop().report
    assert last.repaired_tokens == 20
    halted.go_on.set()
    for cache in (worked_on, waiting[2]):
        wait_until_idle_work_is_done(cache)
        assert cache.report.repaired_tokens == 278
    seen = ChunkReuseCache(second, other)
    until(lambda: seen.stored_tokens(prompt(orders[4])) >= 288, "nothing was repaired")
    assert (left.report.repaired_tokens, used.report.repaired_tokens) == (20, 20)
    assert not store.check_integrity().wrong
    assert not other.check_integrity().wrong


def test_no_more_kv_waits_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = prepared(), make_model("llama", seed=1)
    store, other = store_with_documents(first), store_with_documents(second)
    halted = Halted(monkeypatch)
    worked_on = left_to_repair(store, first, [2, 0, 3, 1])
    assert halted.reached.wait(30)
    waiting = [left_to_repair(other, second, [3, 2, 0, 1])]
    other.max_bytes = 4 * int(1.5 * waiting[0].nbytes)
    waiting.append(left_to_repair(other, second, [1, 0, 3, 2]))
    assert [idle_of(cache).wait(0) for cache in waiting] == [True, False]
    halted.go_on.set()
    wait_until_idle_work_is_done(waiting[1])
    wait_until_idle_work_is_done(worked_on)
    assert [cache.report.repaired_tokens for cache in (worked_on, *waiting)] == [278, 20, 278]


def test_a_call_of_another_cache_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried between its tokens; the pauses in between take no lock."""
    model = prepared()
    store = store_with_documents(model)
    tries: list[float] = []
    real = repair_later._compute_again

    def compute(*given: Any) -> Any:
        tries.append(time.monotonic())
        return real(*given)

    halted = Halted(monkeypatch)
    cache = left_to_repair(store, model, [2, 0, 3, 1])
    assert halted.reached.wait(30)
    monkeypatch.setattr(repair_later, "_compute_again", compute)
    halted.go_on.set()
    took: list[float] = []

    class Slow:
        def put(self, value: torch.Tensor) -> None:
            took.append(time.monotonic())
            time.sleep(0.05)

        def end(self) -> None:
            took.append(time.monotonic())

    model.generate(**as_inputs(random_ids(20)), max_new_tokens=8, min_new_tokens=8, streamer=Slow())
    wait_until_idle_work_is_done(cache)
    assert cache.report.repaired_tokens == 278
    assert tries
    assert not [at for at in tries if took[1] < at < took[-1]]


@pytest.mark.parametrize("change", ["training", "hook", "weights", "attention"])
@torch.no_grad()
def test_a_piece_that_another_model_has_computed_does_not_count(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    model = prepared()
    store = store_with_documents(model)
    cache = ChunkReuseCache(model, store, riding(10))
    asked = prompt([2, 0, 3, 1])
    halted = Halted(monkeypatch)
    said = generate(model, as_inputs(asked), cache, max_new_tokens=3, min_new_tokens=3).sequences
    assert halted.reached.wait(30)
    if change == "training":
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        model.train()
    elif change == "hook":
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
    elif change == "weights":
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    else:
        model.set_attn_implementation("eager")
    halted.go_on.set()
    wait_until_idle_work_is_done(cache)
    assert cache.report.repaired_tokens == 20
    model.eval()
    second = torch.cat([said, random_ids(30, seed=4)], dim=1)
    if change != "hook":
        found = generate(model, as_inputs(second), cache, max_new_tokens=40, min_new_tokens=40)
        plain = model(found.sequences).logits[0]
        assert float((found.logits[-1][0] - plain[-2]).abs().max()) < 1e-4
    wait_until_idle_work_is_done(cache)
    assert not store.check_integrity().wrong


@pytest.mark.parametrize("ends", ["piece", "stopped", "error"])
@torch.no_grad()
def test_what_another_model_has_left_in_the_layers_is_not_used(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Such as one whose adapter was off for a moment: afterwards the model is as before."""
    model = prepared()
    store = store_with_documents(model)
    cache = ChunkReuseCache(model, store, riding(10))
    halted = Halted(monkeypatch)
    said = generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=3, min_new_tokens=3).sequences
    assert halted.reached.wait(30)
    if ends == "error":
        monkeypatch.setattr(scatter.ScatterPass, "update", lambda *args: 1 / 0)
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
    threading.Timer(0.1, halted.go_on.set).start()
    if ends == "stopped":
        model(said)
    wait_until_idle_work_is_done(cache)
    hook.remove()
    monkeypatch.undo()
    longer = as_inputs(torch.cat([said, random_ids(9)], dim=1))
    generate(model, longer, cache, max_new_tokens=1)
    assert cache.report.dropped_reason is not None
    assert cache.report.tier_tokens["live"] == 0
    cache.repair()
    assert_same(generate(model, longer, cache), generate(model, longer))
    assert not store.check_integrity().wrong


@pytest.mark.slow
@torch.no_grad()
def test_turns_that_come_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn cuts an idle repair short at another place; the last one is as plain."""
    monkeypatch.setattr(repair_later, "_IDLE_PIECE", 16)
    model = prepared("deep_llama")
    store = store_with_documents(model)
    text = prompt([2, 0, 3, 1])
    for turn in range(40):
        cache = ChunkReuseCache(model, store, riding(1 + turn % 3))
        found = generate(model, as_inputs(text), cache, max_new_tokens=2, min_new_tokens=2)
        time.sleep(0.0007 * (turn % 13))
        longer = torch.cat([found.sequences, random_ids(9, seed=turn)], dim=1)
        found = generate(model, as_inputs(longer), cache, max_new_tokens=2, min_new_tokens=2)
        cache.repair()
        again = torch.cat([found.sequences, random_ids(9, seed=turn + 99)], dim=1)
        assert_same(generate(model, as_inputs(again), cache), generate(model, as_inputs(again)))
        store.clear()
        store = store_with_documents(model) if turn % 4 == 3 else store
    assert not store.check_integrity().wrong


def test_an_idle_repair_in_inference_mode() -> None:
    model = prepared()
    cache = ChunkReuseCache(model, store_with_documents(model), riding(10))
    with torch.inference_mode():
        generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=3, min_new_tokens=3)
        wait_until_idle_work_is_done(cache)
    assert cache.report.repaired_tokens == 278


def test_whoever_comes_finds_the_device_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may use another stream than the thread of the idle repair does."""
    waited: list[bool] = []

    class Link:
        is_apart = staticmethod(lambda device: True)
        current = staticmethod(lambda device: None)

        def record(self, stream: None) -> Any:
            return self

        def synchronize(self) -> None:
            waited.append(idle_of(cache).wait(0))

    model = prepared()
    cache = ChunkReuseCache(model, store_with_documents(model), riding(10))
    monkeypatch.setattr(repair_later, "link", Link())
    halted = Halted(monkeypatch)
    generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=2)
    assert halted.reached.wait(30)
    threading.Timer(0.2, halted.go_on.set).start()
    cache.repair()
    assert waited == [False]


def test_an_error_of_the_model_ends_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = prepared()
    cache = ChunkReuseCache(model, store_with_documents(model), riding(10))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(repair_later, "_compute_again", fail)
    generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=3, min_new_tokens=3)
    wait_until_idle_work_is_done(cache)
    assert "out of memory" in caplog.text


@pytest.mark.slow
def test_a_process_can_end_or_fork_in_the_middle_of_it() -> None:
    code = """
        import os, sys
        import torch
        from tests.parity.test_repair_later import *
        model = prepared("deep_llama")
        repair_later._IDLE_PIECE = 1
        cache = ChunkReuseCache(model, store_with_documents(model), riding(1))
        said = generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=2, min_new_tokens=2).sequences
        assert not idle_of(cache).wait(0)
        if sys.argv[1] == "fork":
            if child := os.fork():
                assert os.waitpid(child, 0)[1] == 0
            else:
                torch.set_num_threads(1)
                longer = torch.cat([said, random_ids(9)], dim=1)
                generate(model, as_inputs(longer), cache, max_new_tokens=2)
                os._exit(0)
        print("at the end")
    """
    for way in ("end", *(["fork"] if sys.platform == "linux" else [])):
        began = time.monotonic()
        run = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), way]
        done = subprocess.run(run, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (0, "at the end\n"), done.stderr
        assert "Traceback" not in done.stderr
        assert time.monotonic() - began < 60
