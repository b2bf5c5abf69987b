"""Counts how often a codec decodes, or replaces its decoding."""

from collections.abc import Callable, Mapping, Sequence

import torch

from kvboost_hf.cache.codecs import Codec, Planes, Role
from kvboost_hf.compat import LayerRotation

Decode = Callable[
    [Mapping[str, torch.Tensor], tuple[int, ...], torch.dtype, Role, LayerRotation | None], torch.Tensor
]  # as `Codec.decode`


class WatchedCodec(Codec):
    """A codec that encodes as another one does, and counts how often it decodes.

    Args:
        codec: The other one.
        name: Its own; None for that of the other one.
        decode: Decodes in place of the other one.
    """

    lossless = False

    def __init__(self, codec: Codec, name: str | None = None, decode: Decode | None = None) -> None:
        self._codec, self.name = codec, codec.name if name is None else name
        self.sink_tokens = codec.sink_tokens
        self._decode = codec.decode if decode is None else decode
        self.num_decoded = 0

    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        """See `Codec.encode`."""
        return self._codec.encode(x, role, rotations)

    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        """See `Codec.decode`."""
        self.num_decoded += 1
        return self._decode(planes, shape, dtype, role, rotation)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        """See `Codec.nbytes`."""
        return self._codec.nbytes(shape, dtype, role)
