"""Lays out several tensors in one buffer, so that a single copy moves all of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

ALIGNMENT = 256  # bytes: enough for kernels that load 16 bytes at once, and for fast copies


@dataclass(frozen=True, slots=True)
class Place:
    """The location of one tensor.

    Args:
        offset: Bytes from the start.
        shape: Of the tensor, which is contiguous.
        dtype: Of the tensor.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class FlatLayout:
    """The locations of named tensors in one buffer.

    Args:
        tensors: Their names, shapes and dtypes; tensors on the meta device are enough.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.places: dict[str, Place] = {}
        end = 0
        for name, tensor in tensors.items():
            place = Place(-(-end // ALIGNMENT) * ALIGNMENT, tuple(tensor.shape), tensor.dtype)
            self.places[name] = place
            end = place.offset + place.nbytes
        self.nbytes = -(-end // ALIGNMENT) * ALIGNMENT

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the tensors in `flat`, uint8 [at least nbytes]."""
        return {
            name: flat[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)
            for name, place in self.places.items()
        }
