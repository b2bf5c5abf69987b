"""KIVI: rounding to even steps between the least and the largest of a group.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024,
https://arxiv.org/abs/2402.02750. Some channels of keys are large in all tokens, so that a group of keys is of one
channel; a group of values is of one token.

The least and the step have the dtype of what is encoded. So the least is exact, however far from 0 a group lies, and
no range is too wide to be kept. The step is rounded up: what comes back is off by half a step at most, and by its
rounding to the dtype.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from kvboost_hf.cache.codecs.base import (
    Planes,
    Role,
    in_blocks,
    narrowed,
    pack,
    packed_width,
    sinks_mark,
    to_codes,
    unpack,
)
from kvboost_hf.compat import LayerRotation
from kvboost_hf.handles import CodePlanes


class Kivi:
    """Asymmetric rounding: keys per channel in groups of tokens, values per token in groups of channels.

    Args:
        key_bits: 2, 4 or 8.
        value_bits: The same for values.
        group_size: Tokens, or channels, of a group; the last one has what is left.
        sink_tokens: First tokens of a text that stay exact.
    """

    lossless = False

    def __init__(self, key_bits: int, value_bits: int, group_size: int, sink_tokens: int = 0) -> None:
        self.name = f"kivi:{key_bits}:{value_bits}:g{group_size}{sinks_mark(sink_tokens)}"
        self.sink_tokens = sink_tokens
        self._bits: dict[Role, int] = {"keys": key_bits, "values": value_bits}
        self._group_size = group_size

    @torch.no_grad()
    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        """Numbers beyond 1e38 may come back as infinity."""
        return in_blocks(lambda part, _: self._encode(part, role), x, rotations)

    def _encode(self, x: torch.Tensor, role: Role) -> Planes:
        bits, dim = self._bits[role], _dim(role)
        codes = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        least = torch.empty(self._scales_shape(x.shape, role), dtype=x.dtype, device=x.device)
        step = torch.empty_like(least)
        info = torch.finfo(x.dtype)
        least_step = max(info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal)
        for group, least_out, step_out in self._groups(codes, least, step, dim):
            low, high = group.amin(dim, keepdim=True), group.amax(dim, keepdim=True)
            least_out.copy_(low)
            step_out.copy_((high - low).div_(2**bits - 1).mul_(1 + info.eps / 2).add_(least_step))
            group.sub_(low).div_(step_out).add_(0.5)
        return {"codes": pack(to_codes(codes), bits), "least": least, "step": step}

    @torch.no_grad()
    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        x = unpack(planes["codes"], self._bits[role], shape[-1], torch.float32)
        for group, least, step in self._groups(x, planes["least"], planes["step"], _dim(role)):
            group.mul_(step).add_(least)
        return narrowed(x, dtype)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        layers, heads, tokens, head_dim = shape
        codes = layers * heads * tokens * packed_width(head_dim, self._bits[role])
        return codes + 2 * dtype.itemsize * self._scales_shape(torch.Size(shape), role).numel()

    def code_planes(
        self,
        planes: Mapping[str, torch.Tensor],
        role: Role,
        rotation: LayerRotation | None,
        tokens: int,
        head_dim: int,
    ) -> CodePlanes | None:
        """None where the last bits of bytes are no codes."""
        bits = self._bits[role]
        if head_dim * bits % 8:
            return None
        return CodePlanes(bits, planes["codes"], planes["least"], planes["step"], self._group_size)

    def _scales_shape(self, shape: torch.Size, role: Role) -> torch.Size:
        groups = list(shape)
        groups[_dim(role)] = -(-shape[_dim(role)] // self._group_size)
        return torch.Size(groups)

    def _groups(
        self, x: torch.Tensor, least: torch.Tensor, step: torch.Tensor, dim: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Views of all whole groups, and of the shorter last one, with size 1 in `dim` of their `least` and `step`."""
        length = x.shape[dim]
        whole, rest = divmod(length, self._group_size)
        for start, groups, size in ((0, whole, self._group_size), (whole, int(rest > 0), rest)):
            if groups:
                part = torch.unflatten(x.narrow(dim, start * self._group_size, groups * size), dim, (groups, size))
                least_part, step_part = (p.narrow(dim, start, groups).unsqueeze(dim) for p in (least, step))
                yield part, least_part, step_part


def _dim(role: Role) -> int:
    return -2 if role == "keys" else -1
