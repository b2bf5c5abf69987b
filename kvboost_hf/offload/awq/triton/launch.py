"""Which of the kernels runs, and how its parts become one."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvboost_hf.offload.awq.triton.gemm import gemm
from kvboost_hf.offload.awq.triton.gemv import gemv
from kvboost_hf.offload.awq.triton.tiling import Tiling, plan_tiling

_BLOCK = 512  # numbers that a program adds up


def awq_matmul_triton(
    x: torch.Tensor,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """See `matmul.awq_matmul`. Without `tiling` it takes that of `plan_tiling`. The same numbers at each call."""
    (rows, in_features), (groups, out_features) = x.shape, scales.shape
    out = x.new_empty(rows, out_features)
    if not rows:
        return out
    shape = rows, in_features, out_features, in_features // groups
    if tiling is None:
        processors, tensor_cores = _device(x.device)
        tiling = plan_tiling(*shape, processors=processors, tensor_cores=tensor_cores and x.itemsize == 2)
    sums = out if tiling.parts == 1 else x.new_empty(tiling.parts, rows, out_features, dtype=torch.float32)
    given = launch_arguments(x, qweight, qzeros, scales, sums, tiling)
    tiles = triton.cdiv(rows, tiling.block_m) * triton.cdiv(out_features, tiling.block_n)
    kernel = gemv if tiling.block_m == 1 else gemm
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever it is given
        kernel[(tiles, tiling.parts)](**given, **tiling.options())
        if tiling.parts > 1:
            add_up[(triton.cdiv(out.numel(), _BLOCK),)](sums, out, out.numel(), tiling.parts, BLOCK=_BLOCK)
    return out


def launch_arguments(
    x: torch.Tensor,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    tiling: Tiling,
) -> dict[str, Any]:
    """What the kernel of a tiling is called with, by name."""
    (rows, in_features), (groups, out_features) = x.shape, scales.shape
    assert in_features // groups % tiling.block_k == 0
    x = x if x.stride(1) == 1 else x.contiguous()
    given: dict[str, Any] = {
        "x": x,
        "qweight": qweight.contiguous(),
        "qzeros": qzeros.contiguous(),
        "scales": scales.contiguous(),
        "out": out,
        "words": out_features // 8,
        "GROUP": in_features // groups,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
    }
    if tiling.block_m == 1:
        return {**given, "groups": groups}
    return {**given, "rows": rows, "stride": x.stride(0), "in_features": in_features, "BLOCK_M": tiling.block_m}


@cache
def _device(device: torch.device) -> tuple[int, bool]:
    """How many processors there are, and whether Triton knows of their tensor cores."""
    if device.type == "cpu":
        return 1, True
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, torch.version.hip is not None or found.major >= 8


@triton.jit(do_not_specialize=["parts"])
def add_up(sums, out, numbers, parts, BLOCK: tl.constexpr):
    """The sum of the parts, one after the other."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        found += tl.load(sums + part * tl.cast(numbers, tl.int64) + at, mask=at < numbers, other=0.0)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=at < numbers)
