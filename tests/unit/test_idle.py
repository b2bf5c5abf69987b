"""Work on what a cache holds between two calls: one at a time, and begun anew in a child."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from tests.internals.cache import Idle, _IdleLine, _IdleTurn

pytestmark = pytest.mark.daily


@pytest.mark.parametrize("forked", [False, True])
def test_work_that_is_under_way_is_not_begun_again(monkeypatch: pytest.MonkeyPatch, forked: bool) -> None:
    """In a forked process its thread is gone, and other work is begun."""
    idle, under_way, may_end = Idle(), threading.Event(), threading.Event()
    runs: list[str] = []

    def first(stop: threading.Event) -> bool:
        under_way.set()
        assert may_end.wait(20)
        runs.append("first")
        return False

    def second(stop: threading.Event) -> bool:
        runs.append("second")
        return False

    idle.begin(first, 1, 10**9)
    assert under_way.wait(20)
    with monkeypatch.context() as patched:
        if forked:
            patched.setattr(os, "getpid", lambda: -1)
        idle.begin(second, 1, 10**9)
    may_end.set()
    assert idle.wait(20)
    assert runs == ["first"] + ["second"] * forked
    idle.begin(second, 1, 10**9)
    assert idle.wait(20)
    assert runs == ["first"] + ["second"] * (1 + forked)


def test_work_that_is_stopped_as_it_is_begun_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, as soon as that sees that there is any."""
    idle, runs, busy = Idle(), list[str](), list[bool]()

    def set_busy(_: Idle, value: bool) -> None:
        busy.append(value)
        if value:
            stopping = pool.submit(idle.stop)
            wait((stopping,), timeout=0.1)

    monkeypatch.setattr(Idle, "busy", property(lambda _: bool(busy) and busy[-1], set_busy))
    with ThreadPoolExecutor(1) as pool:
        idle.begin(lambda stop: bool(runs.append("done")), 1, 10**9)
    assert idle.wait(20)
    assert (runs, idle.busy) == ([], False)


def test_work_that_comes_as_the_thread_ends_is_done() -> None:
    """Whoever brings it finds the thread at work, and begins no other."""
    line, runs = _IdleLine(), list[str]()
    first, second = (_IdleTurn(lambda stop, name=name: bool(runs.append(name))) for name in ("first", "second"))

    class Late:
        """The lock of the thread: as it is released, the second turn has just come."""

        def __init__(self) -> None:
            self._lock, self.acquire = line._taken, line._taken.acquire

        def release(self) -> None:
            if len(runs) == 1:
                line._waiting.append(second)
            self._lock.release()

    line._taken = Late()  # type: ignore[assignment]
    line.add(first, 10**9)
    assert second.ended.wait(5)
    assert runs == ["first", "second"]
