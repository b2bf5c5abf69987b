"""A call that is under way has its cache for itself: calls within calls, threads, generators, and earlier answers."""

import asyncio
import contextlib
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import CacheInUseError, ChunkReuseCache, ChunkStore, ReusePolicy, attach, last_cache
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.compat import CACHE
from tests.internals.compat import calls as generate_calls

FIRST, SECOND = random_ids(40, seed=1), random_ids(33, seed=2)
KINDS: dict[str, dict[str, Any]] = {
    "growing": {"max_cache_len": None},
    "auto": {},
    "fixed": {"max_cache_len": 96},
    "static": {"cache_implementation": "static"},
}


def plain(name: str, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return make_model(name).generate(**as_inputs(ids), **{"max_new_tokens": 8, **kwargs})


def attached(name: str, kind: str) -> tuple[PreTrainedModel, ChunkStore, Callable[..., Any]]:
    model, options = make_model(name), dict(KINDS[kind])
    implementation = {key: options.pop(key) for key in ("cache_implementation",) if key in options}
    store = ChunkStore(model, chunk_size=16)
    attach(model, store, **options)

    def generate(ids: torch.Tensor, **kwargs: Any) -> Any:
        return model.generate(**as_inputs(ids), **{"max_new_tokens": 8, **implementation, **kwargs})

    return model, store, generate


class Calls(LogitsProcessor, BaseStreamer):
    """Calls a function at each token, as a processor or a streamer may."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._call()
        return scores

    def put(self, value: torch.Tensor) -> None:
        self._call()

    def end(self) -> None:
        self._call()


class Criterion(StoppingCriteria):
    """Calls a function at each token, and never ends the answer."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._call()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _as_argument(place: str, call: Callable[[], Any]) -> dict[str, Any]:
    return {
        "processor": {"logits_processor": [Calls(call)]},
        "criterion": {"stopping_criteria": [Criterion(call)]},
        "streamer": {"streamer": Calls(call)},
    }[place]  # type: ignore[return-value]


@pytest.mark.parametrize("place", ["processor", "criterion", "streamer"])
@pytest.mark.parametrize(("name", "kind"), [*[("llama", kind) for kind in KINDS], ("mistral", "fixed")])
def test_a_call_within_a_call(name: str, kind: str, place: str) -> None:
    _, store, generate = attached(name, kind)
    inner: list[torch.Tensor] = []
    for ids in (FIRST, SECOND):  # an earlier call has left its buffers to the second one
        found = generate(ids, **_as_argument(place, lambda: inner.append(generate(SECOND))))
        assert torch.equal(found, plain(name, ids))
    expected = plain(name, SECOND)
    assert len(inner) >= 16
    assert all(torch.equal(each, expected) for each in inner)
    assert store.check_integrity().wrong == 0


def test_a_call_within_a_call_within_a_call() -> None:
    _, store, generate = attached("llama", "fixed")
    found: list[torch.Tensor] = []

    def innermost() -> None:
        found.append(generate(SECOND[:, :20], max_new_tokens=2))

    def inner() -> None:
        found.append(generate(SECOND, max_new_tokens=2, logits_processor=[Calls(innermost)]))

    outer = generate(FIRST, max_new_tokens=3, logits_processor=[Calls(inner)])
    assert torch.equal(outer, plain("llama", FIRST, max_new_tokens=3))
    for answer in found:
        assert torch.equal(answer, plain("llama", answer[:, :-2], max_new_tokens=2))
    assert store.check_integrity().wrong == 0


@pytest.mark.parametrize(("name", "kind"), [("llama", "growing"), ("llama", "fixed"), ("qwen3_next", "growing")])
@pytest.mark.parametrize("where", ["model.layers.1", ""])
def test_a_call_within_a_forward(name: str, kind: str, where: str) -> None:
    """A hook that calls generate(), within the forward of another call, also where a state is saved on the way."""
    model, store, generate = attached(name, kind)
    found: list[torch.Tensor] = []
    under_way: list[None] = []

    def hook(*_: Any) -> None:
        if not under_way:
            under_way.append(None)
            found.append(generate(SECOND, max_new_tokens=3))
            under_way.clear()

    handle = model.get_submodule(where).register_forward_pre_hook(hook)
    for ids in (FIRST, SECOND, FIRST):
        assert torch.equal(generate(ids, max_new_tokens=3), plain(name, ids, max_new_tokens=3))
    handle.remove()
    expected = plain(name, SECOND, max_new_tokens=3)
    assert found
    assert all(torch.equal(each, expected) for each in found)
    assert store.check_integrity().wrong == 0


@pytest.mark.parametrize("kind", KINDS)
def test_text_so_far_in_a_call_within_a_call(kind: str) -> None:
    _, store, generate = attached("llama", kind)
    seen: list[torch.Tensor] = []

    class OfText(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(generate(input_ids.clone(), max_new_tokens=2))
            return scores

    assert torch.equal(generate(FIRST, logits_processor=[OfText()]), plain("llama", FIRST))
    for answer in seen:
        assert torch.equal(answer, plain("llama", answer[:, :-2], max_new_tokens=2))
    assert store.check_integrity().wrong == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_answer_keeps_its_cache(kind: str) -> None:
    model, _, generate = attached("llama", kind)
    first = generate(FIRST, return_dict_in_generate=True)
    held = int(first[CACHE].get_seq_length())
    for ids in (SECOND, FIRST, SECOND):
        assert torch.equal(generate(ids), plain("llama", ids))
    assert int(first[CACHE].get_seq_length()) == held
    longer = torch.cat([first.sequences, SECOND[:, :5]], dim=1)
    found = model.generate(
        input_ids=longer[:, held:], attention_mask=torch.ones_like(longer), **{CACHE: first[CACHE]}, max_new_tokens=8
    )
    assert torch.equal(found, plain("llama", longer)[:, held:])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_an_earlier_answer_keep_what_they_hold(kind: str) -> None:
    """Somebody may keep the layers, or the list of them, and not the cache."""
    _, _, generate = attached("llama", kind)
    kept = [
        lambda cache: cache.layers[0],
        lambda cache: cache.layers,
        lambda cache: list(cache.layers),
    ]
    first = []
    for keep in kept:
        for ids in (SECOND, FIRST):
            found = generate(ids, return_dict_in_generate=True)
        layers = keep(found[CACHE])
        layer = layers[0] if isinstance(layers, list) else layers
        first.append((layers, layer, layer.keys.clone()))
        del found, layers, layer
    generate(SECOND)
    for _, layer, keys in first:
        assert torch.equal(layer.keys, keys)


def test_ids_that_continue_other_rows_are_refused(llama: PreTrainedModel) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16))
    first = llama.generate(**as_inputs(FIRST), **{CACHE: cache}, max_new_tokens=8)
    rows, mask = SECOND.repeat(2, 1), torch.ones(2, 47 + 33, dtype=torch.long)
    for call in (
        lambda: llama(rows, **{CACHE: cache}),
        lambda: llama.generate(input_ids=rows, attention_mask=mask, **{CACHE: cache}, max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match=r"`input_ids` has 2 rows, and the ChunkReuseCache holds 1.*Pass 1"):
            call()
    longer = torch.cat([first, SECOND], dim=1)
    assert torch.equal(llama.generate(**as_inputs(longer), **{CACHE: cache}, max_new_tokens=8), plain("llama", longer))


def test_buffers_of_a_fixed_size_serve_call_after_call() -> None:
    model, _, generate = attached("llama", "fixed")
    places = set()
    gc.disable()
    try:
        for ids in (FIRST, SECOND, FIRST, SECOND[:, :1]):
            with contextlib.suppress(ValueError):
                generate(random_ids(200, seed=9))  # does not fit
            generate(ids)
            cache = last_cache(model)
            assert cache  # which asks for its length
            places.add(cache.parts.live.static_layers[0].buffers[0].data_ptr())
            del cache
    finally:
        gc.enable()
    assert len(places) == 1


@pytest.mark.parametrize("max_cache_len", [None, 96])
@pytest.mark.parametrize("place", ["processor", "criterion", "streamer"])
def test_one_cache_for_a_call_and_one_within_it_is_refused(
    llama: PreTrainedModel, place: str, max_cache_len: int | None
) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16), max_cache_len=max_cache_len)

    def generate(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return llama.generate(**as_inputs(ids), max_new_tokens=8, **{CACHE: cache}, **kwargs)

    def within() -> None:
        calls.append(place)
        if place != "streamer" or len(calls) > 1:  # it gets the prompt before the call has taken the cache
            with pytest.raises(CacheInUseError, match=r"generate\(\) call around this one, in the same thread"):
                generate(SECOND)

    for ids in (FIRST, SECOND):
        calls: list[str] = []
        assert torch.equal(generate(ids, **_as_argument(place, within)), plain("llama", ids))
    assert torch.equal(generate(FIRST), plain("llama", FIRST))
    assert cache.store.check_integrity().wrong == 0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_call_within_another_that_has_not_begun_to_compute(name: str) -> None:
    """Prompt lookup asks the processors of a call before its first forward."""
    model, calls = make_model(name), list[int]()
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))

    def within(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(input_ids.shape[1])
        with pytest.raises(CacheInUseError, match=r"generate\(\) call around this one, in the same thread"):
            model.generate(**as_inputs(SECOND), **{CACHE: cache}, max_new_tokens=2)
        return scores

    ids = torch.cat([FIRST, FIRST[:, :-3]], dim=1)
    for _ in range(2):
        found = model.generate(
            **as_inputs(ids),
            **{CACHE: cache},
            prompt_lookup_num_tokens=4,
            logits_processor=[within],
            max_new_tokens=8,
            do_sample=False,
        )
        assert torch.equal(found, plain(name, ids))
    assert len(calls) > 10
    assert cache.store.check_integrity().wrong == 0


def test_a_loop_may_hand_its_cache_on(llama: PreTrainedModel) -> None:
    """A `custom_generate` that calls generate() with the cache that it was given, and goes on with it."""

    def loop(model: Any, input_ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> torch.Tensor:
        return model.generate(input_ids, **{CACHE: kwargs[CACHE]}, max_new_tokens=8)

    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16))
    for ids in (FIRST, torch.cat([FIRST, SECOND], dim=1)):
        found = llama.generate(**as_inputs(ids), **{CACHE: cache}, custom_generate=loop, max_new_tokens=8)
        assert torch.equal(found, plain("llama", ids))


def _yielding(model: Any, input_ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> Iterator[int]:
    cache, ids = kwargs[CACHE], input_ids
    for _ in range(8):
        held = int(cache.get_seq_length())
        out = model(ids[:, held:], **{CACHE: cache}, logits_to_keep=1, return_dict=True)
        cache = out[CACHE]
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], dim=1)
        yield int(ids[0, -1])


@pytest.mark.parametrize("kind", ["growing", "fixed"])
def test_a_loop_may_return_what_yields(llama: PreTrainedModel, kind: str) -> None:
    """It runs when generate() has returned, and nothing in it has the configuration of the call."""

    def loop(model: Any, input_ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> Iterator[int]:
        return (token for token in _without_configuration(model, input_ids, kwargs[CACHE]))

    store = ChunkStore(llama, chunk_size=16)
    cache = ChunkReuseCache(llama, store, max_cache_len=None if kind == "growing" else 256)
    llama.generate(**as_inputs(SECOND), **{CACHE: cache}, max_new_tokens=4)
    for _ in range(2):
        found = list(llama.generate(**as_inputs(FIRST), **{CACHE: cache}, custom_generate=loop, max_new_tokens=8))
        assert found == plain("llama", FIRST)[0, FIRST.shape[1] :].tolist()[:8]
        assert cache.report.bypass_reason is None
    assert store.check_integrity().wrong == 0


def _without_configuration(model: Any, ids: torch.Tensor, cache: Any) -> Iterator[int]:
    for _ in range(8):
        held = int(cache.get_seq_length())
        with torch.no_grad():
            out = model(ids[:, held:], **{CACHE: cache}, logits_to_keep=1, return_dict=True)
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], dim=1)
        yield int(ids[0, -1])


@pytest.mark.parametrize("kind", ["growing", "fixed"])
def test_loops_that_yield_take_turns(kind: str) -> None:
    _, store, generate = attached("llama", kind)
    for _ in range(2):
        loops = [generate(ids, custom_generate=_yielding) for ids in (FIRST, SECOND)]
        tokens = [list(pair) for pair in zip(*loops, strict=True)]
        for row, ids in enumerate((FIRST, SECOND)):
            expected = plain("llama", ids)[0, ids.shape[1] :].tolist()
            assert [pair[row] for pair in tokens] == expected[: len(tokens)]
    assert store.check_integrity().wrong == 0


def test_one_cache_for_two_loops_that_yield_is_refused(llama: PreTrainedModel) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16))
    llama.generate(**as_inputs(SECOND), **{CACHE: cache}, max_new_tokens=4)
    first = llama.generate(**as_inputs(FIRST), **{CACHE: cache}, custom_generate=_yielding, max_new_tokens=8)
    tokens = [next(first)]
    with pytest.raises(CacheInUseError, match="generate"):
        llama.generate(**as_inputs(SECOND), **{CACHE: cache}, max_new_tokens=8)
    tokens += first
    assert tokens == plain("llama", FIRST)[0, FIRST.shape[1] :].tolist()[: len(tokens)]
    assert torch.equal(llama.generate(**as_inputs(SECOND), **{CACHE: cache}, max_new_tokens=8), plain("llama", SECOND))


@pytest.mark.parametrize("max_cache_len", [None, 96])
def test_one_cache_in_several_threads_is_refused(llama: PreTrainedModel, max_cache_len: int | None) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16), max_cache_len=max_cache_len)
    prompts = [random_ids(20 + 3 * at, seed=at) for at in range(4)]
    expected = [plain("llama", ids) for ids in prompts]
    refused: list[str] = []
    right: list[int] = []
    wrong: list[int] = []
    start = threading.Barrier(len(prompts))

    def run(at: int) -> None:
        start.wait()
        for _ in range(6):
            try:
                found = llama.generate(**as_inputs(prompts[at]), **{CACHE: cache}, max_new_tokens=8)
            except CacheInUseError as error:
                refused.append(str(error))
            else:
                (right if torch.equal(found, expected[at]) else wrong).append(at)

    threads = [threading.Thread(target=run, args=(at,), name=f"caller-{at}") for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert right
    assert all("in thread 'caller-" in each for each in refused)
    assert torch.equal(llama.generate(**as_inputs(FIRST), **{CACHE: cache}, max_new_tokens=8), plain("llama", FIRST))
    assert cache.store.check_integrity().wrong == 0


@pytest.mark.parametrize(
    ("name", "part"), [("root", "ledger"), ("content_keys", "ledger"), ("max_cache_len", "static")]
)
def test_what_another_thread_drops_as_it_is_read(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    """Whoever watches a cache in use is told of what there was."""
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16), max_cache_len=96)
    llama.generate(**as_inputs(FIRST), **{CACHE: cache}, max_new_tokens=2)
    expected, there = getattr(cache, name), [getattr(cache.parts.live, part)]
    assert there != [None]
    told = property(lambda _: there.pop() if there else None)
    monkeypatch.setattr(type(cache.parts.live), part, told, raising=False)
    assert getattr(cache, name) == expected


def test_a_cache_has_layers_while_others_are_made(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks on in another thread finds those that there were."""
    live, seen = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16)).parts.live, list[int]()
    make = vars(sys.modules[type(live).__module__])["make_layers"]
    noting = lambda *given, **more: (seen.append(len(live.layers)), make(*given, **more))[1]  # noqa: E731
    monkeypatch.setattr(f"{type(live).__module__}.make_layers", noting)
    live.take_form(llama, None)
    assert seen == [2]


def test_a_generator_that_yields_while_the_stack_of_its_thread_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that has yielded does not tell who has called it: the call around it is under way all the same."""
    entered, leave, threads, frames = threading.Event(), threading.Event(), list[int](), sys._current_frames
    suspended: Any = (number for number in range(2))
    next(suspended)
    tops: list[Any] = [suspended.gi_frame]

    def generate(generation_config: Any) -> None:
        threads.append(threading.get_ident())
        entered.set()
        assert leave.wait(30)

    config = GenerationConfig()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(generate, config)
        assert entered.wait(30)
        monkeypatch.setattr(sys, "_current_frames", lambda: {threads[0]: tops.pop()} if tops else frames())
        assert generate_calls.is_under_way(config, threads[0])
        leave.set()


@pytest.mark.parametrize("look", ["is_under_way", "is_in_stock_loop", "is_in_forward", "is_running"])
def test_no_garbage_is_collected_while_the_stack_of_another_thread_is_read(
    llama: PreTrainedModel, request: pytest.FixtureRequest, look: str
) -> None:
    """Python 3.11 collects as it makes a frame's object: finalizers let the thread return, and the frame is gone."""
    entered, leave, threads, within = threading.Event(), threading.Event(), list[int](), set[str]()

    def generate(generation_config: Any, depth: int = 9) -> None:
        if depth:
            return generate(generation_config, depth - 1)
        threads.append(threading.get_ident())
        entered.set()
        assert leave.wait(30)

    def note(phase: str, info: dict[str, int]) -> None:
        code = sys._getframe(1).f_code
        within.add(code.co_name if code.co_filename == generate_calls.__file__ else "elsewhere")

    given: Any = {"is_running": llama, "is_in_forward": ChunkReuseCache(llama)}.get(look, GenerationConfig())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(generate, given)
        assert entered.wait(30)
        request.addfinalizer(partial(gc.set_threshold, *gc.get_threshold()))
        request.addfinalizer(partial(gc.callbacks.remove, note))
        gc.callbacks.append(note)
        gc.set_threshold(1)
        getattr(generate_calls, look)(given, *threads[: look != "is_running"])
        gc.set_threshold(0)
        leave.set()
    assert within <= {"elsewhere", "stays"}
    assert gc.isenabled()


CHANGES: dict[str, tuple[str, Callable[[ChunkReuseCache], Any]]] = {  # with a part of it that takes its time
    "reset": ("drop", lambda cache: cache.reset()),
    "crop": ("can_crop", lambda cache: cache.crop(-3)),
    "fork": ("share_into", lambda cache: cache.fork()),
    "pickle": ("claimed", lambda cache: cache.__reduce__()),
    "rows": ("selected", lambda cache: cache.batch_repeat_interleave(1)),
    "salt": ("drop", lambda cache: setattr(cache, "salt", "other")),
    "store": ("claimed", lambda cache: cache.store_all()),
    "tails": ("claimed", lambda cache: cache.store_tails()),
    "policy": ("claimed", lambda cache: setattr(cache, "policy", ReusePolicy())),
    "repair": ("claimed", lambda cache: cache.repair()),
}


def refused(changes: Iterable[Callable[[], Any]]) -> int:
    """How many of them say that the cache is in use."""
    count = 0
    for change in changes:
        try:
            change()
        except CacheInUseError:
            count += 1
    return count


def test_a_cache_that_another_thread_uses_is_not_changed(llama: PreTrainedModel) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16))
    found: list[int] = []
    disturbing: list[Callable[[], Any]] = [
        *(partial(change, cache) for _, change in CHANGES.values()),
        lambda: llama(SECOND[:, :4], **{CACHE: cache}),
    ]

    def within() -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(refused, disturbing).result())

    answer = llama.generate(**as_inputs(FIRST), **{CACHE: cache}, max_new_tokens=8, logits_processor=[Calls(within)])
    assert torch.equal(answer, plain("llama", FIRST))
    assert found == [len(disturbing)] * 8


@contextlib.contextmanager
def changed_by_another_thread(cache: ChunkReuseCache, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another thread is in the middle of a change."""
    place, change = CHANGES[name]
    inside, go_on, live = threading.Event(), threading.Event(), type(cache.parts.live)
    real = getattr(live, place)

    def halted(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(live, place, halted)
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change, cache)
        assert inside.wait(30)
        monkeypatch.setattr(live, place, real)
        try:
            yield
        finally:
            go_on.set()
        changing.result()


@pytest.mark.parametrize("name", [name for name, (place, _) in CHANGES.items() if place != "claimed"])
def test_a_cache_that_another_thread_changes_is_not_used(
    name: str, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16))
    llama.generate(**as_inputs(FIRST), **{CACHE: cache}, max_new_tokens=8)
    with changed_by_another_thread(cache, name, monkeypatch):
        others = [partial(change, cache) for _, change in CHANGES.values()]
        calls = [
            lambda: llama.generate(**as_inputs(SECOND), **{CACHE: cache}, max_new_tokens=8),
            lambda: llama(SECOND[:, :4], **{CACHE: cache}),
        ]
        assert refused([*others, *calls]) == len(others) + 2
    for ids in (FIRST, SECOND):
        assert torch.equal(llama.generate(**as_inputs(ids), **{CACHE: cache}, max_new_tokens=8), plain("llama", ids))
    assert cache.store.check_integrity().wrong == 0


READ: list[Callable[[ChunkReuseCache], Any]] = [
    lambda cache: cache.report,
    lambda cache: (cache.root, cache.content_keys, cache.nbytes, len(cache.layers), cache.get_seq_length()),
    lambda cache: cache.stored_tokens(FIRST),
    lambda cache: cache.movable_spans(FIRST, 0),
    lambda cache: cache.store.check_integrity(),
    lambda cache: cache.repair_when_idle(),
]


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("mode", ["exact", "blend"])
@pytest.mark.usefixtures("switching_often")
def test_calls_and_changes_of_many_threads(mode: Any, llama: PreTrainedModel) -> None:
    """Whatever is not refused is right: answers of exact reuse, and what is stored."""
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16), ReusePolicy(mode=mode, min_prefill_saving=0))
    texts = [random_ids(48, seed=at) for at in range(4)]
    prompts = [torch.cat([texts[at], texts[at - 1], texts[at - 2]], dim=1) for at in range(4)]
    expected = [plain("llama", ids, max_new_tokens=4) for ids in prompts]
    changes = [*(change for _, change in CHANGES.values()), *READ]
    ends, right, wrong = time.monotonic() + 2, list[int](), list[int]()

    def use(seed: int) -> None:
        drawn = random.Random(seed)
        while time.monotonic() < ends or not (right or wrong):
            at = drawn.randrange(4)
            with contextlib.suppress(CacheInUseError):
                if seed % 2:
                    drawn.choice(changes)(cache)
                    time.sleep(1e-3)
                    continue
                found = llama.generate(**as_inputs(prompts[at]), **{CACHE: cache}, max_new_tokens=4)
                (right if mode != "exact" or torch.equal(found, expected[at]) else wrong).append(at)

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(torch.no_grad()(use), seed) for seed in range(4)]:
            each.result()
    assert right
    assert not wrong
    assert cache.store.check_integrity().wrong == 0


def test_a_call_goes_on_while_another_thread_changes_the_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store, generate = attached("llama", "growing")
    generate(FIRST)
    cache = last_cache(model)
    assert cache is not None
    with changed_by_another_thread(cache, "fork", monkeypatch):
        assert torch.equal(generate(SECOND), plain("llama", SECOND))
    assert store.check_integrity().wrong == 0


def test_nobody_has_the_cache_of_a_call_before_that_has_taken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, generate = attached("llama", "growing")
    serve, known = ChunkReuseCache.serve_call, list[bool]()

    def serve_call(cache: ChunkReuseCache, call: Any) -> None:
        known.append(last_cache(model) is cache)
        serve(cache, call)

    monkeypatch.setattr(ChunkReuseCache, "serve_call", serve_call)
    generate(FIRST)
    assert known == [False]
    assert last_cache(model) is not None


def test_forwards_by_hand_in_two_threads(llama: PreTrainedModel) -> None:
    """One after the other is served, also from another thread; one within the other is refused."""
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16))
    inside, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        inside.set()
        go_on.wait(10)

    handle = llama.model.layers[0].register_forward_pre_hook(hold)
    thread = threading.Thread(target=lambda: llama(FIRST, **{CACHE: cache}, logits_to_keep=1))
    thread.start()
    inside.wait(10)
    handle.remove()
    with pytest.raises(CacheInUseError, match="runs a forward with it"):
        llama(SECOND, **{CACHE: cache}, logits_to_keep=1)
    go_on.set()
    thread.join()
    more = llama(SECOND[:, :3], **{CACHE: cache}).logits
    expected = make_model("llama")(torch.cat([FIRST, SECOND[:, :3]], dim=1)).logits[:, -3:]
    torch.testing.assert_close(more, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_asyncio(kind: str) -> None:
    _, store, generate = attached("llama", kind)
    prompts = [random_ids(20 + 3 * at, seed=at) for at in range(4)]

    async def all_of_them() -> list[torch.Tensor]:
        return await asyncio.gather(*(asyncio.to_thread(generate, ids) for ids in prompts * 3))

    for ids, found in zip(prompts * 3, asyncio.run(all_of_them()), strict=True):
        assert torch.equal(found, plain("llama", ids))
    assert store.check_integrity().wrong == 0


@pytest.mark.parametrize("max_cache_len", [None, 96])
def test_a_call_that_failed_holds_no_cache(llama: PreTrainedModel, max_cache_len: int | None) -> None:
    """Somebody may keep the exception, whose traceback refers to all that the call had."""
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16), max_cache_len=max_cache_len)
    kept = []

    def fail() -> None:
        if int(cache.get_seq_length()) > 42:
            raise ZeroDivisionError

    for ids in (FIRST, SECOND, FIRST):
        with pytest.raises(ZeroDivisionError) as info:
            llama.generate(**as_inputs(FIRST), **{CACHE: cache}, max_new_tokens=8, logits_processor=[Calls(fail)])
        kept.append(info)
        assert torch.equal(llama.generate(**as_inputs(ids), **{CACHE: cache}, max_new_tokens=8), plain("llama", ids))


def test_a_plain_cache_of_an_attached_model_goes_its_own_way() -> None:
    """What a caller brings is the caller's, also within a call."""
    model, _, generate = attached("llama", "fixed")
    own = DynamicCache(config=model.config)
    inner = [lambda: model.generate(**as_inputs(SECOND), **{CACHE: own}, max_new_tokens=1)]
    found = generate(FIRST, logits_processor=[Calls(lambda: inner and inner.pop()())])
    assert torch.equal(found, plain("llama", FIRST))
    assert own.get_seq_length() == SECOND.shape[1]
