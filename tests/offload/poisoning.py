"""A backend of streaming for tests: slots hold poison until their copy was waited for, and time is simulated."""

from dataclasses import dataclass

import torch

from tests.internals.offload import Source

POISON = 0xFF  # NaN in floating point, -1 in integers


class PoisoningBackend:
    """A `Backend` on a CPU whose slots hold poison from `issue` to `wait`; `wait` makes the copy.

    Calls in another order than that of `Backend` are refused.

    With `link_bytes_per_s`, copies go one after the other over one link, while computation goes on: `advance` tells
    how long it takes. A `wait` for a copy that is not at its end moves `clock` there.

    Args:
        link_bytes_per_s: The bytes per second of the link. None: copies take no time.
        compute_s: Seconds by which `release` advances the clock.
    """

    def __init__(self, *, link_bytes_per_s: float | None = None, compute_s: float = 0.0) -> None:
        self.device = torch.device("cpu")
        self.clock = 0.0  # seconds
        self.stall_s = 0.0
        self.issues = self.waits = self.releases = 0
        self.bytes_copied = 0
        self.synchronous_loads = 0
        self._link_bytes_per_s, self._compute_s = link_bytes_per_s, compute_s
        self._link_free_at = 0.0
        self._slots: list[torch.Tensor] = []
        self._loads: dict[int, _Load] = {}
        self._closed = False

    def allocate(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """See `Backend`."""
        assert not self._slots, "allocate() is called once"
        with torch.inference_mode(False):
            self._slots = [torch.full((nbytes,), POISON, dtype=torch.uint8) for _ in range(count)]
        return list(self._slots)

    def issue(self, slot: int, source: Source) -> None:
        """See `Backend`."""
        assert not self._closed, "nothing comes after close()"
        assert source.nbytes <= self._slots[slot].numel(), "slots are as large as the largest layer"
        self._slots[slot].fill_(POISON)
        if self._link_bytes_per_s is not None:
            self._link_free_at = max(self._link_free_at, self.clock) + source.nbytes / self._link_bytes_per_s
        self._loads[slot] = _Load(source, self._link_free_at)
        self.issues += 1
        self.bytes_copied += source.nbytes

    def wait(self, slot: int) -> None:
        """See `Backend`."""
        assert slot in self._loads, f"slot {slot}: wait() comes after issue()"
        load = self._loads[slot]
        if load.ends_at > self.clock:
            self.synchronous_loads += 1
            self.stall_s += load.ends_at - self.clock
            self.clock = load.ends_at
        if not load.copied:
            load.source.read_into(self._slots[slot][: load.source.nbytes], 0)
            load.copied = True
        self.waits += 1

    def release(self, slot: int) -> None:
        """See `Backend`."""
        assert slot in self._loads, f"slot {slot}: release() comes after issue()"
        assert self._loads[slot].copied, f"slot {slot}: release() comes after wait()"
        self.releases += 1
        self.advance(self._compute_s)

    def advance(self, seconds: float) -> None:
        """The computation takes so long."""
        self.clock += seconds

    def copy_rate(self) -> float:
        """See `Backend`."""
        return self._link_bytes_per_s or 0.0 if self.bytes_copied else 0.0

    def close(self) -> None:
        """See `Backend`."""
        self._closed = True
        self._loads.clear()
        self._slots.clear()


@dataclass(slots=True)
class _Load:
    source: Source
    ends_at: float
    copied: bool = False
