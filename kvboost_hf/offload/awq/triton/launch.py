"""Which of the kernels runs, and how it is called."""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from triton.runtime import driver

from kvboost_hf.offload.awq.triton.dequantize import dequantize
from kvboost_hf.offload.awq.triton.gemm import gemm
from kvboost_hf.offload.awq.triton.gemv import gemv
from kvboost_hf.offload.awq.triton.tiling import MOST_ROWS, Tiling, plan_tiling, scratch_columns

_KEPT = 4096  # launches: each shape of a weight has one for each number of rows
_ALIGNED = 16  # bytes; for other addresses Triton compiles another kernel
_COUNTERS = 4096  # of one stream; more tiles than that are not split


class Launch:
    """A kernel that is launched again and again for tensors of the same dtypes and shapes.

    `kernel[grid](...)` works out at each call what the compiler may assume of the arguments, and asks the driver what
    each pointer is: together several times as long as the launch takes. Here this is done at the first call; later
    ones hand the addresses to what was compiled then.

    Args:
        kernel: Its parameters are tensors, numbers and constants, in this order.
        grid: How many programs there are.
        constants: Of the kernel.
        warps: Of a program.
        stages: Of its pipelined loops.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int], constants: tuple[int, ...], *, warps: int, stages: int
    ) -> None:
        self.kernel, self.grid, self.constants = kernel, (*grid, 1), constants
        self.options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        self._compiled: Any = None

    def __call__(self, stream: int, tensors: tuple[torch.Tensor, ...], *numbers: int) -> None:
        """Launch it on the current device.

        Args:
            stream: The current one.
            tensors: For each parameter, of the same dtype at each call.
            numbers: Those that the kernel is specialized for are the same at each call.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = not any([address % _ALIGNED for address in addresses])
        if aligned and self._compiled is not None:
            self._compiled[self.grid](*addresses, *numbers, *self.constants, stream=stream)
            return
        compiled = self.kernel[self.grid](*tensors, *numbers, *self.constants, **self.options)
        if aligned and not torch.version.hip:  # where Triton looks at sizes, too
            self._compiled = compiled  # None in the interpreter


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A product of some shape."""

    launch: Launch
    numbers: tuple[int, ...]  # arguments of the kernel behind its tensors
    parts: int  # of the sum


def awq_matmul_triton(
    x: torch.Tensor,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """See `matmul.awq_matmul`. Without `tiling` it takes that of `plan_tiling`. The same numbers at each call."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):  # Triton launches on the current device, whatever it is given
            return awq_matmul_triton(x, qweight, qzeros, scales, tiling)
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
    sums, arrived, stream = out, out, _stream(x)
    if plan.parts > 1:
        sums = torch.empty(plan.parts * rows * out_features, dtype=torch.float32, device=x.device)
        arrived = _arrived(x, stream)
    tensors = x, qweight.contiguous(), qzeros.contiguous(), scales.contiguous(), out, sums, arrived
    plan.launch(stream, tensors, *plan.numbers)
    return out


def awq_matmul_dense(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """See `matmul.awq_matmul`: the weights become numbers of the dtype of `x`, some columns at a time, for PyTorch.

    What that takes is freed at the end, for the next layer to take.
    """
    (rows, in_features), (groups, out_features) = x.shape, scales.shape
    out, x = x.new_empty(rows, out_features), x.detach()
    packed = qweight.contiguous(), qzeros.contiguous(), scales.contiguous()
    most = scratch_columns(in_features, out_features, x.itemsize)
    scratch = x.new_empty(in_features * most)
    for start in range(0, out_features, most):
        width = min(most, out_features - start)
        launch = plan_dequantizing(in_features, groups, out_features, width, x.dtype, x.device)
        weight = scratch[: in_features * width]
        launch(_stream(x), (*packed, weight), out_features // 8, start // 8, width)
        torch.mm(x, weight.view(in_features, width), out=out[:, start : start + width])
    return out


@lru_cache(_KEPT)
def planned(
    rows: int,
    stride: int,
    in_features: int,
    groups: int,
    out_features: int,
    dtype: torch.dtype,
    device: torch.device,
    tiling: Tiling | None,
) -> Planned:
    """How the product of `x` [rows, in_features], of this stride, and a weight is launched."""
    group_size = in_features // groups
    if tiling is None:
        processors, tensor_cores = _device(device)
        shape = rows, in_features, out_features, group_size
        tiling = plan_tiling(*shape, processors=processors, tensor_cores=tensor_cores and dtype.itemsize == 2)
    assert group_size % tiling.block_k == 0
    tiles = -(-rows // tiling.block_m) * -(-out_features // tiling.block_n)
    split = tiling.parts > 1
    assert tiles <= _COUNTERS or not split
    kernel, rest, numbers = gemv, (tiling.block_n, tiling.block_k, split), (groups, out_features // 8)
    constants: tuple[int, ...] = group_size, *rest
    arguments: tuple[int, ...] = numbers
    if tiling.block_m > 1:
        kernel, constants, arguments = gemm, (group_size, tiling.block_m, *rest), (rows, stride, *numbers)
    launch = Launch(kernel, (tiles, tiling.parts), constants, warps=tiling.warps, stages=tiling.stages)
    return Planned(launch, arguments, tiling.parts)


@lru_cache(_KEPT)
def plan_dequantizing(
    in_features: int, groups: int, out_features: int, width: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    """For `width` columns of a weight, which become numbers of this dtype."""
    block_n, block_k = 256, 16
    grid = triton.cdiv(width, block_n), groups
    return Launch(dequantize, grid, (in_features // groups, block_n, block_k), warps=4, stages=1)


def _stream(x: torch.Tensor) -> int:
    """The handle of the stream that work on `x` is submitted to; 0 where there are none."""
    return int(driver.active.get_current_stream(x.get_device())) if x.is_cuda else 0


def _arrived(x: torch.Tensor, stream: int) -> torch.Tensor:
    """A counter for each tile, int32, all zero; programs of other streams, or of a graph, count in others."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.zeros(_COUNTERS, dtype=torch.int32, device=x.device)  # in the graph's own memory
    return _counters(x.device, stream)


@cache
def _counters(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


@cache
def _device(device: torch.device) -> tuple[int, bool]:
    """How many processors there are, and whether Triton knows of their tensor cores."""
    if device.type == "cpu":
        return 1, True
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, torch.version.hip is not None or found.major >= 8
