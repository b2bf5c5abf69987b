"""Who uses a cache: one generate() call at a time, and one forward at a time.

A cache learns of a generate() call when that begins, and never that it has ended: the configuration that the call has
made for itself is gone then. Where somebody still refers to that, as the traceback of an exception does, the stacks of
all threads tell.
"""

import threading
import weakref
from typing import Any

from kvboost_hf import forks
from kvboost_hf.cache.prompt.generate_call import GenerateCall, is_in_forward, is_under_way
from kvboost_hf.errors import CacheInUseError

_REMEDY = (
    "Give each call a cache of its own, ChunkReuseCache(model): they share K/V by their store. Or leave the cache out "
    "after attach(model), which gives each call one."
)


class CacheUse:
    """The generate() call and the forward that use a `ChunkReuseCache`; all others are refused meanwhile.

    Attributes:
        inside: The thread of the forward under way, or of the last one that raised; 0 if it has returned.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._config: weakref.ref[Any] | None = None  # of the call
        self._thread, self._name = 0, ""  # that the call runs in
        self._ran = False  # a forward of the call has begun
        self.inside = 0

    def begin_call(self, call: GenerateCall) -> None:
        """A generate() call of this thread takes the cache.

        Raises:
            CacheInUseError: another call is under way that has computed K/V with it, or that runs in another thread.
        """
        config = call.config
        with self._lock:
            self._require_free(config)
            self._config = weakref.ref(config) if config is not None else None
            self._thread, self._name = threading.get_ident(), threading.current_thread().name
            self._ran = False

    def begin_forward(self, cache: Any) -> None:
        """A forward of this thread takes the cache.

        Raises:
            CacheInUseError: a call, or a forward, of another thread is under way with it.
        """
        thread = threading.get_ident()
        with self._lock:
            if self._thread != thread and self._config is not None:
                self._require_free(None)
            if self.inside != thread and self.is_in_forward(cache):
                raise CacheInUseError(
                    f"This ChunkReuseCache is in use: thread {self.inside} runs a forward with it. {_REMEDY}"
                )
            self.inside, self._ran = thread, True

    def is_in_forward(self, cache: Any) -> bool:
        """Whether a forward with the cache is under way, and not one that has raised."""
        return self.inside != 0 and is_in_forward(cache, self.inside)

    def require_free(self) -> None:
        """Before somebody changes what the cache holds.

        Raises:
            CacheInUseError: a call of another thread is under way with it.
        """
        if self._config is not None and self._thread != threading.get_ident():
            with self._lock:
                self._require_free(None)

    @property
    def call_has_ended(self) -> bool:
        """Whether a generate() call has had the cache, and has returned."""
        return self._config is not None and self._config() is None

    def _require_free(self, config: Any) -> None:
        """`config` is that of the call that is to use the cache, or None for none."""
        other = self._config() if self._config is not None else None
        if other is None or other is config:
            return
        here = self._thread == threading.get_ident()
        if here and not self._ran:  # a loop of its own that hands the cache on to another call
            return
        if not is_under_way(other, self._thread):  # it has failed, and somebody keeps the exception
            self._config = None
            return
        where = "around this one, in the same thread" if here else f"in thread {self._name!r}"
        raise CacheInUseError(
            f"This ChunkReuseCache is in use: a generate() call {where}, holds it and has not returned. {_REMEDY}"
        )
