"""The nearest tier: copies of the chunks that were used last, where the model computes."""

import threading
from collections import OrderedDict

from kvboost_hf.cache.store.kv import LayerKV


class DeviceShelf:
    """Chunks in the memory of accelerators, within a byte budget; those that were not used for longest go first.

    What it holds is in host memory or below, too, or was; nothing is ever lost with it.

    Args:
        max_bytes: Of all devices together; 0 holds nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, LayerKV] = OrderedDict()
        self._used = 0

    def get(self, key: bytes) -> LayerKV | None:
        """A chunk's K/V, or None."""
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
        return found

    def put(self, key: bytes, kv: LayerKV) -> None:
        """Copy a chunk's K/V to where the model computes, unless it is there or too large."""
        if kv.nbytes > self.max_bytes or self.get(key) is not None:
            return
        copied = kv.promoted()
        with self._lock:
            while self._used + copied.nbytes > self.max_bytes:
                _, gone = self._held.popitem(last=False)
                self._used -= gone.nbytes
            if key not in self._held:
                self._held[key] = copied
                self._used += copied.nbytes

    def drop(self, key: bytes) -> None:
        """Forget a chunk."""
        with self._lock:
            if (gone := self._held.pop(key, None)) is not None:
                self._used -= gone.nbytes

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._held.clear()
            self._used = 0

    def stats(self) -> dict[str, int]:
        """`chunks`, `bytes` and `max_bytes`."""
        return {"chunks": len(self._held), "bytes": self._used, "max_bytes": self.max_bytes}
