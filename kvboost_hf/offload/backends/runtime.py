"""What the backend for CUDA asks of CUDA."""

from typing import Protocol, cast

import torch


class Event(Protocol):
    """A point in the work of a stream, as `torch.cuda.Event` has it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds until another event; both must have happened."""


class Stream(Protocol):
    """Work that is done in order, as `torch.cuda.Stream` has it; equal to others that name the same stream."""

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class Runtime(Protocol):
    """Streams, events, memory and copies of one device."""

    def new_stream(self) -> Stream:
        """A stream whose work goes before that of others."""

    def current_stream(self) -> Stream:
        """Where the caller's computation is submitted to."""

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """A new event after all that has been submitted to a stream; only `timed` ones tell the time."""

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """uint8 [nbytes] on the device, which `stream` writes to."""

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] in host memory that copies need not wait for."""

    def is_pinned(self, flat: torch.Tensor) -> bool:
        """Whether memory is such memory."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, piece_bytes: int) -> None:
        """Submit copies from pinned memory to the device, of so many bytes each."""


class CudaRuntime:
    """The real one.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def new_stream(self) -> Stream:
        """See `Runtime`."""
        return cast(Stream, torch.cuda.Stream(self._device, priority=-1))  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """See `Runtime`."""
        return cast(Stream, torch.cuda.current_stream(self._device))

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """See `Runtime`. A thread that waits for the event sleeps."""
        event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        event.record(cast(torch.cuda.Stream, stream))
        return cast(Event, event)

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """See `Runtime`. Copies that are under way when the tensor is freed do not harm whoever gets its memory."""
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        flat.record_stream(cast(torch.cuda.Stream, stream))
        return flat

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """See `Runtime`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, flat: torch.Tensor) -> bool:
        """See `Runtime`."""
        return flat.is_pinned()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, piece_bytes: int) -> None:
        """See `Runtime`."""
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            for there, here in zip(torch.split(target, piece_bytes), torch.split(source, piece_bytes), strict=True):
                there.copy_(here, non_blocking=True)
