"""Multiplication by AWQ weights as an operator of `torch.library`, which is skipped where nothing traces."""

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq import dispatch

torch.library.define(
    "kvboost_hf::awq_matmul",
    "(Tensor x, Tensor qweight, Tensor qzeros, Tensor scales, str kernel, Tensor? scales_and_zeros=None) -> Tensor",
)
torch.library.impl("kvboost_hf::awq_matmul", "default", dispatch.multiply)


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
    directly, since the operator takes the host longer than the launch of a kernel.

    Args:
        x: float16, bfloat16 or float32 [tokens, in_features].
        qweight: int32 [in_features, out_features / 8], or as the layout `int4pack` has it.
        qzeros: int32 [groups, out_features / 8].
        scales: float16 [groups, out_features].
        kernel: `"triton"`, `"torch"`, or `"auto"`: Triton where `x` is on a GPU that it can be compiled for.
            Weights in the layout `int4pack` are multiplied by PyTorch's 4-bit product, whatever it is.
        scales_and_zeros: bfloat16 [groups, out_features, 2] in the layout `int4pack`, else None.

    Returns:
        [tokens, out_features], in the dtype of `x`, summed up in float32.

    Raises:
        ValueError: `kernel` is `"triton"`, and Triton is missing or cannot run on the device of `x`.
    """
    if _is_watched(x):
        out: torch.Tensor = torch.ops.kvboost_hf.awq_matmul.default(
            x, qweight, qzeros, scales, kernel, scales_and_zeros
        )
        return out
    return dispatch.multiply(x, qweight, qzeros, scales, kernel, scales_and_zeros)


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
