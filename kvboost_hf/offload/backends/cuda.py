"""The backend for CUDA devices: a stream of its own copies layers while the model computes."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from kvboost_hf import forks
from kvboost_hf.offload.backends.runtime import CudaRuntime, Event, Runtime, Stream
from kvboost_hf.offload.backends.timings import Timings
from kvboost_hf.offload.sources import Source

PIECE_BYTES = 32 << 20  # of one copy; small copies, such as of token ids, wait for the one under way
_BUFFERS = 3  # one is read into while others are copied from
BUFFER_BYTES = _BUFFERS * PIECE_BYTES


class CudaBackend:
    """A `Backend` that copies from pinned host memory directly, and from elsewhere through pinned buffers.

    A thread reads into these buffers, part by part.

    Args:
        device: The device of the slots.
        runtime: Calls CUDA; by default on `device`.
        piece_bytes: The most bytes of one copy; None for `PIECE_BYTES`.
    """

    def __init__(
        self, device: torch.device, runtime: Runtime | None = None, *, piece_bytes: int | None = None
    ) -> None:
        self.device = device
        self.bytes_copied = 0
        self.synchronous_loads = 0
        self._runtime = runtime or CudaRuntime(device)
        self._link = _Link(self._runtime, piece_bytes or PIECE_BYTES)
        # Its thread ends with close(), or when this object is gone; so what it runs does not refer to this object.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvboost-layers")
        self._slots: list[_Slot] = []
        self._stalls = Timings()

    def allocate(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """See `Backend.allocate`."""
        with torch.inference_mode(False):  # else nobody could write to them outside of inference mode
            flats = [self._runtime.allocate(nbytes, self._link.stream) for _ in range(count)]
        # Their memory may have been another tensor's, which work that was submitted before still reads.
        current = self._runtime.current_stream()
        now = self._runtime.record(current)
        self._slots = [_Slot(flat, {current: now}) for flat in flats]
        return flats

    def issue(self, slot: int, source: Source) -> None:
        """See `Backend.issue`."""
        place = self._slots[slot]
        assert source.nbytes <= place.flat.numel(), "slots are as large as the largest layer"
        if place.readers:
            self.release(slot)  # was left out, after an exception
        earlier, load = place.load, _Load(source, place.flat[: source.nbytes], list(place.free.values()))
        place.load = load
        self.bytes_copied += source.nbytes
        if earlier is not None:
            with self._link.lock:
                earlier.superseded = True
            if earlier.reading is not None:
                earlier.reading.cancel()  # does nothing if it has begun
        if source.host is not None and self._runtime.is_pinned(source.host):
            self._link.copy_from(source.host, load)
        else:
            load.reading = self._reader.submit(self._link.copy_through_buffers, load)

    def wait(self, slot: int) -> None:
        """See `Backend.wait`."""
        place = self._slots[slot]
        assert place.load is not None, "issue() comes first"
        stream = self._runtime.current_stream()
        before = self._runtime.record(stream, timed=True)
        if place.load.reading is not None:
            self.synchronous_loads += not place.load.reading.done()
            place.load.reading.result()
        assert place.load.ready is not None
        stream.wait_event(place.load.ready)
        self._stalls.add(before, self._runtime.record(stream, timed=True))
        place.readers.add(stream)

    def release(self, slot: int) -> None:
        """See `Backend.release`."""
        place = self._slots[slot]
        for stream in {self._runtime.current_stream(), *place.readers}:
            place.free[stream] = self._runtime.record(stream)
        place.readers.clear()

    @property
    def stall_s(self) -> float:
        """See `Backend.stall_s`."""
        return self._stalls.totals()[0]

    def copy_rate(self) -> float:
        """See `Backend.copy_rate`."""
        seconds, nbytes = self._link.timings.totals()
        return nbytes / seconds if seconds else 0.0

    def close(self) -> None:
        """See `Backend.close`."""
        with self._link.lock:
            for place in self._slots:
                if place.load is not None:
                    place.load.superseded = True
        self._reader.shutdown(cancel_futures=True)
        self._link.stream.synchronize()
        self._link.buffers.clear()
        self._slots.clear()


@dataclass(slots=True, eq=False)
class _Load:
    """One call of `issue`."""

    source: Source
    target: torch.Tensor
    free: list[Event]  # that it has to wait for
    ready: Event | None = None
    reading: "Future[None] | None" = None
    superseded: bool = False  # by a later call for the same slot; the lock is held to change it


@dataclass(slots=True, eq=False)
class _Slot:
    flat: torch.Tensor
    free: dict[Stream, Event]  # after all work on it that was released, which may have been more than once
    readers: set[Stream] = field(default_factory=set)  # that have read it since
    load: _Load | None = None


@dataclass(slots=True, eq=False)
class _Buffer:
    flat: torch.Tensor
    copied: Event | None = None


class _Link:
    """The copy stream and its buffers. Two threads submit copies, one layer at a time under the lock."""

    def __init__(self, runtime: Runtime, piece_bytes: int) -> None:
        self.stream = runtime.new_stream()
        self.lock = forks.lock()
        self.timings = Timings()
        self.buffers: deque[_Buffer] = deque()  # the next one first
        self._runtime, self._piece_bytes = runtime, piece_bytes

    def copy_from(self, host: torch.Tensor, load: _Load) -> None:
        """Submit the copy of a layer in pinned memory."""
        with self.lock:
            self._begin(load)
            load.ready = self._copy(load.target, host)

    def copy_through_buffers(self, load: _Load) -> None:
        """Read a layer part by part, and submit the copy of each part."""
        for start in range(0, load.source.nbytes, self._piece_bytes):
            target = load.target[start : start + self._piece_bytes]
            buffer = self._next_buffer()
            piece = buffer.flat[: target.numel()]
            load.source.read_into(piece, start)
            with self.lock:
                if load.superseded:
                    return
                if not start:
                    self._begin(load)
                load.ready = buffer.copied = self._copy(target, piece)

    def _next_buffer(self) -> _Buffer:
        """The next buffer, once its last copy is done."""
        if len(self.buffers) < _BUFFERS:
            buffer = _Buffer(self._runtime.allocate_pinned(self._piece_bytes))
        else:
            buffer = self.buffers.popleft()
        self.buffers.append(buffer)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer

    def _begin(self, load: _Load) -> None:
        for event in load.free:
            self.stream.wait_event(event)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Submit a copy; returns the event after it."""
        before = self._runtime.record(self.stream, timed=True)
        self._runtime.copy(target, source, self.stream, self._piece_bytes)
        after = self._runtime.record(self.stream, timed=True)
        self.timings.add(before, after, target.numel())
        return after
