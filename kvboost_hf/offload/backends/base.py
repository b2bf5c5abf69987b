"""What streaming asks of a device."""

from typing import Protocol

import torch

from kvboost_hf.offload.sources import Source


class Backend(Protocol):
    """Moves bytes into slots, beside the computation, and says when each may begin.

    For each slot the calls come in this order, any number of times: `issue`, `wait`, computation that reads the slot,
    `release`. After an exception `release`, or `wait` and `release`, may be left out.
    """

    device: torch.device
    bytes_copied: int  # asked for by issue() since the backend was made
    synchronous_loads: int  # calls of wait() in which the host itself stood still until the bytes were there

    def allocate(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """`count` slots, uint8 [nbytes] each, on the device. Called once; their addresses never change."""

    def issue(self, slot: int, source: Source) -> None:
        """Begin to copy `source` into the first bytes of a slot; return at once.

        What the slot held is lost. The copy begins when all computation submitted so far that may read the slot is
        done, whether or not `release` was called.
        """

    def wait(self, slot: int) -> None:
        """All computation submitted from now on sees the bytes last issued to the slot.

        Raises:
            OSError: they could not be read.
        """

    def release(self, slot: int) -> None:
        """All computation that reads what the slot holds has been submitted."""

    @property
    def stall_s(self) -> float:
        """Seconds that the computation, not the host alone, has stood still for a copy; 0.0 if unknown."""

    def copy_rate(self) -> float:
        """Bytes per second of the copies so far, while they ran; 0.0 if unknown."""

    def close(self) -> None:
        """Wait for what is under way, and give back threads and slots. Nothing may be called after it."""
