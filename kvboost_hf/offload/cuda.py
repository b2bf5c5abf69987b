"""The backend for CUDA devices: a stream of its own copies layers while the model computes.

`CudaBackend` has the link of the process, and in tests one without a GPU. `map_to_cuda` makes pinned host memory a
tensor of the device, for tables of which a GPU reads a few rows at a time.
"""

import ctypes
import logging
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from kvboost_hf import device_link, forks
from kvboost_hf.device_link import Event, Stream, TimedEvent
from kvboost_hf.offload.host import LayerMemory, cuda_pinning
from kvboost_hf.offload.sources import Source

PIECE_BYTES = 32 << 20  # of one copy; small copies, such as of token ids, wait for the one under way
_BUFFERS = 3  # one is read into while others are copied from
BUFFER_BYTES = _BUFFERS * PIECE_BYTES
_log = logging.getLogger(__name__)


class LayerLink(Protocol):
    """What is needed of a `Link` to copy layers."""

    def new_stream(self, device: torch.device) -> Stream: ...

    def current(self, device: torch.device) -> Stream: ...

    def record(self, stream: Stream, *, timed: bool = False) -> Event: ...

    def allocate(self, nbytes: int, device: torch.device, stream: Stream) -> torch.Tensor: ...

    def pinned(self, shape: torch.Size, dtype: torch.dtype, *, warns: bool = True) -> torch.Tensor: ...

    def is_pinned(self, host: torch.Tensor) -> bool: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, piece_bytes: int) -> None: ...


def link_rate(device: torch.device) -> float:
    """Bytes per second of copies from pinned host memory to a GPU, measured with some 300 MB."""
    host = torch.empty(64 << 20, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty_like(host, device=device)
    there.copy_(host, non_blocking=True)  # the first copy maps memory
    started, ended = (torch.Event(device, enable_timing=True) for _ in range(2))
    started.record()
    for _ in range(4):
        there.copy_(host, non_blocking=True)
    ended.record()
    ended.synchronize()
    return 4 * host.nbytes / (float(started.elapsed_time(ended)) / 1e3)


class CudaBackend:
    """A `Backend` that copies from pinned host memory directly, and from elsewhere through pinned buffers.

    A thread reads into these buffers, part by part.

    Args:
        device: The device of the slots.
        link: To the device; None for that of the process.
        piece_bytes: The most bytes of one copy; None for `PIECE_BYTES`.
    """

    def __init__(self, device: torch.device, link: LayerLink | None = None, *, piece_bytes: int | None = None) -> None:
        self.device = device
        self._device_link = device_link.link if link is None else link
        is_one = link is not None or device.index is not None
        # Threads may have another current device.
        self._at = device if is_one else torch.device("cuda", torch.cuda.current_device())
        self.bytes_copied = 0
        self.synchronous_loads = 0
        self._copies = _Copies(self._device_link, self._at, piece_bytes or PIECE_BYTES)
        # Its thread ends with close(), or when this object is gone; so what it runs does not refer to this object.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvboost-layers")
        self._slots: list[_Slot] = []
        self._stalls = Timings()

    def allocate(self, nbytes: int, count: int) -> list[torch.Tensor]:
        with torch.inference_mode(False):  # else nobody could write to them outside of inference mode
            flats = [self._device_link.allocate(nbytes, self._at, self._copies.stream) for _ in range(count)]
        # Their memory may have been another tensor's, which work that was submitted before still reads.
        current = self._device_link.current(self._at)
        now = self._device_link.record(current)
        self._slots = [_Slot(flat, {current: now}) for flat in flats]
        return flats

    def issue(self, slot: int, source: Source) -> None:
        place = self._slots[slot]
        assert source.nbytes <= place.flat.numel(), "slots are as large as the largest layer"
        if place.readers:
            self.release(slot)  # was left out, after an exception
        earlier, load = place.load, _Load(source, place.flat[: source.nbytes], list(place.free.values()))
        place.load = load
        self.bytes_copied += source.nbytes
        if earlier is not None:
            with self._copies.lock:
                earlier.superseded = True
            if earlier.reading is not None:
                earlier.reading.cancel()  # does nothing if it has begun
        if source.host is not None and self._device_link.is_pinned(source.host):
            self._copies.copy_from(source.host, load)
        else:
            load.reading = self._reader.submit(self._copies.copy_through_buffers, load)

    def wait(self, slot: int) -> None:
        place = self._slots[slot]
        assert place.load is not None, "issue() comes first"
        stream = self._device_link.current(self._at)
        before = self._device_link.record(stream, timed=True)
        if place.load.reading is not None:
            self.synchronous_loads += not place.load.reading.done()
            place.load.reading.result()
        assert place.load.ready is not None
        stream.wait_event(place.load.ready)
        self._stalls.add(before, self._device_link.record(stream, timed=True))
        place.readers.add(stream)

    def release(self, slot: int) -> None:
        place = self._slots[slot]
        for stream in {self._device_link.current(self._at), *place.readers}:
            place.free[stream] = self._device_link.record(stream)
        place.readers.clear()

    @property
    def stall_s(self) -> float:
        return self._stalls.totals()[0]

    def copy_rate(self) -> float:
        seconds, nbytes = self._copies.timings.totals()
        return nbytes / seconds if seconds else 0.0

    def close(self) -> None:
        with self._copies.lock:
            for place in self._slots:
                if place.load is not None:
                    place.load.superseded = True
        self._reader.shutdown(cancel_futures=True)
        self._copies.stream.synchronize()
        self._copies.buffers.clear()
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


class _Copies:
    """The copy stream and its buffers. Two threads submit copies, one layer at a time under the lock."""

    def __init__(self, link: LayerLink, device: torch.device, piece_bytes: int) -> None:
        self.stream = link.new_stream(device)
        self.lock = forks.lock()
        self.timings = Timings()
        self.buffers: deque[_Buffer] = deque()  # the next one first
        self._link, self._piece_bytes = link, piece_bytes

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
            buffer = _Buffer(self._link.pinned(torch.Size([self._piece_bytes]), torch.uint8, warns=False))
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
        before = self._link.record(self.stream, timed=True)
        self._link.copy(target, source, self.stream, self._piece_bytes)
        after = self._link.record(self.stream, timed=True)
        self.timings.add(before, after, target.numel())
        return after


class Timings:
    """Sums the time between pairs of events once they have happened. Any thread may read it."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._seconds, self._nbytes = 0.0, 0
        self._pending: deque[tuple[Event, Event, int]] = deque()

    def add(self, before: Event, after: Event, nbytes: int = 0) -> None:
        """Two events of one stream, and the bytes that were copied between them."""
        self._pending.append((before, after, nbytes))
        self.totals()  # else they would pile up

    def totals(self) -> tuple[float, int]:
        """Seconds and bytes of the pairs that have happened."""
        with self._lock:
            while self._pending and self._pending[0][1].query():
                before, after, nbytes = self._pending.popleft()
                self._seconds += cast(TimedEvent, before).elapsed_time(after) / 1000
                self._nbytes += nbytes
            return self._seconds, self._nbytes


class _Described:
    """Memory under the CUDA array interface."""

    def __init__(self, flat: torch.Tensor, address: int) -> None:
        self.flat = flat  # lives as long as the tensor that is made of this
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (flat.numel(),),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def map_to_cuda(flat: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same bytes as a tensor of the device, without a copy.

    Args:
        flat: uint8 [nbytes], in pinned memory.
        device: A CUDA device. It reads the bytes over the link, each time anew.

    Raises:
        RuntimeError: they are not in pinned memory, or the device cannot read it.
    """
    with torch.cuda.device(device), torch.inference_mode(False):
        return torch.as_tensor(_Described(flat, _device_address(flat)), device=device)


def _device_address(flat: torch.Tensor) -> int:
    """The address by which the current device reads pinned memory: on Windows and WSL2 it is not that of the host."""
    if torch.version.hip:
        return flat.data_ptr()
    found = ctypes.c_uint64()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(flat.data_ptr()), 0)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the CUDA driver cannot be asked: {error}") from error
    if code:
        raise RuntimeError(f"cuMemHostGetDevicePointer returned {code}")
    return found.value


def can_map(device: torch.device) -> bool:
    """Whether a device can read mapped host memory, found out by reading some."""
    try:
        flat = LayerMemory(cuda_pinning(device)).allocate(4096, must_pin=True)
        # from_pretrained() asks while the meta device is the default one.
        flat.copy_(torch.arange(4096, device="cpu") % 251)
        rows = map_to_cuda(flat, device).view(torch.float16).view(64, 32)
        chosen = torch.tensor([3, 60, 3], device="cpu")
        found = torch.nn.functional.embedding(chosen.to(device), rows)
        same = torch.equal(found.cpu().view(torch.int16), flat.view(torch.int16).view(64, 32)[chosen])
    except (RuntimeError, TypeError, ValueError) as error:
        _log.info("%s cannot read mapped host memory: %s", device, error)
        return False
    return same
