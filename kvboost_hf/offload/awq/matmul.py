"""Which kernel multiplies by AWQ weights."""

import torch

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq.cpu import awq_matmul_torch


def awq_matmul(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, kernel: QuantKernel
) -> torch.Tensor:
    """Multiply by weights of four bits.

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
    return awq_matmul_torch(x, qweight, qzeros, scales)
