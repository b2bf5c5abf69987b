"""Counts of layer streaming."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingStats:
    """Counts since the layers were first streamed.

    Args:
        layer_calls: Forwards of streamed layers.
        hits: Calls for which the copy of the weights had been issued before.
        misses: Calls that issued the copy themselves: the first of all, and those out of order.
        synchronous_loads: Calls in which the host waited for the copy.
        bytes_copied: Bytes copied to the device, or read from files.
        copy_rate: Bytes per second while copies ran; 0.0 if unknown.
        stall_s: Seconds that the computation waited for copies; 0.0 if unknown.
    """

    layer_calls: int
    hits: int
    misses: int
    synchronous_loads: int
    bytes_copied: int
    copy_rate: float
    stall_s: float

    @property
    def hit_rate(self) -> float:
        """Hits per call of a streamed layer; 1.0 if there was none."""
        return self.hits / self.layer_calls if self.layer_calls else 1.0

    def __str__(self) -> str:
        return (
            f"{self.layer_calls} calls of streamed layers, {self.hit_rate:.1%} of them sent for ahead "
            f"({self.misses} were not), {self.bytes_copied / 1e9:.2f} GB copied at {self.copy_rate / 1e9:.2f} GB/s, "
            f"{self.stall_s:.2f} s stood still"
        )
