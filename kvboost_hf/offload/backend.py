"""The interface of backends, which copy layers into slots on a device; the one for CPUs, and the choice among them."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from kvboost_hf import forks
from kvboost_hf.offload.sources import Source

_PIECE_BYTES = 32 << 20  # of the buffer on the way to a device


class LayerBackend(Protocol):
    """Copies bytes into slots while the model computes, and synchronizes both.

    For each slot the calls come in this order, any number of times: `issue`, `wait`, computation that reads the slot,
    `release`. After an exception `release`, or `wait` and `release`, may be missing. A slot keeps its bytes until the
    next `issue`, so that after `release` the next call may be `wait`.
    """

    device: torch.device
    bytes_copied: int  # of all calls of issue()
    synchronous_loads: int  # calls of wait() in which the host waited for the bytes

    def allocate(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """`count` slots, uint8 [nbytes] each, on the device. Called once; their addresses never change."""

    def issue(self, slot: int, source: Source) -> None:
        """Begin to copy `source` into the first bytes of a slot; return at once.

        The slot's content is lost. The copy begins when all computation submitted so far that may read the slot is
        done, whether or not `release` was called.
        """

    def wait(self, slot: int) -> None:
        """Make all computation submitted from now on see the bytes last issued to the slot.

        Raises:
            OSError: they could not be read.
        """

    def release(self, slot: int) -> None:
        """Note that all computation that reads the slot has been submitted."""

    @property
    def stall_s(self) -> float:
        """Seconds that the computation, not only the host, has waited for copies; 0.0 if unknown."""

    def copy_rate(self) -> float:
        """Bytes per second of the copies so far, while they ran; 0.0 if unknown."""

    def close(self) -> None:
        """Wait for copies under way, and release threads and slots. No call may follow."""


_factories: list[Callable[[], LayerBackend]] = []


@contextmanager
def use_backend(make: Callable[[], LayerBackend]) -> Iterator[None]:
    """Stream models with the backends of `make` in this context, as if their device had its own memory."""
    _factories.append(make)
    try:
        yield
    finally:
        _factories.pop()


def is_overridden() -> bool:
    """Whether `use_backend` has chosen the backend."""
    return bool(_factories)


def make_backend(device: torch.device) -> LayerBackend:
    """The backend for a device."""
    if _factories:
        return _factories[-1]()
    if device.type == "cuda":
        from kvboost_hf.offload.cuda import CudaBackend

        return CudaBackend(device)
    return ThreadedBackend(device)


def make_mapping(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that maps pinned host memory to a tensor of the device; None if the device cannot read it."""
    if _factories:
        return lambda flat: flat
    if device.type != "cuda":
        return None
    from kvboost_hf.offload.cuda import can_map, map_to_cuda

    return partial(map_to_cuda, device=device) if can_map(device) else None


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if it shares the host's memory."""
    if _factories:
        return 1 << 62
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


class ThreadedBackend:
    """A `LayerBackend` whose copies run in a thread.

    Args:
        device: The device of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_copied = 0
        self.synchronous_loads = 0
        self.stall_s = 0.0
        self._rate = _Rate()
        self._slots: list[torch.Tensor] = []
        self._start_thread()
        forks.in_child(self._start_thread)

    def _start_thread(self) -> None:
        """Have a thread; in a forked process another one, for what the last one was to do is not done there."""
        # It ends with close(), or when this object is gone; so what it runs does not refer to this object.
        self._thread = ThreadPoolExecutor(1, "kvboost-layers")
        self._loads: dict[int, Future[None]] = {}

    def allocate(self, nbytes: int, count: int) -> list[torch.Tensor]:
        with torch.inference_mode(False):  # else nobody could write to them outside of inference mode
            self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        return list(self._slots)

    def issue(self, slot: int, source: Source) -> None:
        """Begin to copy. One thread does all copies, so that earlier ones are done or cancelled."""
        assert source.nbytes <= self._slots[slot].numel(), "slots are as large as the largest layer"
        if slot in self._loads:
            self._loads[slot].cancel()
        self.bytes_copied += source.nbytes
        self._loads[slot] = self._thread.submit(_fill, self._slots[slot][: source.nbytes], source, self._rate)

    def wait(self, slot: int) -> None:
        load = self._loads[slot]
        if not load.done():
            self.synchronous_loads += 1
            before = time.perf_counter()
            wait([load])
            if self.device.type == "cpu":  # elsewhere the computation goes on
                self.stall_s += time.perf_counter() - before
        load.result()

    def release(self, slot: int) -> None:
        """Nothing to do: submitted computation comes before later copies."""

    def copy_rate(self) -> float:
        return self._rate.nbytes / self._rate.seconds if self._rate.seconds else 0.0

    def close(self) -> None:
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
        buffer = torch.empty(min(_PIECE_BYTES, source.nbytes), dtype=torch.uint8, device="cpu")
        for start in range(0, source.nbytes, _PIECE_BYTES):
            piece = target[start : start + _PIECE_BYTES]
            source.read_into(buffer[: piece.numel()], start)
            piece.copy_(buffer[: piece.numel()])
    rate.nbytes += source.nbytes
    rate.seconds += time.perf_counter() - before
