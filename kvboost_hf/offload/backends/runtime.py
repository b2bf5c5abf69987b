"""The operations of CUDA that the backend needs, behind an interface that tests implement without a GPU."""

from typing import Protocol, cast

import torch


class Event(Protocol):
    """A point in a stream's work, as `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds until another event; both must have happened."""


class Stream(Protocol):
    """Work done in order, as `torch.cuda.Stream`; objects of the same stream are equal."""

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class Runtime(Protocol):
    """Streams, events, memory and copies of one device."""

    def new_stream(self) -> Stream:
        """A stream of high priority."""

    def current_stream(self) -> Stream:
        """The stream of the caller's computation."""

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """A new event after all work submitted to a stream; only `timed` ones measure time."""

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """uint8 [nbytes] on the device, which `stream` writes to."""

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] in pinned host memory; in ordinary memory where no more can be pinned."""

    def is_pinned(self, flat: torch.Tensor) -> bool:
        """Whether a tensor is in pinned host memory."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, piece_bytes: int) -> None:
        """Submit copies from pinned memory to the device, of `piece_bytes` each."""


class CudaRuntime:
    """A `Runtime` by `torch.cuda`.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def new_stream(self) -> Stream:
        """See `Runtime.new_stream`."""
        return cast(Stream, torch.cuda.Stream(self._device, priority=-1))  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """See `Runtime.current_stream`."""
        return cast(Stream, torch.cuda.current_stream(self._device))

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """See `Runtime.record`. A thread that waits for the event sleeps."""
        event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        event.record(cast(torch.cuda.Stream, stream))
        return cast(Event, event)

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """See `Runtime.allocate`. Memory that is freed is not used again before copies under way have ended."""
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        flat.record_stream(cast(torch.cuda.Stream, stream))
        return flat

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """See `Runtime.allocate_pinned`. A copy from ordinary memory is over when it has been submitted."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return torch.empty(nbytes, dtype=torch.uint8)

    def is_pinned(self, flat: torch.Tensor) -> bool:
        """See `Runtime.is_pinned`."""
        return flat.is_pinned()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, piece_bytes: int) -> None:
        """See `Runtime.copy`."""
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            for there, here in zip(torch.split(target, piece_bytes), torch.split(source, piece_bytes), strict=True):
                there.copy_(here, non_blocking=True)
