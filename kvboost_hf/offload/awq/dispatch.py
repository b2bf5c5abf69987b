"""Chooses the kernel that multiplies by AWQ weights."""

import logging
from functools import cache

import torch

from kvboost_hf.config import QuantKernel
from kvboost_hf.kernel_calls import count
from kvboost_hf.offload.awq.cpu import awq_matmul_torch
from kvboost_hf.offload.awq.int4pack import can_pack, int4pack_matmul
from kvboost_hf.triton_support import missing_for_triton, triton_runs

_logger = logging.getLogger(__name__)


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
        from kvboost_hf.offload.awq.triton.launch import awq_matmul_triton

        count("triton", "awq_matmul")
        return awq_matmul_triton(x, qweight, qzeros, scales)
    count("reference", "awq_matmul")
    return awq_matmul_torch(x, qweight, qzeros, scales)


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
