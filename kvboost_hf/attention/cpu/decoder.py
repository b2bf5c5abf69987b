"""Decodes codes as far as attention needs it: before their rotation, and with the dimensions in an order of its own."""

import torch

from kvboost_hf.attention import reference
from kvboost_hf.handles import CodePlanes

_PLACES = {2: 4, 3: 4, 4: 2}  # bits of codes of which a byte is looked up at once: how many codes it has


class Decoder:
    """Keys or values of a layer.

    Args:
        codes: Their codes.
        dim: Their head_dim.
    """

    def __init__(self, codes: CodePlanes, dim: int) -> None:
        self._codes, self._dim, self._table = codes, dim, None
        self._turn = codes.rotation.mT if codes.rotation is not None else None
        places = _PLACES.get(codes.bits)
        if codes.codebook is not None and places and dim % 8 == 0:
            self._table = _table(codes.codebook, codes.bits)
            order = torch.arange(dim).view(places, -1).T.flatten()
            self._turn = (self._turn if self._turn is not None else torch.eye(dim))[:, order]

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors [..., dim] as `read` has them."""
        return x @ self._turn if self._turn is not None else x

    def turn_back(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `turn`."""
        return x @ self._turn.mT if self._turn is not None else x

    def read(self, some: slice) -> torch.Tensor:
        """What some blocks hold but for the means, float32, [batch, heads, blocks, tokens, dim]."""
        codes = self._codes
        packed = codes.codes[:, some].transpose(1, 2).contiguous()
        if codes.codebook is None:
            numbers = reference.unpack(packed, codes.bits, self._dim).float()
            return self._scaled(numbers, some)
        assert codes.scale is not None
        if self._table is None:
            index = reference.unpack(packed, codes.bits, self._dim).int()
            numbers = codes.codebook.index_select(0, index.flatten())
        else:
            index = packed.int() if codes.bits != 3 else _joined(packed, self._dim)
            numbers = self._table.index_select(0, index.flatten()).view(torch.float32)
        scale = codes.scale[:, some].transpose(1, 2).float()
        return numbers.view(*packed.shape[:4], self._dim).mul_(scale[..., None])

    def _scaled(self, numbers: torch.Tensor, some: slice) -> torch.Tensor:
        """Codes as least + step * code, in place."""
        codes = self._codes
        assert codes.least is not None
        assert codes.step is not None
        least, step = (each[:, some].transpose(1, 2).float() for each in (codes.least, codes.step))
        along = (
            4 if least.shape[3] == numbers.shape[3] else 3
        )  # of values, in groups of dimensions; of keys, of tokens
        size, length = codes.group_size, numbers.shape[along]
        if length % size:
            least, step = (each.repeat_interleave(size, dim=along).narrow(along, 0, length) for each in (least, step))
            return numbers.mul_(step).add_(least)
        grouped = numbers.unflatten(along, (-1, size))
        torch.addcmul(least.unsqueeze(along + 1), grouped, step.unsqueeze(along + 1), out=grouped)
        return numbers

    def add_means(self, numbers: torch.Tensor, some: slice) -> None:
        """Add the means of keys to what `read` gave."""
        codes = self._codes
        assert codes.mean is not None
        mean = codes.mean[:, some].transpose(1, 2).float()[..., None, :]
        if codes.cos is not None:
            mean = mean * codes.cos + mean[..., codes.partner] * codes.sin
        numbers.add_(self.turn(mean))

    def mean_logits(self, query: torch.Tensor, some: slice) -> torch.Tensor:
        """What the means add to the products of queries [batch, heads, rows, dim] and keys: [..., rows, columns]."""
        codes = self._codes
        assert codes.mean is not None
        mean = codes.mean[:, some].transpose(1, 2).float()[:, :, None]
        query = query[:, :, :, None]  # [batch, heads, rows, blocks, dim]
        if codes.cos is None:
            return (query * mean).sum(-1).repeat_interleave(codes.codes.shape[3], dim=-1)
        at = torch.cat([query * mean, query * mean[..., codes.partner]], dim=-1)
        return (at @ torch.cat([codes.cos, codes.sin], dim=-1).mT).flatten(3)


def _table(codebook: torch.Tensor, bits: int) -> torch.Tensor:
    """[256], or [4096] for 3 bits: for each byte, or byte and 4 third bits, its numbers, as one wide element."""
    if bits == 3:
        index = torch.arange(4096)
        codes = [(index >> 2 * place & 3) + 4 * (index >> 8 + place & 1) for place in range(4)]
    else:
        index = torch.arange(256)
        codes = [index >> bits * place & (1 << bits) - 1 for place in range(8 // bits)]
    table = codebook.float()[torch.stack(codes, dim=-1)]
    return table.view(torch.complex128 if len(codes) == 4 else torch.float64).view(-1)


def _joined(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The index into the table of each byte of lower bits, of which the third bits are those at every fourth."""
    lower, upper = torch.split(packed, [dim // 4, dim // 8], dim=-1)
    both = torch.cat([upper & 0x55, upper >> 1 & 0x55], dim=-1)  # of the bits of dim / 8 dimensions each, every second
    both = (both | both >> 1) & 0x33
    both = (both | both >> 2) & 0x0F
    return lower.int().add_(both.int(), alpha=256)
