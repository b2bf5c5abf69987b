"""Keeps the first tokens of a prompt as they are, and the others through another codec.

Attention goes to the first token of a text wherever nothing else is relevant (Xiao et al., "Efficient Streaming
Language Models with Attention Sinks", ICLR 2024, https://arxiv.org/abs/2309.17453). Its key and its value are unlike
all others, so that a codec makes a larger error in them than in any other token, and all later tokens read them.
"""

from collections.abc import Mapping, Sequence

import torch

from kvboost_hf.cache.codecs.base import Codec, Planes, Role
from kvboost_hf.compat import LayerRotation

_EXACT = "start"  # the name of the plane


class ExactStart(Codec):
    """A codec for the chunk that a prompt begins with.

    Args:
        codec: Encodes all but the first `codec.sink_tokens` tokens.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec, self.name = codec, codec.name
        self.lossless, self.sink_tokens = codec.lossless, codec.sink_tokens

    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        """See `Codec.encode`."""
        start, rest = x[..., : self.sink_tokens, :], x[..., self.sink_tokens :, :]
        return {
            _EXACT: start.clone(memory_format=torch.contiguous_format),
            **self._codec.encode(rest, role, rotations),
        }

    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        """See `Codec.decode`."""
        *outer, tokens, head_dim = shape
        start = planes[_EXACT].to(dtype)
        rest = {name: plane for name, plane in planes.items() if name != _EXACT}
        left = (*outer, tokens - start.shape[-2], head_dim)
        return torch.cat([start, self._codec.decode(rest, left, dtype, role, rotation)], dim=-2)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        """See `Codec.nbytes`."""
        layers, heads, tokens, head_dim = shape
        exact = min(tokens, self.sink_tokens)
        rest = self._codec.nbytes((layers, heads, tokens - exact, head_dim), dtype, role)
        return layers * heads * exact * head_dim * dtype.itemsize + rest
