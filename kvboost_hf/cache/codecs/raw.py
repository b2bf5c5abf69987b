"""K/V as it is."""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from kvboost_hf.cache.codecs.base import Codec, Planes, Role
from kvboost_hf.compat import LayerRotation


class Raw(Codec):
    """Keeps every bit. What is encoded is not copied where it is contiguous."""

    name = "raw"
    lossless = True
    sink_tokens = 0  # all are as they are

    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        """See `Codec.encode`."""
        return {"exact": x.contiguous()}

    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        """See `Codec.decode`; the plane itself."""
        return planes["exact"]

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        """See `Codec.nbytes`."""
        return prod(shape) * dtype.itemsize
