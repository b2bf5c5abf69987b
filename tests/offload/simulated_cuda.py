"""A GPU that does its work as late, and in as odd an order, as what was submitted allows.

Nothing runs until somebody waits for it. Then a random stream of those that may go on does one step, and so on. A
copy takes two: first its target is poison, later it has the bytes that its source has by then.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.internals.offload import Stream

POISON = 0xAB
BYTES_PER_MS = 1000


class SimulatedEvent:
    """Happens when its stream has come to it."""

    def __init__(self, gpu: "SimulatedGpu", timed: bool) -> None:
        self.gpu, self.timed = gpu, timed
        self.happened_at: float | None = None

    def query(self) -> bool:
        self.gpu.go_on()
        return self.happened_at is not None

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: self.happened_at is not None)

    def elapsed_time(self, end_event: Any) -> float:
        assert self.timed
        assert end_event.timed
        assert self.happened_at is not None
        assert end_event.happened_at is not None
        return end_event.happened_at - self.happened_at


@dataclass(eq=False)
class SimulatedStream:
    """Steps in order; a step that returns False has to wait."""

    gpu: "SimulatedGpu"
    steps: deque[Callable[[], bool | None]] = field(default_factory=deque)

    def wait_event(self, event: Any) -> None:
        self.gpu.submit(self, lambda: event.happened_at is not None)

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.steps)


class SimulatedGpu:
    """A `LayerLink`.

    Args:
        seed: The seed of the order.
        pins: Whether host memory that it has not allocated counts as pinned.
    """

    def __init__(self, seed: int, pins: bool = True) -> None:
        self.random = random.Random(seed)
        self.pins = pins
        self.now_ms = 0.0
        self.streams: list[SimulatedStream] = []
        self.computing = self.favourite = self.new_stream()
        self.copies = 0
        self._pinned: list[torch.Tensor] = []
        self._lock = threading.RLock()

    def new_stream(self, device: torch.device | None = None) -> SimulatedStream:
        self.streams.append(SimulatedStream(self))
        return self.streams[-1]

    def current(self, device: torch.device) -> SimulatedStream:
        return self.computing

    def record(self, stream: Stream, *, timed: bool = False) -> SimulatedEvent:
        event = SimulatedEvent(self, timed)

        def happen() -> None:
            event.happened_at = self.now_ms

        self.submit(stream, happen)
        return event

    def allocate(self, nbytes: int, device: torch.device, stream: Stream) -> torch.Tensor:
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def pinned(self, shape: torch.Size, dtype: torch.dtype, *, warns: bool = True) -> torch.Tensor:
        self._pinned.append(torch.full(shape, POISON, dtype=dtype))
        return self._pinned[-1]

    def is_pinned(self, host: torch.Tensor) -> bool:
        return self.pins

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream, piece_bytes: int) -> None:
        mine = source.untyped_storage().data_ptr()
        assert self.pins or mine in [pinned.untyped_storage().data_ptr() for pinned in self._pinned]
        for there, here in zip(target.split(piece_bytes), source.split(piece_bytes), strict=True):
            self._copy(there, here, stream)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        self.copies += 1

        def start() -> None:
            target.fill_(POISON)

        def finish() -> None:
            target.copy_(source)
            self.now_ms += target.numel() / BYTES_PER_MS

        self.submit(stream, start)
        self.submit(stream, finish)

    def launch(self, kernel: Callable[[], None]) -> None:
        """Submit computation to the current stream."""
        self.submit(self.computing, kernel)

    def submit(self, stream: Stream, step: Callable[[], bool | None]) -> None:
        with self._lock:
            stream.steps.append(step)  # type: ignore[attr-defined]

    def go_on(self) -> None:
        """Do some of what could be done, or none of it."""
        with self._lock:
            for _ in range(self.random.randrange(4)):
                self._step()

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Do what is submitted until something is true."""
        with self._lock:
            while not reached():
                assert self._step(), "a deadlock: all streams wait"

    def run(self) -> None:
        """Do all that is submitted."""
        for stream in self.streams:
            stream.synchronize()

    def _step(self) -> bool:
        if not self.random.randrange(20):
            self.favourite = self.random.choice(self.streams)  # goes far ahead of the others
        order = self.random.sample(self.streams, len(self.streams))
        for stream in [self.favourite, *order] if self.random.randrange(4) else order:
            if stream.steps and stream.steps[0]() is not False:
                stream.steps.popleft()
                return True
        return False
