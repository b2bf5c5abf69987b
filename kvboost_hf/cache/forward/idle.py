"""`Idle`: work on what a cache holds between two calls, in one thread that all caches share.

    begin ──▶ waiting ──▶ in the thread ──▶ ended
                 ▲              │ another call runs the model
                 └── a pause ◀──┘

The thread does one piece of work at a time; others wait for their turn. Nothing here takes a lock that somebody may
hold: a call of `attach` ends wherever its garbage is collected.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvboost_hf import forks

_log = logging.getLogger("kvboost_hf")
_MOST_WAITING = 8  # caches: the newest ones
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # until work that another call has broken off is tried again
_MOST_TRIES = 60  # which take 5 minutes
_LOOK_S = 0.05  # after which a thread that waits looks whether the interpreter ends

_THREAD = "kvboost_hf-idle"

Work = Callable[[threading.Event], bool]  # see `Idle.begin`


def in_idle_thread() -> bool:
    """Whether what runs is work between two calls."""
    return threading.current_thread().name.startswith(_THREAD)


def _interpreter_ends() -> bool:
    return not threading.main_thread().is_alive()


class _Stop(threading.Event):
    """Is set at the end of the interpreter, too, which waits for the thread."""

    def is_set(self) -> bool:
        return super().is_set() or _interpreter_ends()


@dataclass(slots=True, eq=False)
class _IdleTurn:
    """Work that waits, or is being done."""

    work: Work | None  # as `Idle.begin` is given it; let go of at the end
    nbytes: int = 0  # bytes that it keeps alive
    stop: threading.Event = field(default_factory=_Stop)  # given to the work of this try
    ended: threading.Event = field(default_factory=threading.Event)  # set when nothing more of it will be done
    unwanted: bool = False
    tries: int = 0  # how often it was broken off
    at: float = 0.0  # when it may be tried, in seconds of `time.monotonic`

    @property
    def is_due(self) -> bool:
        """Whether it is done, or given up, as soon as the thread has time."""
        return self.unwanted or self.at <= time.monotonic() or _interpreter_ends()

    def end(self) -> None:
        self.work = None
        self.ended.set()

    def run(self) -> bool:
        """Do it in this thread; returns whether it is to be tried again."""
        self.stop = _Stop()
        if self.unwanted or self.work is None or self.stop.is_set():
            return False
        try:
            is_left = self.work(self.stop)
        except Exception as error:  # of the model, as where memory runs out
            _log.warning("What was to be computed between two calls has failed: %s", error)
            return False
        self.at = time.monotonic() + min(_PAUSE_S * 2**self.tries, _LONGEST_PAUSE_S)
        self.tries += 1
        return is_left and not self.unwanted and self.tries < _MOST_TRIES


class _IdleLine:
    """The turns that wait, and the thread that takes them. A forked process begins with an empty one.

    Its changes are single operations of a deque, which no other thread sees half done.
    """

    def __init__(self) -> None:
        self._waiting: deque[_IdleTurn] = deque()
        self._taken = forks.lock()  # by the thread, as long as it has something to do; nobody waits for it
        self._come = threading.Event()  # a look at the turns is worth it
        self._executor: ThreadPoolExecutor | None = None
        forks.in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        self._waiting, self._come, self._executor = deque(), threading.Event(), None

    def add(self, turn: _IdleTurn, most_bytes: int) -> None:
        """Add a turn. The oldest ones give way where too many wait, or too much K/V with them."""
        self._waiting.append(turn)
        while len(self._waiting) > 1 and self._is_full(most_bytes):
            try:
                self._waiting.popleft().end()
            except IndexError:  # the thread was faster
                break
        self._wake()

    def drop(self, turn: _IdleTurn) -> None:
        """Have a turn end soon: at once, unless it is being done."""
        turn.unwanted = True
        turn.stop.set()
        try:
            self._waiting.remove(turn)
        except ValueError:
            self._come.set()  # it may be on its way back
        else:
            turn.end()

    def _is_full(self, most_bytes: int) -> bool:
        waiting = list(self._waiting)
        return len(waiting) > _MOST_WAITING or sum(turn.nbytes for turn in waiting) > most_bytes

    def _wake(self) -> None:
        self._come.set()
        if not self._taken.acquire(blocking=False):
            return
        try:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, _THREAD)
            self._executor.submit(self._take_turns)
        except RuntimeError:  # the interpreter ends
            self._taken.release()
            while self._waiting:
                self._waiting.popleft().end()

    def _take_turns(self) -> None:
        while True:
            while self._waiting:
                self._come.clear()
                turn = next((turn for turn in list(self._waiting) if turn.is_due), None)
                if turn is None:
                    self._come.wait(_LOOK_S)
                else:
                    self._take(turn)
            self._taken.release()
            if not self._waiting or not self._taken.acquire(blocking=False):  # one has come meanwhile
                return

    def _take(self, turn: _IdleTurn) -> None:
        try:
            self._waiting.remove(turn)
        except ValueError:  # it was dropped
            return
        again = False
        try:
            again = turn.run()
        finally:
            if again:
                self._waiting.append(turn)
            else:
                turn.end()


_line = _IdleLine()


class Idle:
    """Work on what one cache holds between two calls.

    Attributes:
        busy: Whether the work has begun, or waits for its turn, and nobody has stopped it: `stop` is to be called
            before anything else.
    """

    busy = False
    _pid = 0
    _turn: _IdleTurn | None = None

    def begin(self, work: Work, nbytes: int, most_bytes: int) -> None:
        """A call has ended: have work done when the thread has time.

        `work` returns soon once the event that it is given is set: whoever needs the cache waits. It returns whether
        something is left to do, because another call has run the model: then it is called again, after a pause. It
        keeps `nbytes` bytes alive; all that waits may keep `most_bytes`, and older work is given up for newer one.
        """
        if self.busy and self._pid == os.getpid() and not self.wait(0):
            return
        turn = self._turn = _IdleTurn(work, nbytes)
        self._pid = os.getpid()
        self.busy = True  # from now on another thread may stop the turn, also before it waits
        _line.add(turn, most_bytes)

    def stop(self) -> None:
        """Somebody needs the cache: wait until its layers are left alone."""
        last = None
        while self._pid == os.getpid() and (turn := self._turn) is not last:  # a forked child has no such thread
            assert turn is not None
            _line.drop(turn)
            turn.ended.wait()
            last = turn
        self.busy = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the work has ended, for so many seconds at most; returns whether it has."""
        return self._turn is None or self._turn.ended.wait(timeout)
