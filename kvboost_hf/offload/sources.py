"""Where the bytes of a streamed layer wait for their turn."""

from typing import Protocol

import torch


class Source(Protocol):
    """The bytes of one streamed layer."""

    nbytes: int

    @property
    def path(self) -> str | None:
        """The file with the bytes, if they are in one."""

    @property
    def host(self) -> torch.Tensor | None:
        """The bytes in host memory, uint8 [nbytes], to be copied from; None if they are in a file."""

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill `target`, uint8 in host memory, with the bytes from `start` on. Any thread may call it.

        Raises:
            OSError: the file is gone, or shorter than it was.
        """
