"""Codes of 1, 2, 3, 4 or 8 bits: packed in whole bytes, along the last dimension, and as Lloyd-Max codebooks.

The codes that share a byte are far apart: with 4 bits, those of dimensions j and j + dim / 2; with 2 and 1 bits,
those of every quarter and every eighth. So all first codes are unpacked by one mask, all second ones by one shift, and
none has to be moved. Three bits are a plane of the lower two, and behind it a plane of the third. Where `dim` is no
multiple of the codes in a byte, the last bits of some bytes are 0.

A Lloyd-Max codebook has the 2 ** bits values that N(0, 1) is rounded to with the least mean squared error: Lloyd,
"Least squares quantization in PCM" (1982); Max, "Quantizing for minimum distortion" (1960).
"""

from functools import lru_cache

import torch


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
