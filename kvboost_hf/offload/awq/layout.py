"""Layouts of AWQ checkpoints, and conversions between them.

Three layouts are in use. In all of them a weight is `(q - z) * s`: `q` and `z` have four bits, and each column of a
group of rows has its own `z` and `s`. `in`, `out` and `groups` below are sizes of a weight [in, out].

`gemm` (AutoAWQ, and nearly every checkpoint):
    qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales float16 [groups, out]. The nibbles of a word,
    lowest first, are columns 0, 2, 4, 6, 1, 3, 5, 7.
`gemv` (AutoAWQ):
    qweight int32 [out, in / 8], qzeros int32 [out, padded / 8], scales float16 [out, padded]. Nibbles are in order.
`llm-awq` (https://github.com/mit-han-lab/llm-awq since its second kernels):
    qweight int16 [out / 4, in], scales float16 [padded, out], scaled_zeros float16 [padded, out], which are `-z * s`.
    64 inputs of 4 outputs lie together, output after output, and the nibbles of each 32 inputs are permuted.

`padded` is the number of groups up to the next multiple of 8, of 16 at a group size of 64, and of 32 at 32.
"""

from typing import NamedTuple

import torch

COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the nibbles of a word, lowest first
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each column
_GROUP_SIZES = (32, 64, 128)

Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Packed(NamedTuple):
    """A weight in the layout `gemm`."""

    qweight: torch.Tensor  # int32 [in_features, out_features / 8]
    qzeros: torch.Tensor  # int32 [groups, out_features / 8]
    scales: torch.Tensor  # float16 [groups, out_features]


def layout_of(version: str, in_features: int, out_features: int, group_size: int) -> Buffers:
    """Names, shapes and dtypes of the tensors of a weight in a checkpoint.

    Raises:
        ValueError: an unknown layout, or sizes that do not fit it.
    """
    if group_size not in _GROUP_SIZES:
        raise ValueError(f"`group_size` must be one of {_GROUP_SIZES}, got {group_size}; quantize with one of these.")
    if in_features % group_size:
        raise ValueError(f"`in_features` must be a multiple of the group size {group_size}, got {in_features}.")
    if out_features % 8:
        raise ValueError(f"`out_features` must be a multiple of 8, got {out_features}; leave this layer as it is.")
    groups = in_features // group_size
    step = 8 * 128 // group_size
    padded = -(-groups // step) * step
    if version == "gemm":
        return {
            "qweight": ((in_features, out_features // 8), torch.int32),
            "qzeros": ((groups, out_features // 8), torch.int32),
            "scales": ((groups, out_features), torch.float16),
        }
    if version == "gemv":
        return {
            "qweight": ((out_features, in_features // 8), torch.int32),
            "qzeros": ((out_features, padded // 8), torch.int32),
            "scales": ((out_features, padded), torch.float16),
        }
    if version == "llm-awq":
        if in_features % 64:
            raise ValueError(f"`in_features` must be a multiple of 64 in the layout llm-awq, got {in_features}.")
        return {
            "qweight": ((out_features // 4, in_features), torch.int16),
            "scales": ((padded, out_features), torch.float16),
            "scaled_zeros": ((padded, out_features), torch.float16),
        }
    if version == "int4pack":
        return {
            "qweight": ((out_features, in_features // 2), torch.uint8),
            "qzeros": ((groups, out_features // 8), torch.int32),
            "scales": ((groups, out_features), torch.float16),
            "scales_and_zeros": ((groups, out_features, 2), torch.bfloat16),
        }
    raise ValueError(f"`version` must be 'gemm', 'gemv' or 'llm-awq', got {version!r}; take a checkpoint in gemm.")


def pack(values: torch.Tensor) -> torch.Tensor:
    """Put columns into the words of `gemm`: uint8 [..., columns], below 16, to int32 [..., columns / 8]."""
    nibbles = values.reshape(-1, 8)[:, COLUMNS]
    octets = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return octets.reshape(-1).view(torch.int32).view(*values.shape[:-1], values.shape[-1] // 8)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """The columns in the words of `gemm`: int32 [..., words] to uint8 [..., 8 * words]."""
    return _nibbles(words).view(*words.shape, 8)[..., _NIBBLES].flatten(-2)


def dequantize(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A weight of the layout `gemm` as float32 [in_features, out_features]; the reference for all kernels."""
    levels = unpack(qweight).float().view(len(scales), -1, scales.shape[1])
    return ((levels - unpack(qzeros).float()[:, None]) * scales.float()[:, None]).flatten(0, 1)


def gemm_from_gemv(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> Packed:
    """A weight of the layout `gemv` in `gemm`."""
    levels, zeros = _nibbles(qweight), _nibbles(qzeros)
    groups = levels.shape[1] // group_size
    return Packed(pack(levels.T), pack(zeros.T[:groups]), scales.T[:groups].contiguous())


def gemm_from_llm_awq(
    qweight: torch.Tensor, scales: torch.Tensor, scaled_zeros: torch.Tensor, group_size: int
) -> Packed:
    """A weight of the layout `llm-awq` in `gemm`; zero points are rounded back from `scaled_zeros`."""
    blocks = _nibbles(qweight).view(len(qweight), -1, 4, 2, 4, 2, 4)  # out / 4, in / 64, 4 of out, then 64 of in
    levels = blocks.permute(0, 2, 1, 3, 6, 4, 5).flatten(2).flatten(0, 1)
    groups = levels.shape[1] // group_size
    steps = scales[:groups].float()
    zeros = (-scaled_zeros[:groups].float() / steps).round().nan_to_num(0).clamp(0, 15)
    return Packed(pack(levels.T), pack(zeros.to(torch.uint8)), scales[:groups].contiguous())


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    octets = words.reshape(-1).view(torch.uint8)
    width = 2 * words.itemsize * words.shape[-1]
    return torch.stack((octets & 15, octets >> 4), dim=-1).view(*words.shape[:-1], width)
