"""Layouts of weights of four bits in checkpoints, and their conversion to one of them, `gemm`.

In all of them a weight is `(q - z) * s`: `q` and `z` have four bits, and each column of a group of rows has its own
`z` and `s`. `in`, `out` and `groups` below are sizes of a weight [in, out].

`gemm` (AutoAWQ; what the kernels read):
    qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales float16 [groups, out]. The nibbles of a word,
    lowest first, are columns 0, 2, 4, 6, 1, 3, 5, 7.
`gemv` (AutoAWQ):
    qweight int32 [out, in / 8], qzeros int32 [out, padded / 8], scales float16 [out, padded]. Nibbles are in order.
`llm-awq` (https://github.com/mit-han-lab/llm-awq since its second kernels):
    qweight int16 [out / 4, in], scales float16 [padded, out], scaled_zeros float16 [padded, out], which are `-z * s`.
    64 inputs of 4 outputs lie together, output after output, and the nibbles of each 32 inputs are permuted.
`pack-quantized` (https://github.com/vllm-project/compressed-tensors):
    weight_packed int32 [out, in / 8], weight_scale [out, groups], weight_zero_point int32 [out / 8, groups], or none
    where all are 8, weight_g_idx int32 [in], or none where rows of a group lie together. Nibbles are in order.
`gptq` and `gptq_v2` (https://github.com/ModelCloud/GPTQModel, AutoGPTQ, Optimum):
    qweight int32 [in / 8, out], qzeros int32 [groups, out / 8], scales [groups, out], g_idx int32 [in], or none.
    Nibbles are in order. `gptq` stores words of zero points less 0x11111111: a zero of 0 borrows from the next.

`int4pack.py` describes the layout `int4pack`, which no checkpoint has.

`padded` is the number of groups up to the next multiple of 8, of 16 at a group size of 64, and of 32 at 32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the nibbles of a word, lowest first
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each column
_GROUP_SIZES = (32, 64, 128)
AWQ = ("gemm", "gemv", "llm-awq")
VERSIONS = (*AWQ, "pack-quantized", "gptq", "gptq_v2")

_ONES = 0x11111111  # a one in each nibble of a word
_SYMMETRIC_ZERO = 8  # of weights that are stored without zero points

Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """How a checkpoint holds one weight.

    Args:
        version: The layout.
        group_size: Rows that share a scale and a zero point.
        zeros: Whether there are zero points.
        index: Whether there is an index of groups, with the group of each row.
        ordered: Whether its rows may lie anywhere, as after quantization in the order of activations; else the index
            is only checked.
    """

    version: str
    group_size: int
    zeros: bool = True
    index: bool = False
    ordered: bool = False

    @property
    def gemm_group_size(self) -> int:
        """The group size in `gemm`: the largest that divides the one of the checkpoint.

        Raises:
            ValueError: there is none.
        """
        found = next((size for size in reversed(_GROUP_SIZES) if self.group_size % size == 0), None)
        if found is None:
            raise ValueError(
                f"The group size must be a multiple of {_GROUP_SIZES[0]}, got {self.group_size}; quantize with "
                f"{_GROUP_SIZES[-1]}, or leave this layer as it is."
            )
        return found


class Packed(NamedTuple):
    """A weight in the layout `gemm`."""

    qweight: torch.Tensor  # int32 [in_features, out_features / 8]
    qzeros: torch.Tensor  # int32 [groups, out_features / 8]
    scales: torch.Tensor  # float16 [groups, out_features]


class Converted(NamedTuple):
    """A weight converted to `gemm`."""

    packed: Packed
    order: torch.Tensor | None  # int32 [in_features], the feature of `x` for each row; None if they are in order
    rounded: int = 0  # scales that float16 does not hold exactly


def layout_of(
    version: str,
    in_features: int,
    out_features: int,
    group_size: int,
    *,
    zeros: bool = True,
    index: bool = False,
) -> Buffers:
    """Names, shapes and dtypes of the tensors of a weight in a checkpoint.

    Args:
        version: The layout.
        in_features: A multiple of the group size.
        out_features: A multiple of 8.
        group_size: Rows that share a scale and a zero point.
        zeros: As `StoredWeight` has it.
        index: As `StoredWeight` has it.

    Raises:
        ValueError: an unknown layout, or sizes that do not fit it.
    """
    if version in AWQ and group_size not in _GROUP_SIZES:
        raise ValueError(f"`group_size` must be one of {_GROUP_SIZES}, got {group_size}; quantize with one of these.")
    if in_features % group_size:
        raise ValueError(f"`in_features` must be a multiple of the group size {group_size}, got {in_features}.")
    if out_features % 8:
        raise ValueError(f"`out_features` must be a multiple of 8, got {out_features}; leave this layer as it is.")
    groups = in_features // group_size
    step = 8 * 128 // group_size
    padded = -(-groups // step) * step if version in AWQ else groups
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
    if version == "pack-quantized":
        found: Buffers = {
            "weight_packed": ((out_features, in_features // 8), torch.int32),
            "weight_scale": ((out_features, groups), torch.float32),
        }
        if zeros:
            found["weight_zero_point"] = ((out_features // 8, groups), torch.int32)
        if index:
            found["weight_g_idx"] = ((in_features,), torch.int32)
        return found
    if version in ("gptq", "gptq_v2"):
        found = {
            "qweight": ((in_features // 8, out_features), torch.int32),
            "qzeros": ((groups, out_features // 8), torch.int32),
            "scales": ((groups, out_features), torch.float32),
        }
        return {**found, "g_idx": ((in_features,), torch.int32)} if index else found
    if version == "int4pack":
        return {
            "qweight": ((out_features, in_features // 2), torch.uint8),
            "qzeros": ((groups, out_features // 8), torch.int32),
            "scales": ((groups, out_features), torch.float16),
            "scales_and_zeros": ((groups, out_features, 2), torch.bfloat16),
        }
    raise ValueError(f"`version` must be one of {VERSIONS}, got {version!r}; take a checkpoint in gemm.")


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


def to_gemm(stored: StoredWeight, tensors: Mapping[str, torch.Tensor]) -> Converted:
    """Convert a weight.

    Args:
        stored: How the checkpoint holds it.
        tensors: As `layout_of` has them, on any device; on the meta device, only shapes are converted.

    Raises:
        ValueError: a scale is out of the range of float16, or groups have other numbers of rows than the layout says.
    """
    convert: dict[str, Callable[..., Converted]] = {
        "gemv": _from_gemv,
        "llm-awq": _from_llm_awq,
        "pack-quantized": _from_pack_quantized,
        "gptq": _from_gptq,
        "gptq_v2": _from_gptq,
    }
    return convert[stored.version](stored, **tensors)


def _from_gemv(stored: StoredWeight, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Converted:
    levels, zeros = _nibbles(qweight), _nibbles(qzeros)
    groups = levels.shape[1] // stored.group_size
    return Converted(Packed(pack(levels.T), pack(zeros.T[:groups]), scales.T[:groups].contiguous()), None)


def _from_llm_awq(
    stored: StoredWeight, qweight: torch.Tensor, scales: torch.Tensor, scaled_zeros: torch.Tensor
) -> Converted:
    """Zero points are rounded back from `scaled_zeros`."""
    blocks = _nibbles(qweight).view(len(qweight), -1, 4, 2, 4, 2, 4)  # out / 4, in / 64, 4 of out, then 64 of in
    levels = blocks.permute(0, 2, 1, 3, 6, 4, 5).flatten(2).flatten(0, 1)
    groups = levels.shape[1] // stored.group_size
    steps = scales[:groups].float()
    zeros = (-scaled_zeros[:groups].float() / steps).round().nan_to_num(0).clamp(0, 15)
    return Converted(Packed(pack(levels.T), pack(zeros.to(torch.uint8)), scales[:groups].contiguous()), None)


def _from_pack_quantized(
    stored: StoredWeight,
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
) -> Converted:
    levels, scales = _nibbles(weight_packed).T, weight_scale.T
    if weight_zero_point is None:
        zeros = torch.full_like(scales, _SYMMETRIC_ZERO, dtype=torch.uint8)
    else:
        zeros = _nibbles(weight_zero_point.T)
    return _regrouped(stored, levels, zeros, scales, weight_g_idx)


def _from_gptq(
    stored: StoredWeight,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
) -> Converted:
    if stored.version == "gptq":
        qzeros = qzeros + _ONES  # wraps, and carries what was borrowed
    return _regrouped(stored, _nibbles(qweight.T).T, _nibbles(qzeros), scales, g_idx)


def _regrouped(
    stored: StoredWeight, levels: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, index: torch.Tensor | None
) -> Converted:
    """Put rows of a group together, and cut groups to those of `gemm`.

    Args:
        stored: How the checkpoint holds the weight.
        levels: uint8 [in_features, out_features].
        zeros: uint8 [groups, out_features].
        scales: [groups, out_features], of any dtype.
        index: The group of each row, [in_features]; None if they are in order.
    """
    order = None
    if index is not None:
        order = _order(stored, index, len(scales))
        levels = levels[order.long()] if stored.ordered else levels
    parts = stored.group_size // stored.gemm_group_size
    halves, rounded = _halves(scales)
    packed = Packed(pack(levels), pack(zeros).repeat_interleave(parts, 0), halves.repeat_interleave(parts, 0))
    return Converted(packed, order if stored.ordered else None, rounded)


def _order(stored: StoredWeight, index: torch.Tensor, groups: int) -> torch.Tensor:
    """The rows, group by group, int32 [in_features]."""
    if index.is_meta:
        return index
    if (index < 0).any():  # by which compressed-tensors says that rows are in order
        return torch.arange(len(index), dtype=torch.int32, device=index.device)
    rows = torch.bincount(index, minlength=groups)
    if (rows != stored.group_size).any():
        raise ValueError(
            f"Each group of a weight must have {stored.group_size} rows, got {rows.tolist()} in its index of groups. "
            "The files and config.json do not belong together; download both again."
        )
    if not stored.ordered and (index.diff() < 0).any():
        raise ValueError(
            "The index of groups must be in order where config.json says `desc_act` false, got one that is not. Set "
            "it to true there."
        )
    return torch.argsort(index, stable=True).to(torch.int32)


def _halves(scales: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Scales as float16, and the number of those that it does not hold exactly."""
    halves = scales.half()
    if scales.is_meta:
        return halves, 0
    if halves.isinf().any():
        raise ValueError(
            f"Scales of 4-bit weights must be within float16, got one of {scales.abs().max().item():g}. Stream the "
            "checkpoint that is not quantized."
        )
    return halves, int((halves != scales).sum())


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    octets = words.reshape(-1).view(torch.uint8)
    width = 2 * words.itemsize * words.shape[-1]
    return torch.stack((octets & 15, octets >> 4), dim=-1).view(*words.shape[:-1], width)
