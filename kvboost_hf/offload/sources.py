"""The interface of the places that keep the bytes of a streamed layer: host memory and files."""

from typing import Protocol

import torch


class Source(Protocol):
    """The bytes of one streamed layer."""

    nbytes: int

    @property
    def path(self) -> str | None:
        """The file with the bytes; None if they are in host memory."""

    @property
    def host(self) -> torch.Tensor | None:
        """The bytes in host memory, uint8 [nbytes]; None if they are in a file."""

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill `target`, uint8 in host memory, with the bytes from `start` on. Any thread may call it.

        Raises:
            OSError: the file is gone, or shorter than it was.
        """


def in_memory(source: Source) -> torch.Tensor:
    """The bytes of a layer, uint8 [nbytes]: those in host memory, or read from the file.

    Raises:
        OSError: as `Source.read_into`.
    """
    if source.host is not None:
        return source.host
    flat = torch.empty(source.nbytes, dtype=torch.uint8)
    source.read_into(flat, 0)
    return flat
