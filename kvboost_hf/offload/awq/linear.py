"""A linear layer on 4-bit weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq.int4pack import gemm_qweight, int4pack_from_gemm, load_operator, order_name
from kvboost_hf.offload.awq.layout import Buffers, Packed, StoredWeight, layout_of, to_gemm
from kvboost_hf.offload.awq.matmul import awq_matmul, wants_int4pack
from kvboost_hf.offload.awq.tiling import awq_matmul_transposed_torch

WEIGHT = ("qweight", "qzeros", "scales", "scales_and_zeros")  # buffers of a weight; the last one of int4pack alone
_MULTIPLIED = ("gemm", "int4pack")  # layouts that there are kernels for


class AwqLinear(nn.Module):
    """`y = x @ W + bias`, with 4-bit weights `W` in the layout `gemm` of AWQ, or on a CPU in `int4pack`.

    Buffers of `gemm`, with `g` the group size: `qweight` int32 [in_features, out_features / 8], `qzeros` int32
    [in_features / g, out_features / 8], `scales` float16 [in_features / g, out_features], `bias` [out_features] or
    None, and `order`, the feature of `x` for each row, int32 [in_features] or None. Element (i, o) of `W` is
    `(q[i, o] - z[i // g, o]) * scales[i // g, o]`; column `o` of a word of 8 is at bit
    [0, 16, 4, 20, 8, 24, 12, 28][o]. `int4pack.py` describes the other layout. `state_dict()` and `load_state_dict()`
    have that of `gemm` in any case, and a move to another device converts the weights. Only `bias` follows
    `to(dtype)`. Gradients reach `x`, for adapters that are trained beside the weights.

    Args:
        in_features: A multiple of the group size.
        out_features: A multiple of 8.
        bias: Whether there is one.
        group_size: Rows that share a scale and a zero: 32, 64 or 128.
        quant_kernel: As `StreamingConfig` has it.
        stored: How the checkpoint holds the weight; None for the layout `gemm`. From `expect_()` to `to_gemm_()` the
            buffers have the names and shapes of the checkpoint.

    Raises:
        ValueError: sizes that do not fit the layout.
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    order: torch.Tensor | None
    bias: torch.Tensor | None
    code_order: str | None = None  # of the codes in the layout int4pack, which depends on the processor
    _kvboost_hf_saves_converted = True  # state_dict() has the layout gemm; not while the model is being loaded

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        group_size: int,
        quant_kernel: QuantKernel = "auto",
        stored: StoredWeight | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.group_size = group_size
        self.quant_kernel = quant_kernel
        self.stored = stored or StoredWeight("gemm", group_size)
        self.version = "gemm"
        for name, (shape, dtype) in layout_of("gemm", in_features, out_features, group_size).items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))
        order = torch.arange(in_features, dtype=torch.int32) if self.stored.ordered else None
        self.register_buffer("order", order)
        self.register_buffer("bias", torch.zeros(out_features, dtype=torch.float16) if bias else None)

    def expect_(self) -> None:
        """Replace the buffers with those that the checkpoint has, on the meta device.

        Raises:
            ValueError: sizes that do not fit the layout, or an unknown one.
        """
        if self.stored.version == "gemm":
            if self.version != "gemm":
                self.hold_("gemm", _on_meta(self._expected()))
            return
        expected = self._expected()  # before anything is changed
        del self._buffers["order"]
        self.hold_(self.stored.version, _on_meta(expected))

    def to_gemm_(self) -> int:
        """Convert buffers loaded from a checkpoint to `gemm`, in place.

        Returns:
            The number of scales that were rounded to float16.

        Raises:
            ValueError: as `layout.to_gemm` does.
        """
        if self.version == "gemm":
            return 0
        if self.version == "int4pack":
            found = Packed(gemm_qweight(self.qweight, self.code_order), self.qzeros, self.scales)
            self.hold_("gemm", found._asdict())
            return 0
        loaded: Any = {name: self._buffers.pop(name) for name in self._expected()}
        packed, order, rounded = to_gemm(self.stored, loaded)
        for name, tensor in (*packed._asdict().items(), ("order", order)):
            self.register_buffer(name, tensor)
        self.version = "gemm"
        return rounded

    def save_converted_(self, converted: bool) -> None:
        """Choose whether `state_dict()` has weights as checkpoints have them, or the buffers as they are."""
        self._kvboost_hf_saves_converted = converted

    def lay_out_(self, device: torch.device) -> None:
        """Convert the buffers to the layout in which a device multiplies by them, in place; they stay where they are.

        Buffers that still have the layout of a checkpoint are left as they are.
        """
        wanted = wants_int4pack(self.quant_kernel, device, self.out_features)
        if wanted:
            load_operator()
        if self.version == "gemm" and wanted:
            if self.qweight.is_meta:
                sizes = self.in_features, self.out_features, self.group_size
                self.hold_("int4pack", _on_meta(layout_of("int4pack", *sizes)))
            else:
                self.hold_("int4pack", int4pack_from_gemm(Packed(self.qweight, self.qzeros, self.scales))._asdict())
            self.code_order = order_name()
        elif self.version == "int4pack" and not wanted:
            self.to_gemm_()

    def hold_(self, version: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the buffers of the weight, but not `order`, with `tensors` in the layout `version`."""
        for name in WEIGHT:
            self._buffers.pop(name, None)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.version = version

    def _expected(self) -> Buffers:
        stored = self.stored
        sizes = self.in_features, self.out_features, stored.group_size
        return layout_of(stored.version, *sizes, zeros=stored.zeros, index=stored.index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the dtype of `x`.

        Raises:
            ValueError: `x` has other features, or the buffers still have the layout of another version.
        """
        *outer, features = x.shape
        if features != self.in_features:
            raise ValueError(f"`x` must have {self.in_features} features, got a shape of {tuple(x.shape)}.")
        if self.version not in _MULTIPLIED:
            raise ValueError(f"The weights must have the layout gemm, got {self.version}; call to_gemm_() first.")
        held: dict[str, Any] = self._buffers
        weight = held["qweight"], held["qzeros"], held["scales"], self.quant_kernel, held.get("scales_and_zeros")
        rows = x.reshape(-1, features)
        if (order := held["order"]) is not None:
            rows = rows.index_select(1, order)
        if torch.is_grad_enabled() and x.requires_grad:
            y: torch.Tensor = _Product.apply(rows, *weight)  # type: ignore[no-untyped-call]
        else:
            y = awq_matmul(rows, *weight)
        if self.bias is not None:  # a parameter, if it is trained
            y = y + self.bias.to(y.dtype)
        return y.view(*outer, self.out_features)

    def extra_repr(self) -> str:
        """The sizes that `print` shows."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, group_size={self.group_size}, version={self.version}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "AwqLinear":
        before = self.qweight.device
        kept = [tensor for name, tensor in self._buffers.items() if name != "bias"]
        super()._apply(keeping_dtypes(fn, kept), recurse)  # type: ignore[no-untyped-call]
        if before != self.qweight.device and not self.qweight.is_meta:
            self.lay_out_(self.qweight.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.version == "int4pack" and self._kvboost_hf_saves_converted:
            destination[f"{prefix}qweight"] = gemm_qweight(self.qweight, self.code_order)
            del destination[f"{prefix}scales_and_zeros"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.version == "int4pack":
            given = {name: state_dict[prefix + name] for name in WEIGHT[:3] if prefix + name in state_dict}
            if given:
                if "qweight" not in given:
                    given["qweight"] = gemm_qweight(self.qweight, self.code_order)
                packed = int4pack_from_gemm(
                    Packed(**{"qzeros": self.qzeros, "scales": self.scales, **given})
                )._asdict()
                state_dict = {**state_dict, **{prefix + name: tensor for name, tensor in packed.items()}}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.version == "int4pack":
            load_operator()
        if self.version == "int4pack" and self.code_order != order_name():  # pickled on another kind of processor
            self.to_gemm_()
            self.lay_out_(self.qweight.device)


def keeping_dtypes(
    fn: Callable[[torch.Tensor], torch.Tensor], kept: Sequence[torch.Tensor | None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function for `Module._apply` that moves these tensors as `fn` does, and leaves their dtypes as they are."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        found = fn(tensor)
        if found.dtype == tensor.dtype or all(tensor is not other for other in kept):
            return found
        return tensor.to(found.device)

    return moved


def _on_meta(buffers: Buffers) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype, device="meta") for name, (shape, dtype) in buffers.items()}


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
        scales_and_zeros: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(qweight, qzeros, scales)
        ctx.is_int4pack = scales_and_zeros is not None
        return awq_matmul(x, qweight, qzeros, scales, kernel, scales_and_zeros)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qweight, qzeros, scales = ctx.saved_tensors
        if ctx.is_int4pack:
            qweight = gemm_qweight(qweight)
        return awq_matmul_transposed_torch(grad, qweight, qzeros, scales), None, None, None, None, None
