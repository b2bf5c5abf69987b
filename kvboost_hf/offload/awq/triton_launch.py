"""Plans and launches the Triton kernels for 4-bit weights. Imports Triton."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from kvboost_hf.offload.awq.tiling import MOST_ROWS, ProductTiling, plan_tiling, scratch_columns
from kvboost_hf.offload.awq.triton_kernels import dequantize, gemm, gemv, instructions
from kvboost_hf.triton_launch import Launcher

_KEPT = 4096  # plans: each shape of a weight has one for each number of rows
_COUNTERS = 4096  # of one stream; more tiles than that are not split
_gemv, _gemm, _dequantize = Launcher(gemv), Launcher(gemm), Launcher(dequantize)


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """The launch of a kernel for products of one shape."""

    launch: Launcher
    grid: tuple[int, int, int]
    strides: tuple[int, ...]  # arguments of the kernel behind its tensors
    numbers: tuple[int, ...]
    constants: tuple[int | str | None, ...]
    warps: int
    stages: int
    parts: int = 1  # of the sum

    def __call__(self, device: torch.device, tensors: tuple[torch.Tensor, ...], *numbers: int) -> None:
        """Launch the kernel with these tensors, and with further numbers as arguments."""
        given = tensors, self.strides, (*self.numbers, *numbers), (), self.constants
        self.launch(self.grid, device, given, warps=self.warps, stages=self.stages)


def awq_matmul_triton(
    x: torch.Tensor,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    tiling: ProductTiling | None = None,
) -> torch.Tensor:
    """As `matmul.awq_matmul`, by default with the tiling of `plan_tiling`. Deterministic."""
    (rows, in_features), (groups, out_features) = x.shape, scales.shape
    if rows > MOST_ROWS and tiling is None:
        return awq_matmul_dense(x, qweight, qzeros, scales)
    out = x.new_empty(rows, out_features)
    if not rows:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    stride = x.stride(0) if rows > 1 else in_features  # that of one row is whatever it was cut out of
    plan = planned(rows, stride, in_features, groups, out_features, x.dtype, x.device, tiling)
    sums, arrived = out, out
    if plan.parts > 1:
        sums = torch.empty(plan.parts * rows * out_features, dtype=torch.float32, device=x.device)
        arrived = _arrived(x)
    plan(x.device, (x, qweight.contiguous(), qzeros.contiguous(), scales.contiguous(), out, sums, arrived))
    return out


def awq_matmul_dense(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """As `matmul.awq_matmul`: dequantize the weights, some columns at a time, and multiply with PyTorch.

    The scratch memory is freed at the end, for the next layer.
    """
    out, x = x.new_empty(len(x), scales.shape[1]), x.detach()
    for start, weight in dequantized(qweight, qzeros, scales, x.dtype):
        torch.mm(x, weight, out=out[:, start : start + weight.shape[1]])
    return out


def dequantized(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Slices of columns: the first of them, and weights [in_features, columns], valid until the next slice."""
    in_features, (groups, out_features) = len(qweight), scales.shape
    packed = qweight.contiguous(), qzeros.contiguous(), scales.contiguous()
    most = scratch_columns(in_features, out_features, dtype.itemsize)
    scratch = torch.empty(in_features * most, dtype=dtype, device=qweight.device)
    for start in range(0, out_features, most):
        width = min(most, out_features - start)
        plan = plan_dequantizing(in_features, groups, out_features, width, dtype, qweight.device)
        weight = scratch[: in_features * width]
        plan(qweight.device, (*packed, weight), start // 8)
        yield start, weight.view(in_features, width)


@lru_cache(_KEPT)
def planned(
    rows: int,
    stride: int,
    in_features: int,
    groups: int,
    out_features: int,
    dtype: torch.dtype,
    device: torch.device,
    tiling: ProductTiling | None,
) -> Planned:
    """The launch for `x` [rows, in_features] with this stride, and a weight."""
    group_size, traits = in_features // groups, _traits(device)
    if tiling is None:
        tile_rows = traits.tile_rows if dtype.itemsize == 2 else 0
        shape = rows, in_features, out_features, group_size
        tiling = plan_tiling(*shape, processors=traits.processors, tile_rows=tile_rows)
    assert group_size % tiling.block_k == 0
    tiles = -(-rows // tiling.block_m) * -(-out_features // tiling.block_n)
    split = tiling.parts > 1
    assert tiles <= _COUNTERS or not split
    rest = tiling.block_n, tiling.block_k, split
    given: dict[str, Any] = {"grid": (tiles, tiling.parts, 1), "parts": tiling.parts}
    given |= {"warps": tiling.warps, "stages": tiling.stages}
    if tiling.block_m == 1:
        return Planned(
            launch=_gemv, strides=(out_features // 8,), numbers=(groups,), constants=(group_size, *rest), **given
        )
    ptx = instructions(dtype) if traits.packed and dtype.itemsize == 2 else None
    given |= {"strides": (stride, out_features // 4), "numbers": (rows, groups)}
    return Planned(launch=_gemm, constants=(group_size, tiling.block_m, *rest, tiling.scaled, ptx), **given)


@lru_cache(_KEPT)
def plan_dequantizing(
    in_features: int, groups: int, out_features: int, width: int, dtype: torch.dtype, device: torch.device
) -> Planned:
    """The launch that dequantizes `width` columns to a dtype; their first word is an argument of the call."""
    block_n, block_k = 256, 16
    return Planned(
        launch=_dequantize,
        grid=(-(-width // block_n), groups, 1),
        strides=(out_features // 8, width),
        numbers=(),
        constants=(in_features // groups, block_n, block_k),
        warps=4,
        stages=1,
    )


def _arrived(x: torch.Tensor) -> torch.Tensor:
    """A counter for each tile, int32, all zero; other streams, and graphs, get other counters."""
    if not x.is_cuda:
        return _counters(x.device, 0)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(_COUNTERS, dtype=torch.int32, device=x.device)  # in the graph's own memory
    return _counters(x.device, driver.active.get_current_stream(x.get_device()))


@cache
def _counters(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Traits:
    """A device, as kernels are planned for it."""

    processors: int
    tile_rows: int  # the most in a tile for its tensor cores; 0 where Triton has no use for them
    packed: bool  # whether PTX can be run, two numbers of 16 bits at a time


@cache
def _traits(device: torch.device) -> Traits:
    if device.type == "cpu":
        return Traits(1, 64, not knobs.runtime.interpret)
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Traits(found.multi_processor_count, 64, False)
    return traits_of(found.major, found.multi_processor_count)


def traits_of(major: int, processors: int) -> Traits:
    """NVIDIA's GPUs, by the first number of their compute capability."""
    # Hopper's tensor cores read weights from shared memory, which leaves registers for the sums of more rows. Those of
    # sm_100 take tiles of 64 rows from memory of their own, which costs 16 instructions a weight.
    tile_rows = {8: 64, 9: 128, 10: 32, 11: 32}.get(major, 64 if major >= 8 else 0)
    return Traits(processors, tile_rows, packed=major >= 8)
