"""AWQ weights in the layout of PyTorch's 4-bit product for CPUs, `aten::_weight_int4pack_mm_for_cpu`.

The layout `int4pack` keeps the zero points and scales of `gemm`, so that it can be turned back without a loss. It has
    qweight uint8 [out, in / 2]: the same 4-bit codes, in an order that depends on the processor's vector instructions,
    scales_and_zeros bfloat16 [groups, out, 2]: the scale, and (8 - zero) * scale, as the operator reads them.

Inputs, scales and outputs are rounded to bfloat16; sums are float32. For many tokens the weights are dequantized to
bfloat16, a tile at a time, and multiplied by PyTorch's dense product, which is faster from some 48 tokens on.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from kvboost_hf.offload.awq.layout import Packed, pack, unpack

MOST_TOKENS = 47  # that the 4-bit product multiplies; for more, dequantized weights are faster
TILE = 1 << 22  # weights that are dequantized at a time: half of them as bfloat16 are 4 MiB
_PACKED_AT_ONCE = 1 << 20  # weights, which PyTorch packs from int32
_COLUMNS = 16  # the operator needs a multiple of this number of output features


class Int4Packed(NamedTuple):
    """A weight in the layout `int4pack`."""

    qweight: torch.Tensor  # uint8 [out_features, in_features / 2]
    qzeros: torch.Tensor  # int32 [groups, out_features / 8], as in `gemm`
    scales: torch.Tensor  # float16 [groups, out_features], as in `gemm`
    scales_and_zeros: torch.Tensor  # bfloat16 [groups, out_features, 2]


class _Order(NamedTuple):
    """Codes lie in blocks of columns; in a block, input after input, each byte has the codes of two columns.

    The last block is always paired if it is smaller than the others.
    """

    block: int  # columns
    paired: bool  # byte j has columns 2 j and 2 j + 1; else columns j and j + block / 2


_ORDERS = {"64": _Order(64, False), "32": _Order(32, False), "pairs": _Order(32, True)}  # AVX-512, AVX2, others


def can_pack(out_features: int) -> bool:
    """Whether a weight can have the layout on this machine."""
    return out_features % _COLUMNS == 0 and order_name() is not None


@cache
def order_name() -> str | None:
    """The order of codes on this machine, found by unpacking what PyTorch packs; None if it has no such product here.

    Files and pickles that have another order cannot be read as they are.
    """
    draw = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (2 * 64 + 48, 4), dtype=torch.uint8, generator=draw, device="cpu")
    try:
        packed = _pack(levels)
    except (AttributeError, RuntimeError, NotImplementedError):  # another release of PyTorch, or another processor
        return None
    return next((name for name, order in _ORDERS.items() if torch.equal(_levels(packed, order), levels.T)), None)


def int4pack_from_gemm(packed: Packed) -> Int4Packed:
    """A weight of the layout `gemm` in `int4pack`; on the CPU."""
    in_features, words = packed.qweight.shape
    qweight = packed.qweight.new_empty((8 * words, in_features // 2), dtype=torch.uint8)
    most = max(1, _PACKED_AT_ONCE // (64 * in_features)) * 8  # words of whole blocks, in any order
    for start in range(0, words, most):
        levels = unpack(packed.qweight[:, start : start + most].contiguous())
        qweight[8 * start : 8 * (start + most)] = _pack(levels.T)
    scales = packed.scales.float()
    offsets = (8 - unpack(packed.qzeros).float()) * scales
    pairs = torch.stack((scales.to(torch.bfloat16), offsets.to(torch.bfloat16)), dim=-1)
    return Int4Packed(qweight, packed.qzeros, packed.scales, pairs)


def gemm_qweight(qweight: torch.Tensor, order: str | None = None) -> torch.Tensor:
    """The codes of the layout `gemm`, int32 [in, out / 8], from those of `int4pack`; on any device.

    Args:
        qweight: As `Int4Packed` has it.
        order: The `order_name()` of the machine that packed it; None for this machine's.
    """
    return pack(_levels(qweight, _ORDERS[order] if order is not None else _own_order()))


def int4pack_matmul(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, scales_and_zeros: torch.Tensor
) -> torch.Tensor:
    """Multiply by 4-bit weights with inputs in bfloat16.

    Args:
        x: [tokens, in_features], of any float dtype, on the CPU.
        qweight: As `Int4Packed` has it, and so the other tensors.

    Returns:
        [tokens, out_features], rounded to bfloat16, in the dtype of `x`.
    """
    rounded = x.to(torch.bfloat16).contiguous()
    if len(x) > MOST_TOKENS:
        return _dense(rounded, qweight, qzeros, scales).to(x.dtype)
    if not len(x):
        return x.new_empty(0, len(qweight))
    group_size = x.shape[1] // len(scales)
    found: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rounded, qweight, group_size, scales_and_zeros)
    return found.to(x.dtype)


def _dense(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply bfloat16 inputs by dequantized weights."""
    out = x.new_empty(len(x), len(qweight))
    groups, in_features = len(scales), x.shape[1]
    zeros, steps = unpack(qzeros), scales.to(torch.bfloat16)
    with torch.autocast("cpu", enabled=False):
        for columns, octets, width, paired in _tiles(qweight, _own_order()):
            codes = torch.empty_like(octets)
            weights = torch.empty(octets.shape, dtype=torch.bfloat16)
            for half in (0, 1):
                zero, step = (_half(each[:, columns], half, width, paired) for each in (zeros, steps))
                _nibbles(octets, half, out=codes)
                grouped = codes.view(groups, in_features // groups, -1).sub_(zero.reshape(groups, 1, -1))
                grouped = grouped.view(torch.int8)  # it may be below zero
                weights.view(grouped.shape).copy_(grouped).mul_(step.reshape(groups, 1, -1))
                target = _half(out[:, columns], half, width, paired)
                target.copy_((x @ weights).view(target.shape))
    return out


def _tiles(qweight: torch.Tensor, order: _Order) -> Iterator[tuple[slice, torch.Tensor, int, bool]]:
    """Columns, their bytes [in, columns / 2], and the columns of a block and whether they are paired, as `_Order`."""
    out_features, in_features = len(qweight), 2 * qweight.shape[1]
    whole = out_features // order.block * order.block
    most = max(1, TILE // (order.block * in_features)) * order.block
    for start in range(0, whole, most):
        columns = slice(start, min(start + most, whole))
        yield columns, _octets(qweight[columns], order.block), *order
    if whole < out_features:
        rest = slice(whole, out_features)
        yield rest, _octets(qweight[rest], out_features - whole), out_features - whole, True


def _levels(qweight: torch.Tensor, order: _Order) -> torch.Tensor:
    """All codes, uint8 [in, out]."""
    levels = qweight.new_empty(2 * qweight.shape[1], len(qweight))
    for columns, octets, width, paired in _tiles(qweight, order):
        for half in (0, 1):
            target = _half(levels[:, columns], half, width, paired)
            target.copy_(_nibbles(octets, half).view(target.shape))
    return levels


def _octets(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """The bytes of some blocks of `width` columns, uint8 [in, columns / 2]."""
    in_features = 2 * blocks.shape[1]
    return blocks.view(-1, in_features, width // 2).transpose(0, 1).reshape(in_features, -1)


def _nibbles(octets: torch.Tensor, half: int, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.bitwise_right_shift(octets, 4, out=out) if half else torch.bitwise_and(octets, 15, out=out)


def _half(columns: torch.Tensor, half: int, width: int, paired: bool) -> torch.Tensor:
    """The columns that are lower or upper nibbles: [rows, blocks * width] to [rows, blocks, width / 2], a view."""
    rows = len(columns)
    if paired:
        return columns.view(rows, -1, width // 2, 2)[..., half]
    return columns.view(rows, -1, 2, width // 2)[:, :, half]


def _pack(levels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int().contiguous(), 1)
    return found


def _own_order() -> _Order:
    name = order_name()
    assert name is not None, "no weight is packed without one"
    return _ORDERS[name]
