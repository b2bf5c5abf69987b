"""Access to devices that have memory of their own: streams, events, pinned memory, and copies that nobody waits for.

Stored K/V and streamed layers have one link. Tests put another object in the place of `link`, which counts, and for
which a part of the host is a device.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol, cast

import torch

from kvboost_hf import forks
from kvboost_hf.kernels import triton_runs

_log = logging.getLogger(__name__)
_Planes = dict[str, torch.Tensor]  # of encoded K/V, by name


class Event(Protocol):
    """A point in the work of a stream, as `torch.cuda.Event` has it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class TimedEvent(Event, Protocol):
    """One that was recorded with `timed`."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until another one; both must have happened."""


class Stream(Protocol):
    """Work that is done in order, as `torch.cuda.Stream` has it; objects of the same stream are equal."""

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class Link(Protocol):
    """The host's side of all such devices."""

    def is_apart(self, device: torch.device) -> bool:
        """Whether a device has memory of its own, and does what it is asked for later."""

    def stream(self, name: str, device: torch.device) -> Stream:
        """The stream of this name, which the cache has to itself."""

    def current(self, device: torch.device) -> Stream:
        """The stream that the caller's operations are queued on."""

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Within it, operations are queued on another stream."""

    def new_stream(self, device: torch.device) -> Stream:
        """A stream of high priority, which nobody else has."""

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """A new event behind all that is queued on a stream; only `timed` ones measure time."""

    def allocate(self, nbytes: int, device: torch.device, stream: Stream) -> torch.Tensor:
        """uint8 [nbytes] on a device, which a stream writes to."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, piece_bytes: int) -> None:
        """Queue copies from pinned memory to a device on a stream, of so many bytes each."""

    def send(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Queue a copy to a device; the host waits only for what is not pinned. There already, it is not copied."""

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Memory of a tensor is not given to others before what is queued on a stream so far is done."""

    def pinned(self, shape: torch.Size, dtype: torch.dtype, *, warns: bool = True) -> torch.Tensor:
        """Host memory that devices copy from and to by themselves; ordinary memory where no more can be pinned.

        From that, a copy is over when it has been queued. Once it is warned that stored K/V has such memory.
        """

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Whether a tensor is in pinned host memory."""

    def gathers(self, device: torch.device) -> bool:
        """Whether `gather` runs on a device, and reads pinned host memory there."""

    def gather(self, opened: Sequence[torch.Tensor], table: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
        """Queue the kernel of `gather_kernel.launch`. Whoever calls it keeps what it reads, with `keep`."""

    def keep(self, host: Sequence[torch.Tensor], event: Event) -> None:
        """Keep tensors in host memory, which a kernel reads, up to an event."""

    def free_bytes(self, device: torch.device) -> int:
        """Free memory of a device."""


class Kept:
    """Keeps tensors up to an event: PyTorch knows which copies read pinned memory, but not which kernels do."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._until: list[tuple[Event, Sequence[torch.Tensor]]] = []

    def add(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        """Keep these."""
        self.let_go()
        with self._lock:
            self._until.append((event, tensors))

    def let_go(self) -> None:
        """Let go of those whose event has passed."""
        if self._until:
            with self._lock:
                self._until = [each for each in self._until if not each[0].query()]


class CudaLink:
    """The real one."""

    def __init__(self) -> None:
        self._kept = Kept()

    def is_apart(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def stream(self, name: str, device: torch.device) -> Stream:
        """PyTorch keeps freed memory for the stream that it was made on: there are not many of them."""
        return _stream(name, device)

    def current(self, device: torch.device) -> Stream:
        return cast(Stream, torch.cuda.current_stream(device))

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def new_stream(self, device: torch.device) -> Stream:
        return cast(Stream, torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """A thread that waits for the event sleeps."""
        event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        event.record(cast(torch.cuda.Stream, stream))
        return cast(Event, event)

    def allocate(self, nbytes: int, device: torch.device, stream: Stream) -> torch.Tensor:
        """Memory that is not used again, once freed, before copies under way have ended."""
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.hold(flat, stream)
        return flat

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, piece_bytes: int) -> None:
        with self.using(stream):
            for there, here in zip(torch.split(target, piece_bytes), torch.split(source, piece_bytes), strict=True):
                there.copy_(here, non_blocking=True)

    def send(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        return host.to(device, non_blocking=True)

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(cast(torch.cuda.Stream, stream))

    def pinned(self, shape: torch.Size, dtype: torch.dtype, *, warns: bool = True) -> torch.Tensor:
        """PyTorch keeps what is freed for the next tensor of its size, once no copy reads it any more, so that a full
        store pins nothing new. It rounds sizes up to powers of two.
        """
        self._kept.let_go()
        try:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            if warns:
                _warn_pageable(str(error).partition("\n")[0])
            return torch.empty(shape, dtype=dtype, device="cpu")

    def is_pinned(self, host: torch.Tensor) -> bool:
        return host.is_pinned()

    def gathers(self, device: torch.device) -> bool:
        return _gathers(device)

    def gather(self, opened: Sequence[torch.Tensor], table: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
        from kvboost_hf.gather_kernel import launch

        launch(opened, table, places)

    def keep(self, host: Sequence[torch.Tensor], event: Event) -> None:
        self._kept.add(host, event)

    def free_bytes(self, device: torch.device) -> int:
        return torch.cuda.mem_get_info(device)[0]


@cache
def _gathers(device: torch.device) -> bool:
    """Whether a kernel reads pinned host memory on a device, found out by reading some; logged where it does not."""
    reason: str | None = "Triton's kernels cannot run there"
    if triton_runs(device):
        from kvboost_hf.gather_kernel import failure

        reason = failure(device)
    if reason:
        _log.info("Stored K/V is copied to %s chunk by chunk: %s.", device, reason)
    return not reason


@cache
def _stream(name: str, device: torch.device) -> Stream:
    return cast(Stream, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@cache
def _warn_pageable(reason: str) -> None:
    _log.warning(
        "No more host memory can be pinned for stored K/V (%s): copies between it and the GPU take longer. Raise the "
        "limit (`ulimit -l unlimited`; on WSL2 `memory=` in .wslconfig), or lower the budget of the store.",
        reason,
    )


link: Link = CudaLink()


# Encoded planes of stored K/V, moved beside the forward that a caller waits for


def on_host(planes: _Planes) -> tuple[_Planes, Future[None] | None]:
    """Planes that nobody else writes to; of a device with memory of its own, there as soon as the future is done."""
    device = next(iter(planes.values())).device
    if not link.is_apart(device):
        return {name: plane.cpu() for name, plane in planes.items()}, None
    planes = dict(planes)
    return planes, staging_of(device).submit(planes)


class Staging:
    """Brings planes from a device to pinned host memory: in a thread, and by a stream, of its own.

    To pin memory takes longer than to copy into it (8 ms and 0.3 ms for 17 MB beside an H100), and whoever has asked
    for a token waits for neither. Until they have arrived, planes take memory of the device: no more than an eighth of
    what is free there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, link.stream("staging", device)
        self._thread = ThreadPoolExecutor(1, "kvboost-staging")
        self._lock = forks.lock()
        self._waiting = self._room = 0  # bytes

    def submit(self, planes: _Planes) -> Future[None]:
        """Have planes moved, each in its place; they are computed by what was queued on the current stream so far."""
        made = link.record(link.current(self._device))
        nbytes = sum(plane.nbytes for plane in planes.values())
        with self._lock:
            if not self._waiting:
                self._room = link.free_bytes(self._device) // 8
            self._waiting += nbytes
            is_full = self._waiting > self._room
            moved = self._thread.submit(self._move, planes, made, nbytes)
        if is_full:
            wait([moved])
        return moved

    def _move(self, planes: _Planes, made: Event, nbytes: int) -> None:
        try:
            hosts = {name: link.pinned(plane.shape, plane.dtype) for name, plane in planes.items()}
            self._stream.wait_event(made)
            with link.using(self._stream):
                for name, plane in planes.items():
                    hosts[name].copy_(plane, non_blocking=True)
            link.record(self._stream).synchronize()
            planes.update(hosts)
        finally:
            with self._lock:
                self._waiting -= nbytes


@cache
def staging_of(device: torch.device) -> Staging:
    return Staging(device)


def on_device(planes: _Planes, device: torch.device) -> "tuple[_Planes, OnDevice | None]":
    """Copies of planes on a device, and when they are there: behind what is queued there so far."""
    if not link.is_apart(device):
        return {name: plane.to(device, copy=True) for name, plane in planes.items()}, None
    copies = {name: torch.empty_like(plane, device=device) for name, plane in planes.items()}
    stream = link.stream("promotion", device)
    # Behind the forward that has asked for a token, which none of these copies holds up.
    stream.wait_event(link.record(link.current(device)))
    with link.using(stream):
        for name, plane in planes.items():
            copies[name].copy_(plane, non_blocking=True)
            link.hold(copies[name], stream)
    return copies, OnDevice(device, link.record(stream))


class OnDevice:
    """A copy to a device that is under way.

    Args:
        device: Where to.
        copied: Behind it.
    """

    def __init__(self, device: torch.device, copied: Event) -> None:
        self._device, self._copied = device, copied
        self._is_there = False

    def result(self) -> None:
        """Have work that is queued from now on wait for the copy."""
        if not self._is_there:
            link.current(self._device).wait_event(self._copied)
            self._is_there = self._copied.query()
