"""The device tier: copies of the chunks that were used last, where the model computes."""

from collections import OrderedDict

from kvboost_hf import forks
from kvboost_hf.cache.kv.layer_kv import LayerKV


class DeviceMemory:
    """Chunks in the memory of accelerators, within a byte budget; those that were not used for longest go first.

    What it holds is in host memory or below, too, or was; nothing is ever lost with it.

    Args:
        max_bytes: Of all devices together; 0 holds nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = forks.lock()
        self._copies: OrderedDict[bytes, LayerKV] = OrderedDict()
        self._used = 0

    def get(self, key: bytes) -> LayerKV | None:
        """A chunk's K/V, or None."""
        with self._lock:
            found = self._copies.get(key)
            if found is not None:
                self._copies.move_to_end(key)
        return found

    def put(self, key: bytes, kv: LayerKV) -> None:
        """Copy a chunk's K/V to where the model computes, unless it is there or too large."""
        if kv.nbytes > self.max_bytes or self.get(key) is not None:
            return
        copied = kv.promoted()
        with self._lock:
            while self._used + copied.nbytes > self.max_bytes:
                _, gone = self._copies.popitem(last=False)
                self._used -= gone.nbytes
            if key not in self._copies:
                self._copies[key] = copied
                self._used += copied.nbytes

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._copies.clear()
            self._used = 0

    def stats(self) -> dict[str, int]:
        """`chunks`, `bytes` and `max_bytes`."""
        return {"chunks": len(self._copies), "bytes": self._used, "max_bytes": self.max_bytes}

    def check_consistency(self) -> None:
        """Raise AssertionError if bytes are not those of the copies, or beyond the budget."""
        with self._lock:
            nbytes = sum(kv.nbytes for kv in self._copies.values())
            assert nbytes == self._used <= self.max_bytes, "bytes on devices must be those of the copies"
