"""The interface of the places that keep the bytes of a streamed layer: host memory and files."""

from collections.abc import Mapping
from typing import Protocol

import torch

from kvboost_hf.checksum import Content


class Source(Protocol):
    """The bytes of one streamed layer."""

    nbytes: int

    @property
    def host(self) -> torch.Tensor | None:
        """The bytes in host memory, uint8 [nbytes]; None if they are in a file."""

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill `target`, uint8 in host memory, with the bytes from `start` on. Any thread may call it.

        Raises:
            OSError: the file was changed, or cannot be read.
        """


class LayerSource(Source, Protocol):
    """The bytes of a layer for as long as it is streamed."""

    @property
    def contents(self) -> Mapping[str, Content] | None:
        """The contents of the layer's tensors, by name and in order, if they are in a file."""

    def close(self) -> None:
        """Let go of the bytes, which nobody reads any more."""


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
