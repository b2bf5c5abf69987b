"""Attention in plain PyTorch operations: tests compare every kernel with it, and it runs where no kernel can."""

import torch

from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.handles import CodePlanes, PieceTable
from kvboost_hf.visibility import Visibility


def attend(
    call: AttentionCall,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> Part:
    """Compute softmax(query · key · scale) · value, for each head. Differentiable.

    Args:
        call: Queries, and how their logits are made.
        key: [batch, num_kv_heads, columns, head_dim].
        value: [batch, num_kv_heads, columns, value_dim].
        bias: Added to the logits, [batch or 1, heads or 1, queries, columns].
        compute: The dtype to compute in; float64 for the truth.

    Returns:
        [batch, queries, heads, value_dim] in the dtype of the query, float32 if `call.partial` (float64 if `compute`
        is), zeros for queries that see nothing; and the log of the sum of the exponentiated logits,
        [batch, heads, queries], -inf for queries that see nothing.
    """
    query, sinks = call.query, call.sinks
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.to(compute).repeat_interleave(groups, dim=1) for each in (key, value))
    logits = query.to(compute) @ keys.mT * call.scale
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if bias is not None:
        logits = logits + bias.to(compute)
    seen = call.visibility.dense(query.shape[2], key.shape[2], query.device)
    logits = logits.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(compute)[:, None])
    finite = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    out = (torch.exp(logits - finite[..., None]) @ values).transpose(1, 2).contiguous()
    wide = torch.float64 if compute == torch.float64 else torch.float32
    return out.to(wide if call.partial or compute == torch.float64 else query.dtype), lse.to(wide)


def attend_pieces(call: AttentionCall, table: PieceTable, total: int, *, compute: torch.dtype = torch.float32) -> Part:
    """Compute attention over pieces, as `ops.attend_pieces` describes it."""
    return attend(*over_pieces(call, table, total, compute), compute=compute)


def over_pieces(
    call: AttentionCall, table: PieceTable, total: int, dtype: torch.dtype
) -> tuple[AttentionCall, torch.Tensor, torch.Tensor]:
    """Make a call over pieces one of `attend`: with its keys and values."""
    query, visibility = call.query, call.visibility
    own = visibility.columns_of(query.shape[2], total, query.device).expand(len(query), -1)
    there = torch.zeros(len(query), table.columns, dtype=torch.bool, device=query.device)
    for row, pieces in enumerate(table.rows.tolist()):
        for piece, column, _ in pieces:
            if piece >= 0:
                there[row, column : column + table.keys[piece].shape[1]] = True
    if visibility.keep is not None:
        there &= visibility.keep[:, : table.columns]
    seen = Visibility(visibility.causal, visibility.window, there, own)
    return call._replace(visibility=seen, sinks=None, partial=True), *dense_pieces(table, dtype)


def dense_pieces(table: PieceTable, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy pieces into tensors [batch, num_kv_heads, columns, head_dim], keys moved; zeros between pieces."""
    heads, _, head_dim = table.keys[0].shape
    shape = (len(table.rows), heads, table.columns, head_dim)
    keys, values = (table.keys[0].new_zeros(shape, dtype=dtype) for _ in range(2))
    for row, pieces in enumerate(table.rows.tolist()):
        for piece, column, shift in pieces:
            if piece < 0:
                break
            key, value = table.keys[piece].to(dtype), table.values[piece].to(dtype)
            if shift >= 0:
                assert table.cos is not None
                assert table.sin is not None
                assert table.partner is not None
                # A query is turned back by `q * cos + q[partner] * sin`; its transpose turns the key forth.
                key = key * table.cos[shift].to(dtype) + (key * table.sin[shift].to(dtype))[..., table.partner]
            keys[row, :, column : column + key.shape[1]] = key
            values[row, :, column : column + key.shape[1]] = value
    return keys, values


def attend_codes(
    call: AttentionCall,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> Part:
    """Compute attention over codes, as `ops.attend_codes` describes it."""
    return attend(*over_codes(call, keys, values, lengths, compute), compute=compute)


def over_codes(
    call: AttentionCall, keys: CodePlanes, values: CodePlanes, lengths: torch.Tensor, dtype: torch.dtype
) -> tuple[AttentionCall, torch.Tensor, torch.Tensor]:
    """Make a call over codes one of `attend`: with its keys and values."""
    query = call.query
    key, value = (decode(each, query.shape[3], dtype).transpose(1, 2).flatten(2, 3) for each in (keys, values))
    tokens = keys.codes.shape[3]
    keep = (torch.arange(tokens, device=query.device) < lengths[:, None]).flatten()[None].expand(len(query), -1)
    seen = Visibility(causal=False, keep=keep)
    return call._replace(visibility=seen, sinks=None, partial=True), key, value


def decode(codes: CodePlanes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode codes into numbers [batch, blocks, heads, tokens, head_dim]."""
    numbers = unpack(codes.codes, codes.bits, head_dim)
    if codes.least is not None:
        assert codes.step is not None
        dim = -1 if codes.least.shape[-2] == numbers.shape[-2] else -2
        least, step = (
            each.to(dtype).repeat_interleave(codes.group_size, dim=dim).narrow(dim, 0, numbers.shape[dim])
            for each in (codes.least, codes.step)
        )
        return least + step * numbers.to(dtype)
    assert codes.scale is not None
    assert codes.codebook is not None
    x = codes.codebook.to(dtype)[numbers.long()] * codes.scale.to(dtype)[..., None]
    if codes.rotation is not None:
        x = x @ codes.rotation.to(dtype)
    if codes.mean is not None:
        mean = codes.mean.to(dtype)[..., None, :]
        if codes.cos is not None:
            assert codes.sin is not None
            assert codes.partner is not None
            mean = mean * codes.cos.to(dtype) + mean[..., codes.partner] * codes.sin.to(dtype)
        x = x + mean
    return x


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpack bytes into codes [..., dim], uint8; `CodePlanes` describes how they are packed."""
    if bits == 3:
        lower, upper = torch.split(packed, [-(-dim // 4), -(-dim // 8)], dim=-1)
        return unpack(lower, 2, dim) + 4 * unpack(upper, 1, dim)
    parts = [packed >> (bits * place) & ((1 << bits) - 1) for place in range(8 // bits)]
    return torch.cat(parts, dim=-1)[..., :dim]
