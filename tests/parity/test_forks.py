"""Processes forked while threads generate: gunicorn that preloads, workers of a DataLoader, multiprocessing."""

import gc
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkStore, KVBoost, StreamingConfig, attach, stream_layers
from kvboost_hf.assets import load_embedded
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.offload import ThreadedBackend, use_backend
from tests.internals.top import forks

HEAD = random_ids(120, seed=1)
PROMPTS = [as_inputs(torch.cat([HEAD, random_ids(20 + n, seed=n)], dim=1)) for n in range(3)]
SETTINGS = {"max_new_tokens": 3, "do_sample": False}
FORKS = 6


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    """A child of a process that has used several of OpenMP's threads hangs in OpenMP."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12, of forks beside threads
        yield
    torch.set_num_threads(before)


@contextmanager
def busy(work: Callable[[int], object], threads: int = 2) -> Iterator[None]:
    """Threads that go on working."""
    stop = threading.Event()

    def run(start: int) -> None:
        at = start
        while not stop.is_set():
            work(at)
            at += 1

    running = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join()


def in_child(check: Callable[[], bool], *, seconds: int = 20) -> int:
    """The exit status of a forked child: 0 if the check holds there, and a negative one if it hangs."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_children_answer_while_threads_generate(disk: bool, tmp_path: Path) -> None:
    model, plain = make_model("llama"), make_model("llama")
    expected = [plain.generate(**prompt, **SETTINGS) for prompt in PROMPTS]
    tiers = (f"disk:{tmp_path}:50MB",) if disk else ()
    store = ChunkStore(model, chunk_size=16, max_bytes="1MB", tiers=tiers)
    attach(model, store)

    def check() -> bool:
        right = all(
            model.generate(**prompt, **SETTINGS).equal(answer)
            for prompt, answer in zip(PROMPTS, expected, strict=True)
        )
        store.flush()
        store.check_consistency()
        return right and store.check_integrity().wrong == 0

    with busy(lambda at: model.generate(**PROMPTS[at % 3], **SETTINGS)):
        statuses = []
        for n in range(FORKS):
            time.sleep(0.007 * (n % 5))
            statuses.append(in_child(check))
    assert statuses == [0] * FORKS
    assert check()
    assert in_child(lambda: in_child(check) == 0) == 0  # a child of a child


def test_children_of_multiprocessing_answer() -> None:
    model = make_model("llama")
    expected = make_model("llama").generate(**PROMPTS[0], **SETTINGS)
    attach(model, ChunkStore(model, chunk_size=16))
    context = multiprocessing.get_context("fork")
    answers: Any = context.SimpleQueue()
    with busy(lambda at: model.generate(**PROMPTS[at % 3], **SETTINGS)):
        children = [
            context.Process(target=lambda: answers.put(model.generate(**PROMPTS[0], **SETTINGS).tolist()))
            for _ in range(3)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(20)
    assert [child.exitcode for child in children] == [0] * 3
    assert [answers.get() for _ in children] == [expected.tolist()] * 3


def test_streamed_layers_are_sent_for_anew_in_a_child() -> None:
    model = make_model("deep_llama")
    expected = make_model("deep_llama").generate(**PROMPTS[0], **SETTINGS)
    with use_backend(lambda: ThreadedBackend(torch.device("cpu"))):
        stream_layers(model, StreamingConfig(keep_first_k=1, keep_last_k=1), device="cpu")
    with busy(lambda at: model.generate(**PROMPTS[0], **SETTINGS), threads=1):
        statuses = [in_child(lambda: model.generate(**PROMPTS[0], **SETTINGS).equal(expected)) for _ in range(3)]
    assert statuses == [0] * 3


def test_the_facade_goes_on_in_a_child() -> None:
    engine = KVBoost(*load_embedded())
    prompt = "Maria lives in Rome. The lamp is red. Where does Maria live?"
    expected = engine.generate(prompt, max_new_tokens=4).output_text
    with busy(lambda at: engine.generate(f"{at} {prompt}", max_new_tokens=4), threads=1):
        statuses = [
            in_child(lambda: engine.generate(prompt, max_new_tokens=4).output_text == expected) for _ in range(3)
        ]
    assert statuses == [0] * 3


class Guarded:
    """Something that changes in two steps."""

    def __init__(self) -> None:
        self.lock = forks.rlock(torn=self._forget)
        self.plain = forks.lock()
        self.is_whole = True

    def _forget(self) -> None:
        self.is_whole = True


def test_a_fork_waits_for_a_change_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded, entered, leave = Guarded(), threading.Event(), threading.Event()

    def change() -> None:
        with guarded.plain, guarded.lock:
            guarded.is_whole = False
            entered.set()
            leave.wait()
            guarded.is_whole = True

    def check() -> bool:
        with guarded.plain, guarded.lock:
            return guarded.is_whole

    thread = threading.Thread(target=change)
    thread.start()
    entered.wait()
    monkeypatch.setattr(forks, "_PATIENCE_S", 0.05)
    assert in_child(check) == 0  # its owner was told
    monkeypatch.setattr(forks, "_PATIENCE_S", 5.0)
    threading.Timer(0.1, leave.set).start()
    before = time.monotonic()
    assert in_child(check) == 0
    assert 0.05 < time.monotonic() - before < 4
    thread.join()
    with guarded.lock:
        assert in_child(lambda: guarded.is_whole) == 0  # that of the thread that forks stays its own


class Starting:
    """Has a thread, in children, too."""

    def __init__(self) -> None:
        self.started = 0
        self.start()
        forks.in_child(self.start)

    def start(self) -> None:
        self.started += 1
        self.executor = ThreadPoolExecutor(1, "test")


def test_threads_are_started_in_a_child() -> None:
    starting = Starting()
    assert starting.executor.submit(lambda: 1).result() == 1
    assert in_child(lambda: starting.started == 2 and starting.executor.submit(lambda: 2).result() == 2) == 0
    assert starting.executor.submit(lambda: 3).result() == 3
    assert starting.started == 1
    starting.executor.shutdown()


def test_what_is_gone_is_not_started_in_a_child() -> None:
    starting = Starting()
    (known,) = [ref for ref in forks._starting if getattr(ref(), "__self__", None) is starting]
    del starting
    gc.collect()
    assert known() is None
    assert known not in forks._starting
