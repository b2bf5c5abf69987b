"""A linear layer on 4-bit weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq.cpu import awq_matmul_transposed_torch
from kvboost_hf.offload.awq.layout import gemm_from_gemv, gemm_from_llm_awq, layout_of
from kvboost_hf.offload.awq.matmul import awq_matmul


class AwqLinear(nn.Module):
    """`y = x @ W + bias`, with AWQ weights `W` in the layout `gemm`.

    Buffers, with `g` the group size: `qweight` int32 [in_features, out_features / 8], `qzeros` int32
    [in_features / g, out_features / 8], `scales` float16 [in_features / g, out_features], `bias` [out_features] or
    None. Element (i, o) of `W` is `(q[i, o] - z[i // g, o]) * scales[i // g, o]`; column `o` of a word of 8 is at bit
    [0, 16, 4, 20, 8, 24, 12, 28][o]. Only `bias` follows `to(dtype)`. Gradients reach `x`, for adapters that are
    trained beside the weights.

    Args:
        in_features: A multiple of the group size.
        out_features: A multiple of 8.
        bias: Whether there is one.
        group_size: Rows that share a scale and a zero: 32, 64 or 128.
        quant_kernel: As `StreamingConfig` has it.
        version: Layout of the checkpoint: `"gemm"`, `"gemv"` or `"llm-awq"`. The buffers have the names and shapes of
            the checkpoint until `to_gemm_()` has been called.

    Raises:
        ValueError: sizes that do not fit the layout, or an unknown one.
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    scaled_zeros: torch.Tensor  # of llm-awq alone
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        group_size: int,
        quant_kernel: QuantKernel = "auto",
        version: str = "gemm",
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.group_size = group_size
        self.quant_kernel = quant_kernel
        self.version = version
        for name, (shape, dtype) in layout_of(version, in_features, out_features, group_size).items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))
        self.register_buffer("bias", torch.zeros(out_features, dtype=torch.float16) if bias else None)

    def to_gemm_(self) -> None:
        """Convert buffers loaded from a checkpoint of another layout to `gemm`, in place."""
        if self.version == "gemv":
            found = gemm_from_gemv(self.qweight, self.qzeros, self.scales, self.group_size)
        elif self.version == "llm-awq":
            found = gemm_from_llm_awq(self.qweight, self.scales, self.scaled_zeros, self.group_size)
            del self.scaled_zeros
        else:
            return
        for name, tensor in found._asdict().items():
            self.register_buffer(name, tensor)
        self.version = "gemm"

    def expect_(self, version: str) -> None:
        """Replace the buffers with those of a checkpoint of another layout, on the meta device.

        Raises:
            ValueError: sizes that do not fit the layout, or an unknown one.
        """
        found = layout_of(version, self.in_features, self.out_features, self.group_size)
        for name in ("qweight", "qzeros", "scales"):
            del self._buffers[name]
        for name, (shape, dtype) in found.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device="meta"))
        self.version = version

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the dtype of `x`.

        Raises:
            ValueError: `x` has other features, or the buffers still have the layout of another version.
        """
        if x.shape[-1] != self.in_features:
            raise ValueError(f"`x` must have {self.in_features} features, got a shape of {tuple(x.shape)}.")
        if self.version != "gemm":
            raise ValueError(f"The weights must have the layout gemm, got {self.version}; call to_gemm_() first.")
        weight = self.qweight, self.qzeros, self.scales
        rows = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled() and x.requires_grad:
            y: torch.Tensor = _Product.apply(rows, *weight, self.quant_kernel)  # type: ignore[no-untyped-call]
        else:
            y = awq_matmul(rows, *weight, self.quant_kernel)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """The sizes that `print` shows."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, group_size={self.group_size}, version={self.version}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "AwqLinear":
        kept = [tensor for name, tensor in self._buffers.items() if name != "bias"]

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            found = fn(tensor)
            if found.dtype == tensor.dtype or all(tensor is not other for other in kept):
                return found
            return tensor.to(found.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


class _Product(torch.autograd.Function):
    """The product, with a gradient of `x` alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        qweight: torch.Tensor,
        qzeros: torch.Tensor,
        scales: torch.Tensor,
        kernel: QuantKernel,
    ) -> torch.Tensor:
        ctx.save_for_backward(qweight, qzeros, scales)
        return awq_matmul(x, qweight, qzeros, scales, kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return awq_matmul_transposed_torch(grad, *ctx.saved_tensors), None, None, None, None
