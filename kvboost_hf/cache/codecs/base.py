"""The protocol of codecs, which encode keys and values into planes; K/V as it is; KIVI; packed codes.

A codec has no state: whatever it needs besides planes follows from its `name`. Planes have as many leading entries as
there were tensors, so that one layer can be read without the others.

Codes of 1, 2, 3, 4 or 8 bits are packed in whole bytes, along the last dimension. Those that share a byte are far
apart: with 4 bits, those of dimensions j and j + dim / 2; with 2 and 1 bits, those of every quarter and every eighth.
So all first codes are unpacked by one mask, all second ones by one shift, and none has to be moved. Three bits are a
plane of the lower two, and behind it a plane of the third. Where `dim` is no multiple of the codes in a byte, the last
bits of some bytes are 0.

A Lloyd-Max codebook has the 2 ** bits values that N(0, 1) is rounded to with the least mean squared error: Lloyd,
"Least squares quantization in PCM" (1982); Max, "Quantizing for minimum distortion" (1960).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
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
        """Encode the keys or values [layers, heads, tokens, head_dim] of several layers, in float32, bfloat16 or
        float16.

        `rotations` tell for each layer how its keys turn with their positions (the tokens are at consecutive ones), or
        None where that is not known, or they do not. Returns contiguous tensors [layers, …] on the same device.
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
        """Decode one layer, or several that rotate alike, to a tensor on the device of the planes.

        `planes` are what `encode` made, one entry of each, or entries [layers, …]; `shape` is heads, tokens, head_dim,
        or the same behind the number of layers; `rotation` as it was for `encode`, the same for all entries.
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
        """Layout of the codes of one layer, for an attention that reads them where they are; None where it cannot.

        `planes` are what `encode` made of blocks of so many `tokens` each, as entries [batch, blocks, …].
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


def packed_width(dim: int, bits: int) -> int:
    """Bytes that `dim` codes take."""
    if bits == 3:
        return packed_width(dim, 2) + packed_width(dim, 1)
    return -(-dim * bits // 8)


def to_codes(x: torch.Tensor) -> torch.Tensor:
    """The whole parts, uint8, of numbers from 0 to 255, float32, which are written to."""
    # By way of int32, in place: float32 to uint8 at once takes three times as long on a CPU.
    return x.view(torch.int32).copy_(x).to(torch.uint8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [..., dim], uint8 below 2 ** bits, to uint8 [..., packed_width(dim, bits)]."""
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], dim=-1)
    first, *others = torch.split(codes, packed_width(codes.shape[-1], bits), dim=-1)
    packed = first.clone(memory_format=torch.contiguous_format)
    for place, part in enumerate(others, start=1):
        packed[..., : part.shape[-1]].add_(part, alpha=1 << (bits * place))
    return packed


def unpack(packed: torch.Tensor, bits: int, dim: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """The codes [..., dim] that `pack` was given, as numbers of a dtype. Those of 8 bits may be `packed` itself."""
    if bits == 3:
        lower, upper = torch.split(packed, [packed_width(dim, 2), packed_width(dim, 1)], dim=-1)
        return unpack(lower, 2, dim).add_(unpack(upper, 1, dim), alpha=4).to(dtype)
    if bits == 8:
        return packed.to(dtype)
    codes = packed.new_empty(*packed.shape[:-1], 8 // bits, packed.shape[-1])
    for place, part in enumerate(codes.unbind(-2)):
        torch.bitwise_right_shift(packed, bits * place, out=part)
    return codes.bitwise_and_((1 << bits) - 1).flatten(-2)[..., :dim].to(dtype)


# The positive ones; each is the mean of N(0, 1) between the midpoints to its neighbours.
_CENTROIDS = {
    1: (0.7978846,),
    2: (0.45278, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.128395, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
# The k-th border from 0 up is next to where x / (a + b * x ** 2) is k: 0.0015 off at most, which adds an 8,000th to
# the error. From the reach on, which is behind the last border, all is one code.
_BORDERS = {  # a, b, and the reach
    1: (1.0, 0.0, 0.9),
    2: (0.9815988, 0.0, 1.9),
    3: (0.4927743, 0.0293822, 3.0),
    4: (0.2564817, 0.0149876, 3.0),
}


@lru_cache(maxsize=64)
def centroids(bits: int, device: torch.device) -> torch.Tensor:
    """The codebook [2 ** bits], ascending, float32; not to be written to."""
    positive = torch.tensor(_CENTROIDS[bits], dtype=torch.float32, device="cpu")
    return torch.cat([-positive.flip(0), positive]).to(device)


def round_to(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes, uint8, of the centroids next to `x`, float32, which is written to; for NaN, that of the least.

    By arithmetic: on a CPU, a search or a table takes several times as long.
    """
    a, b, reach = _BORDERS[bits]
    x.clamp_(-reach, reach)
    return to_codes(x.div_(x.square().mul_(b).add_(a)).add_(2 ** (bits - 1)))


def look_up(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The centroids, float32, of `codes`, uint8."""
    return centroids(bits, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def squared_length(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The sums [..., 1], float32, of the squares of what `look_up` makes of codes [..., dim], `dim` even."""
    pairs = pack(codes, 4)
    squares = _squares_of_pairs(bits, codes.device).index_select(0, pairs.view(-1).int())
    return squares.view(pairs.shape).sum(-1, keepdim=True)


@lru_cache(maxsize=64)
def _squares_of_pairs(bits: int, device: torch.device) -> torch.Tensor:
    # In host memory, as all tables that several streams may read.
    squares = torch.zeros(16, dtype=torch.float32, device="cpu")
    squares[: 2**bits] = centroids(bits, squares.device).square()
    return (squares[:, None] + squares).flatten().to(device)


class Kivi:
    """KIVI: rounding to even steps; keys per channel in groups of tokens, values per token in groups of channels.

    Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024,
    https://arxiv.org/abs/2402.02750. Some channels of keys are large in all tokens. The least of a group and its step
    have the dtype of what is encoded, so that the least is exact, however far from 0 a group lies, and no range is too
    wide. The step is rounded up: an error is half a step at most, plus the rounding to the dtype.

    Args:
        key_bits: 2, 4 or 8.
        value_bits: The same for values.
        group_size: Tokens, or channels, of a group; the last one has what is left.
        sink_tokens: First tokens of a text that stay exact.
    """

    lossless = False

    def __init__(self, key_bits: int, value_bits: int, group_size: int, sink_tokens: int = 0) -> None:
        self.name = f"kivi:{key_bits}:{value_bits}:g{group_size}{sinks_mark(sink_tokens)}"
        self.sink_tokens = sink_tokens
        self._bits: dict[Role, int] = {"keys": key_bits, "values": value_bits}
        self._group_size = group_size

    @torch.no_grad()
    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        """Numbers beyond 1e38 may come back as infinity."""
        return in_blocks(lambda part, _: self._encode(part, role), x, rotations)

    def _encode(self, x: torch.Tensor, role: Role) -> Planes:
        bits, dim = self._bits[role], _dim(role)
        codes = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        least = torch.empty(self._scales_shape(x.shape, role), dtype=x.dtype, device=x.device)
        step = torch.empty_like(least)
        info = torch.finfo(x.dtype)
        least_step = max(info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal)
        for group, least_out, step_out in self._groups(codes, least, step, dim):
            low, high = group.amin(dim, keepdim=True), group.amax(dim, keepdim=True)
            least_out.copy_(low)
            step_out.copy_((high - low).div_(2**bits - 1).mul_(1 + info.eps / 2).add_(least_step))
            group.sub_(low).div_(step_out).add_(0.5)
        return {"codes": pack(to_codes(codes), bits), "least": least, "step": step}

    @torch.no_grad()
    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        x = unpack(planes["codes"], self._bits[role], shape[-1], torch.float32)
        for group, least, step in self._groups(x, planes["least"], planes["step"], _dim(role)):
            group.mul_(step).add_(least)
        return narrowed(x, dtype)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        layers, heads, tokens, head_dim = shape
        codes = layers * heads * tokens * packed_width(head_dim, self._bits[role])
        return codes + 2 * dtype.itemsize * self._scales_shape(torch.Size(shape), role).numel()

    def code_planes(
        self,
        planes: Mapping[str, torch.Tensor],
        role: Role,
        rotation: LayerRotation | None,
        tokens: int,
        head_dim: int,
    ) -> CodePlanes | None:
        """None where the last bits of bytes are no codes."""
        bits = self._bits[role]
        if head_dim * bits % 8:
            return None
        return CodePlanes(bits, planes["codes"], planes["least"], planes["step"], self._group_size)

    def _scales_shape(self, shape: torch.Size, role: Role) -> torch.Size:
        groups = list(shape)
        groups[_dim(role)] = -(-shape[_dim(role)] // self._group_size)
        return torch.Size(groups)

    def _groups(
        self, x: torch.Tensor, least: torch.Tensor, step: torch.Tensor, dim: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Views of all whole groups, and of the shorter last one, with size 1 in `dim` of their `least` and `step`."""
        length = x.shape[dim]
        whole, rest = divmod(length, self._group_size)
        for start, groups, size in ((0, whole, self._group_size), (whole, int(rest > 0), rest)):
            if groups:
                part = torch.unflatten(x.narrow(dim, start * self._group_size, groups * size), dim, (groups, size))
                least_part, step_part = (p.narrow(dim, start, groups).unsqueeze(dim) for p in (least, step))
                yield part, least_part, step_part


def _dim(role: Role) -> int:
    return -2 if role == "keys" else -1
