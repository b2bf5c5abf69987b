"""Locks and threads in a process that forks: a child has none of the threads, but all locks that they held.

`os.fork()` copies a process while other threads are anywhere in their work. Locks that are made here are free in the
child. Those that guard something that changes in several steps are acquired before, so that it is whole. A fork does
not wait for long: where somebody keeps such a lock, its owner is told in the child.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod

_PATIENCE_S = 5.0  # how long a fork waits until nobody is in the middle of a change
_MOMENT_S = 0.01  # for one lock, before the others are released again: its owner may wait for one of them


class _Owner(NamedTuple):
    """What else happens to a lock at a fork."""

    torn: "WeakMethod[Callable[[], None]] | None" = None  # called in a child where another thread held the lock
    before: "WeakMethod[Callable[[], None]] | None" = None  # called before a fork, while the lock is held


_NOBODY = _Owner()
_owners: WeakKeyDictionary[Any, _Owner] = WeakKeyDictionary()  # by lock
_starting: set[WeakMethod[Callable[[], None]]] = set()  # called in children
atexit.register(_starting.clear)  # or their callbacks would run when `weakref` has lost its own names
_registering = threading.Lock()
_held: list[Any] = []  # locks, during a fork
_missed: list[Any] = []  # locks that somebody kept


def lock(*, torn: Callable[[], None] | None = None) -> threading.Lock:
    """A lock that is free in a forked child.

    Args:
        torn: A method that is called in a child where another thread held it; it is referred to weakly. Without one,
            what it guards is whole at any time.
    """
    made = threading.Lock()
    _register(made, torn, None)
    return made


def rlock(*, torn: Callable[[], None] | None = None, before: Callable[[], None] | None = None) -> "threading.RLock":
    """The same for a lock that a thread may acquire several times.

    Args:
        torn: A method that is called in a child where another thread held the lock; it is referred to weakly.
        before: A method that is called before a fork, while the lock is held; it is referred to weakly.
    """
    made = threading.RLock()
    _register(made, torn, before)
    return made


def in_child(method: Callable[[], None]) -> None:
    """Have a method called in every forked child, such as one that starts a thread; it is referred to weakly."""
    with _registering:
        _starting.add(WeakMethod(method, _starting.discard))


def _register(made: Any, torn: Callable[[], None] | None, before: Callable[[], None] | None) -> None:
    is_owned = torn is not None or before is not None
    owner = _Owner(*(each and WeakMethod(each) for each in (torn, before))) if is_owned else _NOBODY
    with _registering:
        _owners[made] = owner


def _before_fork() -> None:
    _registering.acquire()
    _held.clear()
    _missed.clear()
    whole = []
    for made, owner in list(_owners.items()):
        if owner.before is not None:
            made.acquire()
            _held.append(made)
            _call(owner.before)
        elif owner.torn is not None:
            whole.append(made)
    _hold(whole)


def _hold(locks: list[Any]) -> None:
    """Acquire locks, all or none, for others may have one and wait for another; after a while, those that are free."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        got: list[Any] = []
        for made in locks:
            if not made.acquire(timeout=_MOMENT_S):
                break
            got.append(made)
        if len(got) == len(locks):
            _held.extend(got)
            return
        for made in got:
            made.release()
        if time.monotonic() > until:
            break
        time.sleep(_MOMENT_S)
    for made in locks:
        (_held if made.acquire(blocking=False) else _missed).append(made)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().release()
    _registering.release()


def _after_fork_in_child() -> None:
    held = set(map(id, _held))
    while _held:
        _held.pop().release()
    for made, _ in _owners.items():
        # One that this thread has stays: it will be released where it was acquired.
        if id(made) not in held and not (hasattr(made, "_is_owned") and made._is_owned()):
            made._at_fork_reinit()
    for made in _missed:
        _call(_owners[made].torn)
    _missed.clear()
    _registering.release()
    for start in list(_starting):
        _call(start)


def _call(method: "WeakMethod[Callable[[], None]] | None") -> None:
    if method is not None and (call := method()) is not None:
        call()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
