"""Codes of 1, 2, 3, 4 or 8 bits in whole bytes, along the last dimension.

The codes that share a byte are far apart: with 4 bits, those of dimensions j and j + dim / 2; with 2 and 1 bits,
those of every quarter and every eighth. So all first codes are unpacked by one mask, all second ones by one shift, and
none has to be moved. Three bits are a plane of the lower two, and behind it a plane of the third. Where `dim` is no
multiple of the codes in a byte, the last bits of some bytes are 0.
"""

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
