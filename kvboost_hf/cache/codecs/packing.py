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
        return unpack(upper, 1, dim, dtype).mul_(4).add_(unpack(lower, 2, dim, dtype))
    if bits == 8:
        return packed.to(dtype)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    codes = (packed.unsqueeze(-2) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :dim].to(dtype)
