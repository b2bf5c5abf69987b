"""AWQ weights in the layout of PyTorch's 4-bit product for CPUs, `aten::_weight_int4pack_mm_for_cpu`.

The layout `int4pack` keeps the zero points and scales of `gemm`, so that it can be turned back without a loss. It has
    qweight uint8 [out, in / 2]: the same 4-bit codes, in an order that depends on the processor's vector instructions,
    scales_and_zeros bfloat16 [groups, out, 2]: the scale, and (8 - zero) * scale, as the operator reads them.

Where `built.py` has built an operator for it, that multiplies, except many tokens on processors with AMX: inputs have
16 bits in each group, and a token has the same bits beside any others. Elsewhere, and where columns fill no blocks,
PyTorch's product does: inputs, scales and outputs are rounded to bfloat16, and sums are float32. For many tokens the
weights are then dequantized, one tile after the other, for PyTorch's dense product, which is faster than its 4-bit one
from some 48 tokens on.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from kvboost_hf.offload.awq import built
from kvboost_hf.offload.awq.layout import Packed, pack, unpack

MOST_TOKENS = 47  # that the 4-bit product multiplies; for more, dequantized weights are faster
TILE = 1 << 22  # weights that are dequantized at a time: half of them, as bfloat16, are 4 MiB
_PACKED_AT_ONCE = 1 << 20  # weights, which PyTorch packs from int32
_COLUMNS = 16  # the operator needs a multiple of this number of output features


class Int4Packed(NamedTuple):
    """A weight in the layout `int4pack`."""

    qweight: torch.Tensor  # uint8 [out_features, in_features / 2]
    qzeros: torch.Tensor  # int32 [groups, out_features / 8], as in `gemm`
    scales: torch.Tensor  # float16 [groups, out_features], as in `gemm`
    scales_and_zeros: torch.Tensor  # bfloat16 [groups, out_features, 2]


# Columns of a block of codes, by the name of the order. Blocks lie one behind the other, and in a block input after
# input; byte j has the codes of columns j and j + block / 2. A last block of fewer columns has 2 j and 2 j + 1 in it.
_BLOCKS = {"64": 64, "32": 32}
_INSTRUCTIONS = ("AVX512", "AVX2")  # elsewhere PyTorch's product is ten times as slow as one in float32


def can_pack(out_features: int) -> bool:
    """Whether a weight can have the layout on this machine."""
    return out_features % _COLUMNS == 0 and order_name() is not None


@cache
def order_name() -> str | None:
    """The order of codes on this machine, found by unpacking what PyTorch packs; None if it has no fast product here.

    Files and pickles that have another order cannot be read as they are.
    """
    if torch.backends.cpu.get_cpu_capability() not in _INSTRUCTIONS:
        return None
    draw = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (2 * 64 + 48, 4), dtype=torch.uint8, generator=draw, device="cpu")
    try:
        packed = _pack(levels)
    except (AttributeError, RuntimeError, NotImplementedError):  # another release of PyTorch, or another processor
        return None
    return next((name for name, block in _BLOCKS.items() if torch.equal(_levels(packed, block), levels.T)), None)


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
    return Int4Packed(qweight, packed.qzeros.contiguous(), packed.scales.contiguous(), pairs)


def gemm_qweight(qweight: torch.Tensor, order: str | None = None) -> torch.Tensor:
    """The codes of the layout `gemm`, int32 [in, out / 8], from those of `int4pack`; on any device.

    Args:
        qweight: As `Int4Packed` has it.
        order: The `order_name()` of the machine that packed it; None for this machine's.
    """
    return pack(_levels(qweight, _BLOCKS[order] if order is not None else own_block()))


def int4pack_matmul(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, scales_and_zeros: torch.Tensor
) -> torch.Tensor:
    """Multiply by 4-bit weights.

    Args:
        x: [tokens, in_features], of any float dtype, on the CPU.
        qweight: As `Int4Packed` has it, and so the other tensors.

    Returns:
        [tokens, out_features], in the dtype of `x`; rounded to bfloat16 by PyTorch's products, except for many tokens
        where `dense_dtype()` is float32.
    """
    rows, in_features = x.shape
    if not rows:
        return x.new_empty(0, len(qweight))
    block = built.block_of_codes()
    fits = block and len(qweight) % block == 0 and x.dtype in built.DTYPES
    if fits and (rows <= MOST_TOKENS or not _has_tiles()):
        product = torch.ops.kvboost_hf.int4pack_mm.default
        exact: torch.Tensor = product(x.contiguous(), qweight, qzeros, scales, block)
        return exact
    if rows > MOST_TOKENS:
        return _dense(x, qweight, qzeros, scales)
    given = x if x.dtype is torch.bfloat16 else x.to(torch.bfloat16)
    # By PyTorch's own binding: `torch.ops` takes a fifth longer for a narrow weight.
    found: torch.Tensor = torch._weight_int4pack_mm_for_cpu(
        given.contiguous(), qweight, in_features // len(scales_and_zeros), scales_and_zeros
    )
    return found if found.dtype is x.dtype else found.to(x.dtype)


def _dense(x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply by dequantized weights."""
    dtype = dense_dtype()
    given, groups, in_features = x.to(dtype), len(scales), x.shape[1]
    out = given.new_empty(len(x), len(qweight))
    zeros, steps = unpack(qzeros), scales.to(dtype)
    with torch.autocast("cpu", enabled=False):
        for columns, octets, split in _tiles(qweight, own_block()):
            codes = torch.empty_like(octets)
            weights = torch.empty(octets.shape, dtype=dtype, device="cpu")
            for half in (0, 1):
                zero, step = (split(each[:, columns], half).reshape(groups, 1, -1) for each in (zeros, steps))
                _nibbles(octets, half, out=codes)
                grouped = codes.view(groups, in_features // groups, -1).sub_(zero).view(torch.int8)
                weights.view(grouped.shape).copy_(grouped).mul_(step)
                target = split(out[:, columns], half)
                target.copy_((given @ weights).view(target.shape))
    return out.to(x.dtype)


@cache
def _has_tiles() -> bool:
    """Whether dense products in bfloat16 are much faster than any other, by AMX."""
    return torch.cpu._is_amx_tile_supported() and dense_dtype() is torch.bfloat16


@cache
def dense_dtype() -> torch.dtype:
    """The dtype that weights are dequantized to: bfloat16 where the processor has instructions for it, else float32.

    Without them PyTorch takes 2 to 170 times as long for a product in bfloat16 as for one in float32.
    """
    has: Any = torch.cpu
    multiplied = has._is_avx512_bf16_supported() or has._is_amx_tile_supported()
    return torch.bfloat16 if multiplied and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


_Split = Callable[[torch.Tensor, int], torch.Tensor]


def _tiles(qweight: torch.Tensor, block: int) -> Iterator[tuple[slice, torch.Tensor, _Split]]:
    """Some columns at a time: which they are, their bytes [in, columns / 2], and how they are split into nibbles."""
    out_features, in_features = len(qweight), 2 * qweight.shape[1]
    whole = out_features // block * block
    most = max(1, TILE // (block * in_features)) * block
    for start in range(0, whole, most):
        columns = slice(start, min(start + most, whole))
        yield columns, _octets(qweight[columns], block), partial(_halves, block)
    if whole < out_features:
        rest = slice(whole, out_features)
        yield rest, _octets(qweight[rest], out_features - whole), _pairs


def _levels(qweight: torch.Tensor, block: int) -> torch.Tensor:
    """All codes, uint8 [in, out]."""
    levels = qweight.new_empty(2 * qweight.shape[1], len(qweight))
    for columns, octets, split in _tiles(qweight, block):
        for half in (0, 1):
            target = split(levels[:, columns], half)
            target.copy_(_nibbles(octets, half).view(target.shape))
    return levels


def _octets(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """The bytes of some blocks of `width` columns, uint8 [in, columns / 2]."""
    in_features = 2 * blocks.shape[1]
    return blocks.view(-1, in_features, width // 2).transpose(0, 1).reshape(in_features, -1)


def _nibbles(octets: torch.Tensor, half: int, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.bitwise_right_shift(octets, 4, out=out) if half else torch.bitwise_and(octets, 15, out=out)


def _halves(block: int, columns: torch.Tensor, half: int) -> torch.Tensor:
    """The columns of lower or upper nibbles in whole blocks: [rows, columns] to [rows, blocks, block / 2], a view."""
    return columns.view(len(columns), -1, 2, block // 2)[:, :, half]


def _pairs(columns: torch.Tensor, half: int) -> torch.Tensor:
    """The same in the last block, if it is smaller: [rows, columns] to [rows, columns / 2]."""
    return columns.view(len(columns), -1, 2)[..., half]


def _pack(levels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int().contiguous(), 1)
    return found


def load_operator() -> bool:
    """Have weights multiplied by the operator of `built.py`, where it can be built; whether it can."""
    return order_name() is not None and built.load(own_block())


def own_block() -> int:
    """Columns of a block of codes on this machine, where weights can be packed."""
    name = order_name()
    assert name is not None, "no weight is packed without one"
    return _BLOCKS[name]
