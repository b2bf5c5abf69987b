"""A linear layer on weights of four bits."""

from torch import nn

from kvboost_hf.config import QuantKernel


class AwqLinear(nn.Module):
    """`y = x @ W + bias`, with `W` as AWQ checkpoints hold it, in the layout `gemm`.

    Buffers, with `g` the group size: `qweight` int32 [in_features, out_features / 8], `qzeros` int32
    [in_features / g, out_features / 8], `scales` float16 [in_features / g, out_features], `bias` [out_features] or
    None. Element (i, o) of `W` is `(q[i, o] - z[i // g, o]) * scales[i // g, o]`; column `o` of a word of 8 is at bit
    [0, 16, 4, 20, 8, 24, 12, 28][o].

    Args:
        in_features: A multiple of the group size.
        out_features: A multiple of 8.
        bias: Whether there is one.
        group_size: Rows that share a scale and a zero: 32, 64 or 128.
        quant_kernel: As `StreamingConfig` has it.
        version: Layout of the checkpoint: `"gemm"`, `"gemv"` or `"llm-awq"`. The buffers have the shapes of the
            checkpoint until `to_gemm_()` has been called.

    Raises:
        ValueError: sizes that do not fit the layout, or an unknown one.
    """

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
        raise NotImplementedError

    def to_gemm_(self) -> None:
        """Turn buffers that were filled from a checkpoint of another layout into those of `gemm`, in place."""
