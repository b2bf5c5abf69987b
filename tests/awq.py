"""Weights of four bits, and the layouts of checkpoints spelled out nibble by nibble."""

from typing import NamedTuple

import torch

from tests.attention import SIGMAS, sum_error
from tests.internals.offload import AwqLinear, Packed

SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # of the columns of a word of gemm
IN_ORDER = tuple(range(0, 32, 4))


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
    def sizes(self) -> torch.Tensor:
        """float64 [in_features, out_features]: levels and zeros, which may be multiplied apart."""
        levels, zeros, scales = (tensor.double().abs() for tensor in self)
        return (levels + zeros.repeat_interleave(self.group_size, 0)) * scales.repeat_interleave(self.group_size, 0)

    @property
    def group_size(self) -> int:
        return len(self.levels) // len(self.scales)


def share_of_budget(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: Weight,
    *,
    transposed: bool = False,
    roundings: int = 1,
    truncates: bool = False,
) -> float:
    """Divide what products are off by what their arithmetic explains; the largest share, up to 1, is rounding.

    Args:
        found: [tokens, features], in the dtype of `x`; the sums before were in float32.
        x: [tokens, features].
        weight: What it is multiplied by.
        transposed: Whether by its transpose.
        roundings: How often weights or products are rounded to that dtype before they are added up.
        truncates: Whether what does not fit is cut off, which errs by twice as much, and always towards 0.
    """
    dense, sizes = (each.T if transposed else each for each in (weight.dense, weight.sizes))
    dense, sizes, given = (each.to(found.device) for each in (dense, sizes, x.double()))
    truth = given @ dense
    assert (found.shape, found.dtype) == (truth.shape, x.dtype)
    unit = torch.finfo(x.dtype).eps / (1 if truncates else 2)
    # Each rounding is off by `unit` at most, and by the square of it over 3 on average, independently of the others.
    budget = SIGMAS * (roundings / 3) ** 0.5 * unit * (given.square() @ dense.square()).sqrt()
    budget += (1 + roundings * truncates) * unit * truth.abs()
    budget += sum_error(len(dense) + 8) * (given.abs() @ sizes) + torch.finfo(x.dtype).smallest_normal * unit
    largest = torch.finfo(x.dtype).max  # what is larger becomes infinite, as it does in PyTorch
    off = (found.double().clamp(-largest, largest) - truth.clamp(-largest, largest)).abs()
    return (off / budget).max().item() if found.numel() else 0.0


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
    zeros, scales = padded(weight.zeros, weight.group_size), padded(weight.scales, weight.group_size)
    return {
        "qweight": _words(weight.levels.T, IN_ORDER),
        "qzeros": _words(zeros.T, IN_ORDER),
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


def in_pack_quantized(weight: Weight, order: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Of compressed-tensors; `order` is that of the rows."""
    found = {
        "weight_packed": _words(weight.levels.T if order is None else weight.levels[order].T, IN_ORDER),
        "weight_scale": weight.scales.T.bfloat16().float(),
        "weight_zero_point": _words(weight.zeros, IN_ORDER).T.contiguous(),
    }
    return found if order is None else {**found, "weight_g_idx": (order // weight.group_size).int()}


def in_gptq(weight: Weight, order: torch.Tensor | None = None, *, v2: bool = False) -> dict[str, torch.Tensor]:
    """Of GPTQModel and AutoGPTQ; the first version stores zeros less one, with a borrow from the next nibble."""
    rows = len(weight.levels)
    index = torch.arange(rows) if order is None else order
    zeros = _words(weight.zeros, IN_ORDER)
    return {
        "qweight": _words(weight.levels[index].T, IN_ORDER).T.contiguous(),
        "qzeros": zeros if v2 else (zeros.long() - 0x11111111).to(torch.int32),
        "scales": weight.scales.float(),
        "g_idx": (index // weight.group_size).int(),
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
