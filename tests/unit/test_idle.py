"""Work on what a cache holds between two calls: one at a time, and begun anew in a child."""

import os
import threading

import pytest

from tests.internals.cache import Idle


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
