"""K/V as it is."""

from collections.abc import Mapping, Sequence

import torch

from kvboost_hf.cache.codecs.base import Planes, Role
from kvboost_hf.compat import LayerRotation


class RawCodec:
    """Keeps every bit, of tensors of any dtype."""

    name = "raw"
    lossless = True

    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        """See `Codec.encode`."""
        return {"raw": x}

    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        """See `Codec.decode`."""
        return planes["raw"]

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        """See `Codec.nbytes`."""
        layers, heads, tokens, dim = shape
        return layers * heads * tokens * dim * dtype.itemsize
