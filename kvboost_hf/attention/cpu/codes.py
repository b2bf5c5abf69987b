"""Attention over codes: decodes a few blocks at a time, and rotates the queries in place of what it decodes."""

from math import prod

import torch

from kvboost_hf.attention import reference
from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.attention.cpu.dense import NUMBERS, flash, join, weighted
from kvboost_hf.handles import CodePlanes

_FEW = 16  # rows of queries for which it is cheaper to turn and scale these than what is decoded
_PLACES = {2: 4, 3: 4, 4: 2}  # codes in a byte, by their bits, where a byte is looked up at once


def attend_codes(call: AttentionCall, keys: CodePlanes, values: CodePlanes, lengths: torch.Tensor) -> Part:
    """Compute attention over codes, as `ops.attend_codes` describes it."""
    query, softcap = call.query, call.softcap
    batch, _, _, dim = query.shape
    blocks, kv_heads, tokens = keys.codes.shape[1:4]
    rows = query.float().mul(call.scale).reshape(batch, kv_heads, -1, dim)
    folded = rows.shape[2] <= _FEW or softcap > 0
    widest = max(dim, rows.shape[2]) if folded else dim
    step = min(blocks, max(1, NUMBERS // (batch * kv_heads * tokens * widest)))
    key, value = Decoder(keys, dim, step), Decoder(values, dim, step)
    turned = key.turn(rows)
    out, lse = torch.zeros_like(rows), rows.new_full(rows.shape[:3], float("-inf"))
    for start in range(0, blocks, step):
        some = slice(start, start + step)
        hidden = (torch.arange(tokens, device="cpu") >= lengths[some, None]).flatten()
        if hidden.all():
            continue
        if folded:
            logits = key.logits(rows, some)
            if softcap:
                logits.div_(softcap).tanh_().mul_(softcap)
            if hidden.any():
                logits.masked_fill_(hidden, float("-inf"))
            part = weighted(logits, lambda weights, some=some: value.weigh(weights, some))  # type: ignore[misc]
        else:
            bias = (
                torch.zeros(1, 1, 1, len(hidden), device="cpu").masked_fill_(hidden, float("-inf"))
                if hidden.any()
                else None
            )
            part = flash(turned, key.read(some), value.read(some), bias, scale=1.0)
        join(out, lse, part)
    return value.turn_back(out).view(query.shape).transpose(1, 2).contiguous(), lse.view(query.shape[:3])


class Decoder:
    """Decodes keys or values of a layer, some blocks at a time.

    Args:
        codes: The codes of the blocks.
        dim: The size of a head.
        blocks: The most blocks that are decoded at a time.
    """

    def __init__(self, codes: CodePlanes, dim: int, blocks: int) -> None:
        self._codes, self._dim, self._table = codes, dim, None
        self._turn = codes.rotation.mT if codes.rotation is not None else None
        places = _PLACES.get(codes.bits)
        if codes.codebook is not None and places and dim % 8 == 0:
            self._table = _table(codes.codebook, codes.bits)
            order = torch.arange(dim, device="cpu").view(places, -1).T.flatten()
            self._turn = (self._turn if self._turn is not None else torch.eye(dim, device="cpu"))[:, order]
        batch, _, heads, tokens, _ = codes.codes.shape
        # Written to again and again: memory that the system has just given is slow to write to.
        self._buffer = torch.empty(batch * heads * blocks * tokens * dim, device="cpu")

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate vectors [..., dim] as those that `read` returns are."""
        return x @ self._turn if self._turn is not None else x

    def turn_back(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `turn`."""
        return x @ self._turn.mT if self._turn is not None else x

    def read(self, some: slice) -> torch.Tensor:
        """Decode some blocks into [batch, heads, columns, dim], float32, which is valid until the next call."""
        codes, numbers = self._codes, self._numbers(some)
        if codes.codebook is None:
            least, step = self._affine(some)
            along = 4 if self._of_tokens(least) else 3
            size, length = codes.group_size, numbers.shape[along]
            if along == 3 and length % size == 0:
                grouped = torch.unflatten(numbers, 3, (-1, size))
                torch.addcmul(least[..., None, :], grouped, step[..., None, :], out=grouped)
            else:
                wide = (each.repeat_interleave(size, along).narrow(along, 0, length) for each in (step, least))
                numbers.mul_(next(wide)).add_(next(wide))
            return numbers.flatten(2, 3)
        numbers.mul_(self._scale(some)[..., None])
        if codes.mean is not None:
            mean = codes.mean[:, some].transpose(1, 2).float()[..., None, :]
            if codes.cos is not None and codes.sin is not None:
                mean = mean * codes.cos + mean[..., codes.partner] * codes.sin
            numbers.add_(self.turn(mean))
        return numbers.flatten(2, 3)

    def logits(self, query: torch.Tensor, some: slice) -> torch.Tensor:
        """Multiply queries [batch, heads, rows, dim], not turned, by what `read` returns: [..., rows, columns]."""
        codes = self._codes
        if codes.codebook is None:
            if codes.codes.shape[3] % codes.group_size:
                return query @ self.read(some).mT
            least, step = self._affine(some)
            numbers = self._numbers(some)
            steps = query[:, :, None, None] * step[..., None, :]  # [batch, heads, blocks, groups, rows, dim]
            products = steps @ torch.unflatten(numbers, 3, (-1, codes.group_size)).mT
            products.add_((least @ query[:, :, None].mT)[..., None])
            return products.flatten(2, 3).transpose(2, 3).flatten(3)
        logits = self.turn(query) @ self._numbers(some).flatten(2, 3).mT
        logits.mul_(self._scale(some).flatten(2)[:, :, None])
        if codes.mean is None:
            return logits
        mean = codes.mean[:, some].transpose(1, 2).float()[:, :, None]
        query = query[:, :, :, None]  # [batch, heads, rows, blocks, dim]
        if codes.cos is None or codes.sin is None:
            return logits.add_((query * mean).sum(-1).repeat_interleave(codes.codes.shape[3], dim=-1))
        at = torch.cat([query * mean, query * mean[..., codes.partner]], dim=-1)
        return logits.add_((at @ torch.cat([codes.cos, codes.sin], dim=-1).mT).flatten(3))

    def weigh(self, weights: torch.Tensor, some: slice) -> torch.Tensor:
        """Multiply weights [batch, heads, rows, columns] by what `read` returns: [..., rows, dim]."""
        codes = self._codes
        if codes.codebook is None:
            least, step = (each.flatten(2, 3).mT for each in self._affine(some))
            parts = torch.split(self._numbers(some).flatten(2, 3), codes.group_size, dim=-1)
            return torch.cat(
                [
                    (weights * step[:, :, None, i]).matmul(part).add_(weights @ least[:, :, i, :, None])
                    for i, part in enumerate(parts)
                ],
                dim=-1,
            )
        return (weights * self._scale(some).flatten(2)[:, :, None]) @ self._numbers(some).flatten(2, 3)

    def _numbers(self, some: slice) -> torch.Tensor:
        """Look codes up in the codebook, if there is one: [batch, heads, blocks, tokens, dim]."""
        codes = self._codes
        packed = codes.codes[:, some].transpose(1, 2)
        shape = (*packed.shape[:4], self._dim)
        out = self._buffer[: prod(shape)]
        if codes.codebook is None:
            return out.view(shape).copy_(
                packed if codes.bits == 8 else reference.unpack(packed, codes.bits, self._dim)
            )
        if self._table is None:
            index = reference.unpack(packed, codes.bits, self._dim).to(torch.int32)
            torch.index_select(codes.codebook, 0, index.flatten(), out=out)
        else:
            packed = packed.contiguous()
            index = (packed if codes.bits != 3 else _joined(packed, self._dim)).to(torch.int32)
            torch.index_select(self._table, 0, index.flatten(), out=out.view(self._table.dtype))
        return out.view(shape)

    def _affine(self, some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """`least` and `step`, [batch, heads, blocks, ..., ...]."""
        codes = self._codes
        assert codes.least is not None
        assert codes.step is not None
        return codes.least[:, some].transpose(1, 2).float(), codes.step[:, some].transpose(1, 2).float()

    def _scale(self, some: slice) -> torch.Tensor:
        """[batch, heads, blocks, tokens]."""
        assert self._codes.scale is not None
        return self._codes.scale[:, some].transpose(1, 2).float()

    def _of_tokens(self, least: torch.Tensor) -> bool:
        """Whether a group is of the dimensions of a token, as those of values are."""
        return least.shape[3] == self._codes.codes.shape[3]


def _table(codebook: torch.Tensor, bits: int) -> torch.Tensor:
    """[256], or [4096] for 3 bits: for each byte, or byte and 4 third bits, its numbers, as one wide element."""
    if bits == 3:
        index = torch.arange(4096, device="cpu")
        codes = [(index >> 2 * place & 3) + 4 * (index >> 8 + place & 1) for place in range(4)]
    else:
        index = torch.arange(256, device="cpu")
        codes = [index >> bits * place & (1 << bits) - 1 for place in range(8 // bits)]
    table = codebook.float()[torch.stack(codes, dim=-1)]
    return table.view(torch.complex128 if len(codes) == 4 else torch.float64).view(-1)


def _joined(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The index into the table of each byte of lower bits, of which the third bits are those at every fourth."""
    lower, upper = torch.split(packed, [dim // 4, dim // 8], dim=-1)
    both = torch.cat([upper & 0x55, upper >> 1 & 0x55], dim=-1)  # of the bits of dim / 8 dimensions each, every second
    both = (both | both >> 1) & 0x33
    both = (both | both >> 2) & 0x0F
    return lower.int().add_(both, alpha=256)
