"""The interface of backends, which copy layers into slots on a device."""

from typing import Protocol

import torch

from kvboost_hf.offload.sources import Source


class Backend(Protocol):
    """Copies bytes into slots while the model computes, and synchronizes both.

    For each slot the calls come in this order, any number of times: `issue`, `wait`, computation that reads the slot,
    `release`. After an exception `release`, or `wait` and `release`, may be missing. A slot keeps its bytes until the
    next `issue`, so that after `release` the next call may be `wait`.
    """

    device: torch.device
    bytes_copied: int  # of all calls of issue()
    synchronous_loads: int  # calls of wait() in which the host waited for the bytes

    def allocate(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """`count` slots, uint8 [nbytes] each, on the device. Called once; their addresses never change."""

    def issue(self, slot: int, source: Source) -> None:
        """Begin to copy `source` into the first bytes of a slot; return at once.

        The slot's content is lost. The copy begins when all computation submitted so far that may read the slot is
        done, whether or not `release` was called.
        """

    def wait(self, slot: int) -> None:
        """Make all computation submitted from now on see the bytes last issued to the slot.

        Raises:
            OSError: they could not be read.
        """

    def release(self, slot: int) -> None:
        """Note that all computation that reads the slot has been submitted."""

    @property
    def stall_s(self) -> float:
        """Seconds that the computation, not only the host, has waited for copies; 0.0 if unknown."""

    def copy_rate(self) -> float:
        """Bytes per second of the copies so far, while they ran; 0.0 if unknown."""

    def close(self) -> None:
        """Wait for copies under way, and release threads and slots. No call may follow."""
