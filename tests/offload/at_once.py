"""A GPU that has done its work when it is asked for it: the host."""

import torch

from tests.internals.offload import Event, Stream


class HappenedEvent:
    """An event that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        return 1e-3


class IdleStream:
    """A stream that has nothing left to do."""

    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass


class HostLink:
    """A `LayerLink` without a device."""

    def __init__(self) -> None:
        self._stream = IdleStream()

    def new_stream(self, device: torch.device) -> Stream:
        return IdleStream()

    def current(self, device: torch.device) -> Stream:
        return self._stream

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        return HappenedEvent()

    def allocate(self, nbytes: int, device: torch.device, stream: Stream) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def pinned(self, shape: torch.Size, dtype: torch.dtype, *, warns: bool = True) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def is_pinned(self, host: torch.Tensor) -> bool:
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, piece_bytes: int) -> None:
        target.copy_(source)
