"""The protocol of codecs, which encode keys and values into planes of codes and scales, and K/V as it is.

A codec has no state: whatever it needs besides planes follows from its `name`. Planes have as many leading entries as
there were tensors, so that one layer can be read without the others.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Literal, Protocol

import torch

from kvboost_hf.compat import LayerRotation
from kvboost_hf.handles import CodePlanes

Role = Literal["keys", "values"]
Planes = dict[str, torch.Tensor]

_BLOCK = 1 << 19  # numbers; as float32 two megabytes


class Codec(Protocol):
    """Storage of K/V in fewer bits, or, by `Raw` alone, as it is.

    Attributes:
        name: Tells the method and all of its parameters; chunks of one codec are never found under another.
        lossless: Whether K/V is stored as it is, without `encode` and `decode`: only of `Raw`.
        sink_tokens: So many first tokens of a prompt a store keeps as they are; see `ExactStart`.
    """

    name: str
    lossless: bool
    sink_tokens: int

    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        """Encode the keys or values of several layers.

        Args:
            x: [layers, heads, tokens, head_dim], float32, bfloat16 or float16, on any device.
            role: What they are.
            rotations: For each layer, how its keys turn with their positions (the tokens are at consecutive ones), or
                None where that is not known, or they do not.

        Returns:
            Contiguous tensors [layers, …] on the same device.
        """
        ...

    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        """Decode one layer, or several that rotate alike.

        Args:
            planes: What `encode` made, one entry of each, or entries [layers, …].
            shape: heads, tokens, head_dim, or the same behind the number of layers.
            dtype: The data type of the result.
            role: What they are.
            rotation: As it was for `encode`; the same for all entries.

        Returns:
            A tensor of this shape on the device of the planes.
        """
        ...

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        """Bytes of the planes for `x` of this shape and dtype; exact."""
        ...

    def code_planes(
        self,
        planes: Mapping[str, torch.Tensor],
        role: Role,
        rotation: LayerRotation | None,
        tokens: int,
        head_dim: int,
    ) -> CodePlanes | None:
        """Layout of the codes of one layer, for an attention that reads them where they are.

        Args:
            planes: What `encode` made of blocks of as many tokens each, as entries [batch, blocks, …].
            role: What they are.
            rotation: As it was for `encode`; the same for all entries.
            tokens: In a block.
            head_dim: The size of a key or value that was encoded.

        Returns:
            None where they have to be decoded, as always by default.
        """
        return None


def in_blocks(
    encode: Callable[[torch.Tensor, Sequence[LayerRotation | None]], Planes],
    x: torch.Tensor,
    rotations: Sequence[LayerRotation | None],
) -> Planes:
    """Encode so many layers at a time that what is in between stays in the cache of a CPU; on a GPU all of them."""
    layers = len(x) if x.is_cuda else max(1, _BLOCK // max(1, x[0].numel()))
    parts = [encode(x[i : i + layers], rotations[i : i + layers]) for i in range(0, len(x), layers)]
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def sinks_mark(sink_tokens: int) -> str:
    """The part of a codec's name that tells its `sink_tokens`."""
    return f":sinks{sink_tokens}" if sink_tokens else ""


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x`, float32, which may be written to, in a dtype; what float16 has no room for becomes the largest it has."""
    limit = torch.finfo(torch.float16).max
    return (x.clamp_(-limit, limit) if dtype == torch.float16 else x).to(dtype)


class Raw(Codec):
    """Keeps every bit. What is encoded is not copied where it is contiguous."""

    name = "raw"
    lossless = True
    sink_tokens = 0  # all are as they are

    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        return {"exact": x.contiguous()}

    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        """The plane as it is, for nothing was encoded."""
        return planes["exact"]

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        return prod(shape) * dtype.itemsize


_EXACT = "start"  # the name of the plane


class ExactStart(Codec):
    """A codec for the chunk that a prompt begins with: its first tokens as they are, the others through another codec.

    Attention goes to the first token of a text wherever nothing else is relevant (Xiao et al., "Efficient Streaming
    Language Models with Attention Sinks", ICLR 2024, https://arxiv.org/abs/2309.17453). Its key and its value are
    unlike all others, so that a codec makes a larger error in them than in any other token, and all later tokens read
    them.

    Args:
        codec: Encodes all but the first `codec.sink_tokens` tokens.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec, self.name = codec, codec.name
        self.lossless, self.sink_tokens = codec.lossless, codec.sink_tokens

    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
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
        *outer, tokens, head_dim = shape
        start = planes[_EXACT].to(dtype)
        rest = {name: plane for name, plane in planes.items() if name != _EXACT}
        left = (*outer, tokens - start.shape[-2], head_dim)
        return torch.cat([start, self._codec.decode(rest, left, dtype, role, rotation)], dim=-2)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        layers, heads, tokens, head_dim = shape
        exact = min(tokens, self.sink_tokens)
        rest = self._codec.nbytes((layers, heads, tokens - exact, head_dim), dtype, role)
        return layers * heads * exact * head_dim * dtype.itemsize + rest
