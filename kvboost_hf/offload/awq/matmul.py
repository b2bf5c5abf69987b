"""Which kernel multiplies by AWQ weights."""

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kvboost_hf.config import QuantKernel
from kvboost_hf.kernel_calls import count
from kvboost_hf.offload.awq.cpu import awq_matmul_torch

_logger = logging.getLogger(__name__)

torch.library.define(
    "kvboost_hf::awq_matmul", "(Tensor x, Tensor qweight, Tensor qzeros, Tensor scales, str kernel) -> Tensor"
)


def awq_matmul(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, kernel: QuantKernel
) -> torch.Tensor:
    """Multiply by weights of four bits. Not differentiable.

    torch.compile, autograd, and modes and tensors that watch what is done, see one operator; where there is none
    of them it is left out, since it takes the host longer than the launch of a kernel.

    Args:
        x: float16, bfloat16 or float32 [tokens, in_features].
        qweight: int32 [in_features, out_features / 8].
        qzeros: int32 [groups, out_features / 8].
        scales: float16 [groups, out_features].
        kernel: `"triton"`, `"torch"`, or `"auto"`: Triton where `x` is on a GPU that it can be compiled for.

    Returns:
        [tokens, out_features], in the dtype of `x`, summed up in float32.

    Raises:
        ValueError: `kernel` is `"triton"`, and Triton is missing or cannot run on the device of `x`.
    """
    if _is_watched(x):
        out: torch.Tensor = torch.ops.kvboost_hf.awq_matmul.default(x, qweight, qzeros, scales, kernel)
        return out
    return _awq_matmul(x, qweight, qzeros, scales, kernel)


def _is_watched(x: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.is_meta or x.requires_grad:
        return True
    return is_in_torch_dispatch_mode()


def _awq_matmul(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, kernel: QuantKernel
) -> torch.Tensor:
    if _runs_triton(kernel, x.device):
        from kvboost_hf.offload.awq.triton.launch import awq_matmul_triton

        count("triton", "awq_matmul")
        return awq_matmul_triton(x, qweight, qzeros, scales)
    count("reference", "awq_matmul")
    return awq_matmul_torch(x, qweight, qzeros, scales)


torch.library.impl("kvboost_hf::awq_matmul", "default", _awq_matmul)


@torch.library.register_fake("kvboost_hf::awq_matmul")  # type: ignore[untyped-decorator]
def _(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, kernel: QuantKernel
) -> torch.Tensor:
    return x.new_empty(x.shape[0], scales.shape[1])


@cache
def _runs_triton(kernel: QuantKernel, device: torch.device) -> bool:
    triton = kernel == "triton" or (kernel == "auto" and device.type == "cuda")
    if triton and (missing := _missing(device)):
        if kernel == "triton":
            raise ValueError(
                f"`kernel` 'triton' needs {missing} to multiply on {str(device)!r}; choose 'auto' or 'torch'."
            )
        triton = False
    _logger.info("AWQ weights on %s: %s.", device, "Triton kernels" if triton else "plain PyTorch operations")
    return triton


def _missing(device: torch.device) -> str | None:
    """What keeps Triton from running on a device."""
    if find_spec("triton") is None:
        return "the package triton"
    if device.type == "cuda":
        older = not torch.version.hip and torch.cuda.get_device_capability(device) < (7, 0)
        return "a GPU of sm_70 or newer" if older else None
    from triton import knobs

    return None if knobs.runtime.interpret else "a GPU, or TRITON_INTERPRET=1 in the environment"
