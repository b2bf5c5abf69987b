"""The backend for CPUs and for devices without copy streams: a thread fills the slots."""

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from kvboost_hf import forks
from kvboost_hf.offload.sources import Source

_PIECE_BYTES = 32 << 20  # of the buffer on the way to a device


class ThreadedBackend:
    """A `Backend` whose copies run in a thread.

    Args:
        device: The device of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_copied = 0
        self.synchronous_loads = 0
        self.stall_s = 0.0
        self._rate = _Rate()
        # Its thread ends with close(), or when this object is gone; so what it runs does not refer to this object.
        self._thread = forks.Worker("kvboost-layers")
        self._slots: list[torch.Tensor] = []
        self._loads: dict[int, Future[None]] = {}

    def allocate(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """See `Backend.allocate`."""
        with torch.inference_mode(False):  # else nobody could write to them outside of inference mode
            self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        return list(self._slots)

    def issue(self, slot: int, source: Source) -> None:
        """See `Backend.issue`. One thread does all copies, so that earlier ones are done or cancelled."""
        assert source.nbytes <= self._slots[slot].numel(), "slots are as large as the largest layer"
        if self._thread.is_lost:
            self._loads.clear()
        if slot in self._loads:
            self._loads[slot].cancel()
        self.bytes_copied += source.nbytes
        self._loads[slot] = self._thread.submit(_fill, self._slots[slot][: source.nbytes], source, self._rate)

    def wait(self, slot: int) -> None:
        """See `Backend.wait`."""
        load = self._loads[slot]
        if not load.done():
            self.synchronous_loads += 1
            before = time.perf_counter()
            wait([load])
            if self.device.type == "cpu":  # elsewhere the computation goes on
                self.stall_s += time.perf_counter() - before
        load.result()

    def release(self, slot: int) -> None:
        """See `Backend.release`. Nothing to do: submitted computation comes before later copies."""

    def copy_rate(self) -> float:
        """See `Backend.copy_rate`."""
        return self._rate.nbytes / self._rate.seconds if self._rate.seconds else 0.0

    def close(self) -> None:
        """See `Backend.close`."""
        self._thread.shutdown(cancel_futures=True)
        self._loads.clear()
        self._slots.clear()


@dataclass(slots=True)
class _Rate:
    nbytes: int = 0
    seconds: float = 0.0


def _fill(target: torch.Tensor, source: Source, rate: _Rate) -> None:
    before = time.perf_counter()
    if target.device.type == "cpu":
        source.read_into(target, 0)
    else:
        buffer = torch.empty(min(_PIECE_BYTES, source.nbytes), dtype=torch.uint8)
        for start in range(0, source.nbytes, _PIECE_BYTES):
            piece = target[start : start + _PIECE_BYTES]
            source.read_into(buffer[: piece.numel()], start)
            piece.copy_(buffer[: piece.numel()])
    rate.nbytes += source.nbytes
    rate.seconds += time.perf_counter() - before
