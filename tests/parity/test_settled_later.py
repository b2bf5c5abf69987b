"""Prompts go to the store when their first token has been handed out, and never later than generate() returns."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, check_model_compatibility, detach
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.cache import Reused, running
from tests.parity.compare import same_as_plain

PROMPT = random_ids(300)


class Watching(BaseStreamer):
    """Counts the store's chunks when the prompt comes, and at each token."""

    def __init__(self, store: ChunkStore, fails_at: int | None = None) -> None:
        self.store, self.fails_at = store, fails_at
        self.chunks: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.chunks.append(self.store.stats()["chunks"])
        if len(self.chunks) - 1 == self.fails_at:
            raise RuntimeError("the client is gone")

    def end(self) -> None:
        pass


def generate(model: PreTrainedModel, cache: ChunkReuseCache | None, new: int = 3, **kwargs: Any) -> Any:
    given = {"past_key_values": cache} if cache is not None else {}
    return model.generate(**as_inputs(PROMPT), **given, **kwargs, max_new_tokens=new, do_sample=False)


@pytest.fixture
def store(llama: PreTrainedModel) -> ChunkStore:
    check_model_compatibility(llama)  # the first hit of a model would be preceded by probes, which count
    return ChunkStore(llama, chunk_size=64)


def test_after_the_first_token(llama: PreTrainedModel, store: ChunkStore) -> None:
    watching = Watching(store)
    generate(llama, ChunkReuseCache(llama, store), streamer=watching)
    assert watching.chunks == [0, 0, 4, 4]  # with the prompt, and with each token
    assert store.stats()["chunks"] == 4


def test_a_call_of_one_token(llama: PreTrainedModel, store: ChunkStore) -> None:
    """Also where nobody keeps the cache."""
    generate(llama, ChunkReuseCache(llama, store), 1)
    assert store.stats()["chunks"] == 4
    cache = ChunkReuseCache(llama, store)
    generate(llama, cache, 1)
    assert cache.report.reused_tokens >= 256


def test_a_call_that_fails(llama: PreTrainedModel, store: ChunkStore) -> None:
    cache = ChunkReuseCache(llama, store)
    with pytest.raises(RuntimeError, match="the client is gone"):
        generate(llama, cache, streamer=Watching(store, fails_at=1))
    assert store.stats()["chunks"] == 4
    assert same_as_plain(llama, cache, PROMPT) == 299


def test_while_somebody_keeps_the_failed_call(llama: PreTrainedModel, store: ChunkStore) -> None:
    """The cache's next use stores what it left, whatever that is."""
    caught: list[BaseException] = []
    for look in (
        lambda cache: cache.report,
        lambda cache: cache.store,
        lambda cache: cache.store_tails(),
        lambda cache: cache.fork(),
        lambda cache: cache.reset(),
        lambda cache: generate(llama, cache),
    ):
        store.clear()
        cache = ChunkReuseCache(llama, store)
        try:
            generate(llama, cache, streamer=Watching(store, fails_at=1))
        except RuntimeError as error:
            caught.append(error)
        assert store.stats()["chunks"] == 0
        look(cache)
        assert store.stats()["chunks"] >= 4


def test_beams_assistants_and_pieces(llama: PreTrainedModel, store: ChunkStore) -> None:
    plain = generate(llama, None, num_beams=3)
    assert torch.equal(generate(llama, ChunkReuseCache(llama, store), num_beams=3), plain)
    assert store.stats()["chunks"] == 4
    store.clear()
    plain = generate(llama, None, prompt_lookup_num_tokens=3)
    assert torch.equal(generate(llama, ChunkReuseCache(llama, store), prompt_lookup_num_tokens=3), plain)
    assert store.stats()["chunks"] == 4
    store.clear()
    watching = Watching(store)
    generate(llama, ChunkReuseCache(llama, store), prefill_chunk_size=100, streamer=watching)
    assert watching.chunks[:3] == [0, 3, 4]  # the last piece is not stored yet


def test_other_calls_store_at_once(llama: PreTrainedModel, store: ChunkStore) -> None:
    """Nobody tells when a loop by hand has handed out its token."""
    with torch.no_grad():
        llama(input_ids=PROMPT, past_key_values=ChunkReuseCache(llama, store), use_cache=True, logits_to_keep=1)
    assert store.stats()["chunks"] == 4


def test_attached(llama: PreTrainedModel, store: ChunkStore) -> None:
    attach(llama, store)
    try:
        watching = Watching(store)
        generate(llama, None, streamer=watching)
    finally:
        detach(llama)
    assert watching.chunks == [0, 0, 4, 4]
    assert store.stats()["chunks"] == 5  # and the tail


@pytest.mark.parametrize("name", ["mistral", "qwen3_next"])
def test_windows_and_states(name: str) -> None:
    model = make_model(name)
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=64)
    generate(model, ChunkReuseCache(model, store))
    cache = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, cache), generate(model, None))
    assert cache.report.reused_tokens >= 256


def test_moved_chunks() -> None:
    model = make_model("deep_llama")
    store = ChunkStore(model, chunk_size=64)
    generate(model, ChunkReuseCache(model, store, ReusePolicy(mode="blend")), 1)
    moved = torch.cat([random_ids(40, seed=9), PROMPT, random_ids(80, seed=8)], dim=1)
    cache = ChunkReuseCache(model, store, ReusePolicy(mode="blend", progressive=False))
    model.generate(**as_inputs(moved), past_key_values=cache, max_new_tokens=1)
    assert cache.report.moved_tokens > 200
    assert store.stats()["content_only"] > 0


def test_what_is_edited_meanwhile_is_not_stored(llama: PreTrainedModel, store: ChunkStore) -> None:
    cache = ChunkReuseCache(llama, store)

    class Editing(Watching):
        def put(self, value: torch.Tensor) -> None:
            if len(self.chunks) == 1:
                cache.layers[1].values.data[:, :, 70] = 1
            super().put(value)

    generate(llama, cache, 1, streamer=Editing(store))
    assert store.stats()["chunks"] == 0
    assert same_as_plain(llama, cache, PROMPT) == 0


@pytest.mark.daily
@pytest.mark.parametrize("new", [1, 3])
def test_a_store_that_is_closed_meanwhile(
    llama: PreTrainedModel, store: ChunkStore, caplog: pytest.LogCaptureFixture, new: int
) -> None:
    class Closing(Watching):
        def put(self, value: torch.Tensor) -> None:
            if len(self.chunks) == 1:
                store.close()
            self.chunks.append(0)

    plain = generate(llama, None, new)
    assert torch.equal(generate(llama, ChunkReuseCache(llama, store), new, streamer=Closing(store)), plain)
    assert not caplog.records


def test_calls_that_end_in_other_threads(llama: PreTrainedModel, store: ChunkStore) -> None:
    """The thread that lets go of a failed call stores what it left; nobody may be running it any more."""

    def failing(number: int) -> None:
        ids = random_ids(300, seed=number)
        watching = Watching(store, fails_at=1)
        llama.generate(
            **as_inputs(ids), past_key_values=ChunkReuseCache(llama, store), streamer=watching, max_new_tokens=3
        )

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(failing, number) for number in range(4)]
    assert all(isinstance(call.exception(), RuntimeError) for call in calls)
    del calls
    gc.collect()
    assert store.stats()["chunks"] == 16


def test_a_store_that_is_left_by_an_error(llama: PreTrainedModel, tmp_path: Path) -> None:
    tiers = ["ram:1GB", f"disk:{tmp_path}:1GB"]
    try:
        with ChunkStore(llama, tiers=tiers, chunk_size=64) as store:
            generate(llama, ChunkReuseCache(llama, store), streamer=Watching(store, fails_at=1))
    except RuntimeError:
        pass
    with ChunkStore(llama, tiers=tiers, chunk_size=64) as later:
        assert later.stats()["tiers"]["disk"]["chunks"] == 4


def test_flush_while_an_error_is_handled(llama: PreTrainedModel, store: ChunkStore) -> None:
    try:
        generate(llama, ChunkReuseCache(llama, store), streamer=Watching(store, fails_at=1))
    except RuntimeError:
        store.flush()
        assert store.stats()["chunks"] == 4


@pytest.mark.parametrize("how", ["numpy", "data", "dlpack"])
def test_who_keeps_what_attention_was_given(llama: PreTrainedModel, store: ChunkStore, how: str) -> None:
    """Keys that PyTorch does not see being written to are stored before anybody can."""
    kept: list[torch.Tensor] = []

    class Keeping(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.scaled_dot_product_attention:
                kept.append(args[1])
            return function(*args, **(kwargs or {}))

    class Writing(Watching):
        def put(self, value: torch.Tensor) -> None:
            for keys in kept:
                writable = {"numpy": torch.Tensor.numpy, "data": lambda k: k.data, "dlpack": from_dlpack}[how]
                writable(keys)[:] = 0

    plain = generate(llama, None)
    with Keeping():
        generate(llama, ChunkReuseCache(llama, store), streamer=Writing(store))
    assert len(kept) > 0
    fresh = ChunkReuseCache(llama, store)
    assert torch.equal(generate(llama, fresh), plain)
    assert fresh.report.reused_tokens >= 256


def test_loops_of_others_store_at_once(llama: PreTrainedModel, store: ChunkStore) -> None:
    """Also in a function called `generate`, whose configuration lives as long as the model, and inside a call."""

    def score(ids: torch.Tensor) -> None:
        cache = ChunkReuseCache(llama, store)
        caches.append(weakref.ref(cache))
        with torch.no_grad():
            llama(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def generate(ids: torch.Tensor, generation_config: Any) -> None:
        score(ids)

    caches: list[weakref.ref[ChunkReuseCache]] = []
    for number in range(3):
        generate(random_ids(300, seed=number), llama.generation_config)
        assert store.stats()["chunks"] == 4 * (number + 1)
    seen: list[int] = []

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        score(random_ids(300, seed=10 + len(seen)))
        seen.append(store.stats()["chunks"])
        return scores

    llama.generate(**as_inputs(PROMPT), logits_processor=[process], max_new_tokens=3)
    assert seen == [16, 20, 24]
    assert not any(cache() for cache in caches)


@pytest.mark.parametrize("new", [1, 3])
def test_an_interrupt_while_storing(
    llama: PreTrainedModel,
    store: ChunkStore,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    new: int,
) -> None:
    def interrupted(self: Reused) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    cache = ChunkReuseCache(llama, store)
    monkeypatch.setattr(Reused, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _generate_and_wait(llama, cache, new)
    monkeypatch.undo()
    assert torch.equal(generate(llama, cache), generate(llama, None))


@pytest.mark.parametrize("step", ["planning.eviction.EvictionOrder.add", "store.memory.HostMemory._place"])
def test_an_interrupt_in_the_middle_of_a_change_leaves_a_whole_store(
    llama: PreTrainedModel, store: ChunkStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Ctrl+C between two steps: later prompts raised a KeyError."""

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    caches = [ChunkReuseCache(llama, store) for _ in range(2)]
    generate(llama, caches[0])
    with monkeypatch.context() as patched:
        patched.setattr(f"kvboost_hf.cache.{step}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.warm(random_ids(100, seed=7))
    store.check_consistency()
    for cache in caches:
        assert torch.equal(generate(llama, cache), generate(llama, None))
        cache.store_tails()
    store.check_consistency()


def _generate_and_wait(model: PreTrainedModel, cache: ChunkReuseCache, new: int) -> None:
    generate(model, cache, new)
    time.sleep(5)  # from the end of a call an interrupt comes a moment later


def test_a_report_in_another_thread(llama: PreTrainedModel, store: ChunkStore) -> None:
    """Who streams an answer may look at the report meanwhile; the thread of the call stores."""
    cache = ChunkReuseCache(llama, store)
    threads: list[int] = []
    put = store.put

    class Reading(Watching):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            reader = threading.Thread(target=lambda: (cache.report, cache.store.stats()))
            reader.start()
            reader.join()

    store.put = lambda *given, **more: (threads.append(threading.get_ident()), put(*given, **more))[1]
    reading = Reading(store)
    generate(llama, cache, streamer=reading)
    assert reading.chunks == [0, 0, 4, 4]
    assert set(threads) == {threading.get_ident()}


def test_once(llama: PreTrainedModel, store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Reused] = []
    settle = Reused.settle
    monkeypatch.setattr(Reused, "settle", lambda self: (settled.append(self), settle(self)))
    cache = ChunkReuseCache(llama, store)
    generate(llama, cache)
    generate(llama, cache, 1)
    assert cache.report.prompt_tokens == 300
    assert len(settled) == len(set(settled)) == 2


def test_the_end_of_a_call_waits_for_nobody(llama: PreTrainedModel, store: ChunkStore) -> None:
    """It may show in a thread that whoever is storing waits for."""
    cache = ChunkReuseCache(llama, store)
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        settled: Any = cache._unsettled
        with settled._lock:
            held.set()
            assert ended.wait(60)

    with ThreadPoolExecutor(1) as pool:

        def hold_meanwhile() -> None:
            while cache._unsettled is None:
                pass
            holding.append(pool.submit(hold))
            assert held.wait(60)

        holding: list[Any] = []
        generate(llama, cache, 1, streamer=Reading(hold_meanwhile))
        assert held.is_set()
        assert not ended.is_set()
        ended.set()
        holding[0].result()
    assert cache.report.prompt_tokens == 300
    assert store.stats()["chunks"] == 4


# A prompt that another thread is about to store


class Reading(BaseStreamer):
    """Calls `at_first` when the first token is there."""

    def __init__(self, at_first: Callable[[], Any]) -> None:
        self.tokens, self.at_first = 0, at_first

    def put(self, value: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens == 2:  # behind the prompt
            self.at_first()

    def end(self) -> None:
        pass


def slowly(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Have prompts settled after `wait`, by the thread that has computed them."""
    settle = Reused.settle

    def slow(self: Reused) -> None:
        wait()
        settle(self)

    monkeypatch.setattr(Reused, "settle", slow)


def asked_at_the_first_token(model: PreTrainedModel, store: ChunkStore, prompt: torch.Tensor, *, joined: bool) -> int:
    """The tokens that a call of another thread reuses, which begins when PROMPT has its first token."""
    cache, found = ChunkReuseCache(model, store), []

    def ask() -> None:
        model.generate(**as_inputs(prompt), past_key_values=cache, max_new_tokens=1, do_sample=False)
        found.append(cache.report.reused_tokens)

    thread = threading.Thread(target=ask)

    def begin() -> None:
        thread.start()
        if joined:
            thread.join()

    generate(model, ChunkReuseCache(model, store), streamer=Reading(begin))
    thread.join()
    return found[0]


def test_the_same_prompt_waits_for_the_other_thread(
    llama: PreTrainedModel, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one request goes first, and the others follow at its first token."""
    slowly(monkeypatch, lambda: time.sleep(0.2))
    monkeypatch.setattr(running, "_MOMENT_S", 10.0)  # on a busy machine a thread may be kept for longer
    longer = torch.cat([PROMPT, random_ids(20, seed=7)], dim=1)
    assert asked_at_the_first_token(llama, store, longer, joined=False) >= 256


def test_a_thread_that_is_kept_from_it_is_not_waited_for(llama: PreTrainedModel, store: ChunkStore) -> None:
    """By a reader of its stream that waits for the second answer."""
    begin = time.monotonic()
    assert asked_at_the_first_token(llama, store, PROMPT, joined=True) == 0
    assert time.monotonic() - begin < 30
    assert store.stats()["chunks"] == 4


def test_only_other_threads_with_the_same_root_and_beginning_wait(
    llama: PreTrainedModel, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, waited, ids = [], [0], PROMPT.numpy()
    init = running.SettledLater.__init__

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited[0] += 1
            return False

    def noting(later: Any, *given: Any) -> None:
        init(later, *given)
        later._begun = Waited()
        made.append(later)

    monkeypatch.setattr(running.SettledLater, "__init__", noting)
    told: list[int] = []

    def at_first() -> None:
        (later,) = made
        later.wait_for(later._root, ids)
        told.append(waited[0])  # its own thread would wait for itself
        for root, asked in ((b"another", ids), (later._root, ids + 1), (later._root, ids)):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(later.wait_for, root, asked).result()
            told.append(waited[0])

    class First(Watching):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.chunks) == 2:
                at_first()

    generate(llama, ChunkReuseCache(llama, store), streamer=First(store))
    assert told == [0, 0, 0, 1]


@pytest.mark.daily
@pytest.mark.parametrize(("seed", "salt"), [(5, None), (0, "another")])
def test_what_can_use_nothing_of_it_does_not_wait(
    llama: PreTrainedModel, store: ChunkStore, monkeypatch: pytest.MonkeyPatch, seed: int, salt: str | None
) -> None:
    """Another prompt, or another salt: not while the first one is being stored, either."""
    answered, late = threading.Event(), []
    first, cache = threading.get_ident(), ChunkReuseCache(llama, store, salt=salt)

    def wait() -> None:
        if threading.get_ident() == first:
            late.append(not answered.wait(20))

    def ask() -> None:
        prompt = random_ids(300, seed=seed)
        llama.generate(**as_inputs(prompt), past_key_values=cache, max_new_tokens=1, do_sample=False)
        answered.set()

    slowly(monkeypatch, wait)
    thread = threading.Thread(target=ask)
    generate(llama, ChunkReuseCache(llama, store), streamer=Reading(thread.start))
    thread.join()
    assert late
    assert not any(late)
    assert cache.report.reused_tokens == 0
