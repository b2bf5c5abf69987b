"""Multiplies by 4-bit weights: an operator of `torch.library`, and the choice of the kernel that runs.

`awq_matmul` calls the operator where something traces, else the kernel directly.
"""

import logging
from functools import cache

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kvboost_hf.config import QuantKernel
from kvboost_hf.kernels import count, missing_for_triton, triton_runs
from kvboost_hf.offload.awq.int4pack import MOST_TOKENS, can_pack, int4pack_matmul
from kvboost_hf.offload.awq.tiling import awq_matmul_torch

_logger = logging.getLogger(__name__)


torch.library.define(
    "kvboost_hf::awq_matmul",
    "(Tensor x, Tensor qweight, Tensor qzeros, Tensor scales, str kernel, Tensor? scales_and_zeros=None) -> Tensor",
)


def multiply(
    x: torch.Tensor,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    kernel: QuantKernel,
    scales_and_zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by AWQ weights with the chosen kernel, as `matmul.awq_matmul` describes."""
    if scales_and_zeros is not None:
        count("int4pack", "awq_matmul")
        return int4pack_matmul(x, qweight, qzeros, scales, scales_and_zeros)
    if runs_triton(kernel, x.device):
        from kvboost_hf.offload.awq.triton_launch import awq_matmul_triton

        count("triton", "awq_matmul")
        return awq_matmul_triton(x, qweight, qzeros, scales)
    count("reference", "awq_matmul")
    return awq_matmul_torch(x, qweight, qzeros, scales)


torch.library.impl("kvboost_hf::awq_matmul", "default", multiply)


def awq_matmul(
    x: torch.Tensor,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    kernel: QuantKernel,
    scales_and_zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by 4-bit weights. Not differentiable.

    torch.compile, autograd, dispatch modes and tensor subclasses see one operator. Without them the kernel is called
    directly, since the operator takes the host longer than the launch of a kernel. Products of the layout `int4pack`
    are operators already: torch.compile sees these.

    Args:
        x: float16, bfloat16 or float32 [tokens, in_features].
        qweight: int32 [in_features, out_features / 8], or as the layout `int4pack` has it.
        qzeros: int32 [groups, out_features / 8].
        scales: float16 [groups, out_features].
        kernel: `"triton"`, `"torch"`, or `"auto"`: Triton where `x` is on a GPU that it can be compiled for.
            Weights in the layout `int4pack` are multiplied by `int4pack_matmul`, whatever it is.
        scales_and_zeros: bfloat16 [groups, out_features, 2] in the layout `int4pack`, else None.

    Returns:
        [tokens, out_features], in the dtype of `x`, summed up in float32.

    Raises:
        ValueError: `kernel` is `"triton"`, and Triton is missing or cannot run on the device of `x`.
    """
    if scales_and_zeros is not None and _is_compiled_whole(x):
        return int4pack_matmul(x, qweight, qzeros, scales, scales_and_zeros)
    if _is_watched(x):
        out: torch.Tensor = torch.ops.kvboost_hf.awq_matmul.default(
            x, qweight, qzeros, scales, kernel, scales_and_zeros
        )
        return out
    return multiply(x, qweight, qzeros, scales, kernel, scales_and_zeros)


def _is_compiled_whole(x: torch.Tensor) -> bool:
    """Whether torch.compile traces a product that is one operator of its own."""
    return torch.compiler.is_compiling() and 0 < x.shape[0] <= MOST_TOKENS and not x.requires_grad


def _is_watched(x: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.is_meta or x.requires_grad:
        return True
    return is_in_torch_dispatch_mode()


@torch.library.register_fake("kvboost_hf::awq_matmul")  # type: ignore[untyped-decorator]
def _(
    x: torch.Tensor,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    kernel: QuantKernel,
    scales_and_zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], scales.shape[1])


def wants_int4pack(kernel: QuantKernel, device: torch.device, out_features: int) -> bool:
    """Whether weights on a device are to have the layout `int4pack`: on CPUs, unless a kernel was named."""
    return kernel == "auto" and device.type == "cpu" and can_pack(out_features)


@cache
def runs_triton(kernel: QuantKernel, device: torch.device) -> bool:
    """Whether Triton's kernels run on a device; logged once.

    Raises:
        ValueError: `kernel` is `"triton"`, and they cannot.
    """
    if kernel == "triton" and (missing := _missing(device)):
        raise ValueError(
            f"`kernel` 'triton' needs {missing} to multiply on {str(device)!r}; choose 'auto' or 'torch'."
        )
    on_gpu = kernel == "auto" and device.type == "cuda"
    triton = kernel == "triton" or (on_gpu and not _is_too_old(device) and triton_runs(device))
    _logger.info("AWQ weights on %s: %s.", device, "Triton kernels" if triton else "plain PyTorch operations")
    return triton


def _missing(device: torch.device) -> str | None:
    """The requirement of Triton that a device lacks, or None."""
    if _is_too_old(device):
        return "a GPU of sm_70 or newer"
    missing = missing_for_triton(device)
    return missing and f"{missing.what} ({missing.remedy})"


def _is_too_old(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < (7, 0)
