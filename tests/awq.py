"""Weights of four bits, and the layouts of AWQ checkpoints spelled out nibble by nibble."""

from typing import NamedTuple

import torch

from kvboost_hf.offload.awq.layout import Packed
from kvboost_hf.offload.awq.linear import AwqLinear

SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of the columns of a word of gemm


class Weight(NamedTuple):
    """`(levels - zeros) * scales`, not packed."""

    levels: torch.Tensor  # uint8 [in_features, out_features]
    zeros: torch.Tensor  # uint8 [groups, out_features]
    scales: torch.Tensor  # float16 [groups, out_features]

    @property
    def dense(self) -> torch.Tensor:
        """float64 [in_features, out_features]."""
        levels, zeros, scales = (tensor.double() for tensor in self)
        return (levels - zeros.repeat_interleave(self.group_size, 0)) * scales.repeat_interleave(self.group_size, 0)

    @property
    def group_size(self) -> int:
        return len(self.levels) // len(self.scales)


def random_weight(in_features: int, out_features: int, group_size: int, seed: int = 0) -> Weight:
    """All levels and all zeros are as likely."""
    draw = torch.Generator().manual_seed(seed)
    groups = in_features // group_size
    return Weight(
        torch.randint(0, 16, (in_features, out_features), dtype=torch.uint8, generator=draw),
        torch.randint(0, 16, (groups, out_features), dtype=torch.uint8, generator=draw),
        (torch.rand(groups, out_features, generator=draw) * 0.02 + 0.001).half(),
    )


def in_gemm(weight: Weight, shifts: tuple[int, ...] = SHIFTS) -> Packed:
    return Packed(_words(weight.levels, shifts), _words(weight.zeros, shifts), weight.scales)


def in_gemv(weight: Weight) -> dict[str, torch.Tensor]:
    in_order = tuple(range(0, 32, 4))
    zeros, scales = padded(weight.zeros, weight.group_size), padded(weight.scales, weight.group_size)
    return {
        "qweight": _words(weight.levels.T, in_order),
        "qzeros": _words(zeros.T, in_order),
        "scales": scales.T.contiguous(),
    }


def in_llm_awq(weight: Weight) -> dict[str, torch.Tensor]:
    in_features, out_features = weight.levels.shape
    levels = weight.levels.tolist()
    words = [[0] * in_features for _ in range(out_features // 4)]
    for row in range(out_features):
        for block in range(in_features // 32):
            for place in range(32):
                held = 32 * block + 8 * (place % 4) + 2 * (place // 8) + place // 4 % 2
                nibble = 64 * (block // 2) * 4 + 64 * (row % 4) + 32 * (block % 2) + place
                words[row // 4][nibble // 4] |= levels[held][row] << 4 * (nibble % 4)
    zeros = -(weight.scales * weight.zeros.float()).half()
    return {
        "qweight": torch.tensor(words).to(torch.int16),
        "scales": padded(weight.scales, weight.group_size),
        "scaled_zeros": padded(zeros, weight.group_size),
    }


def padded(rows: torch.Tensor, group_size: int) -> torch.Tensor:
    """Groups up to a multiple of 8, 16 or 32, at a group size of 128, 64 or 32."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % (1024 // group_size)))


def make_linear(weight: Weight, bias: torch.Tensor | None = None) -> AwqLinear:
    in_features, out_features = weight.levels.shape
    linear = AwqLinear(in_features, out_features, bias=bias is not None, group_size=weight.group_size)
    state = in_gemm(weight)._asdict()
    linear.load_state_dict(state if bias is None else {**state, "bias": bias})
    return linear


def _words(values: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    words = values.new_zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for column, shift in enumerate(shifts):
        words |= values[:, column::8].long() << shift
    return words.to(torch.int32)
