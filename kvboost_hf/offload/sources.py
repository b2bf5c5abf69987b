"""The bytes of a streamed layer: the interface of the places that keep them, and where each tensor is in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kvboost_hf.checksum import Content

ALIGNMENT = 256  # bytes: enough for kernels that load 16 bytes at once, and for fast copies


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
    flat = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu")
    source.read_into(flat, 0)
    return flat


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The location of one tensor."""

    offset: int  # bytes from the start
    shape: tuple[int, ...]  # the shape of the tensor, which is contiguous
    dtype: torch.dtype  # the dtype of the tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class FlatLayout:
    """The locations of named tensors in one buffer.

    Args:
        tensors: The names, shapes and dtypes; tensors on the meta device are enough.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.places: dict[str, TensorPlace] = {}
        end = 0
        for name, tensor in tensors.items():
            place = TensorPlace(-(-end // ALIGNMENT) * ALIGNMENT, tuple(tensor.shape), tensor.dtype)
            self.places[name] = place
            end = place.offset + place.nbytes
        self.nbytes = -(-end // ALIGNMENT) * ALIGNMENT

    def sample(self, most: int = 16) -> torch.Tensor:
        """Places of the lowest byte of some numbers of each tensor, `most` of each: int64."""
        found = list[int]()
        for place in self.places.values():
            numbers = place.nbytes // place.dtype.itemsize
            steps = range(min(most, numbers))
            found += [place.offset + numbers * step // len(steps) * place.dtype.itemsize for step in steps]
        return torch.tensor(found, dtype=torch.int64, device="cpu")

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the tensors in `flat`, uint8 [at least nbytes]."""
        return {
            name: flat[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)
            for name, place in self.places.items()
        }
