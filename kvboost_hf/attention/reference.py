"""Attention as it is defined: the truth that every kernel is compared with, and what runs where none does."""

import torch

from kvboost_hf.attention.visibility import Visibility
from kvboost_hf.handles import CodePlanes, PieceTable


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    visibility: Visibility,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    partial: bool = False,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(query · key · scale) · value, for each head. Differentiable.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, num_kv_heads, columns, head_dim]; the heads are a multiple of these.
        value: [batch, num_kv_heads, columns, value_dim].
        scale: Factor of the logits.
        visibility: Who sees what.
        softcap: Logits are at most this far from 0, by `softcap * tanh(logits / softcap)`; 0 for no cap.
        sinks: [heads]: logits of a column that everybody sees, and that has no value.
        bias: Added to the logits, [batch or 1, heads or 1, queries, columns].
        partial: What is computed is a part of the columns: keep float32, for `merge`.
        compute: The dtype to compute in; float64 for the truth.

    Returns:
        [batch, queries, heads, value_dim] in the dtype of the query, float32 if `partial` (float64 if `compute` is),
        zeros for queries that see nothing; and the log of the sum of the exponentiated logits,
        [batch, heads, queries], -inf for queries that see nothing.
    """
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.to(compute).repeat_interleave(groups, dim=1) for each in (key, value))
    logits = query.to(compute) @ keys.mT * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(compute)
    seen = visibility.dense(query.shape[2], key.shape[2], query.device)
    logits = logits.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(compute)[:, None])
    finite = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    out = (torch.exp(logits - finite[..., None]) @ values).transpose(1, 2).contiguous()
    wide = torch.float64 if compute == torch.float64 else torch.float32
    return out.to(wide if partial or compute == torch.float64 else query.dtype), lse.to(wide)


def attend_pieces(
    query: torch.Tensor,
    table: PieceTable,
    *,
    scale: float,
    total: int,
    visibility: Visibility,
    softcap: float = 0.0,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.attend_pieces`."""
    keys, values = dense_pieces(table, compute)
    own = visibility.columns_of(query.shape[2], total, query.device).expand(len(query), -1)
    there = torch.zeros(len(query), table.columns, dtype=torch.bool, device=query.device)
    for row, pieces in enumerate(table.rows.tolist()):
        for piece, column, _ in pieces:
            if piece >= 0:
                there[row, column : column + table.keys[piece].shape[1]] = True
    if visibility.keep is not None:
        there &= visibility.keep[:, : table.columns]
    seen = Visibility(visibility.causal, visibility.window, there, own)
    return attend(query, keys, values, scale=scale, visibility=seen, softcap=softcap, partial=True, compute=compute)


def dense_pieces(table: PieceTable, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, moved to where they are, and values: [batch, num_kv_heads, columns, head_dim]. Zeros between pieces."""
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
    query: torch.Tensor,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.attend_codes`."""
    head_dim = query.shape[3]
    key, value = (decode(each, head_dim, compute).transpose(1, 2).flatten(2, 3) for each in (keys, values))
    tokens = keys.codes.shape[3]
    keep = (torch.arange(tokens, device=query.device) < lengths[:, None]).flatten()[None].expand(len(query), -1)
    seen = Visibility(causal=False, keep=keep)
    return attend(query, key, value, scale=scale, visibility=seen, softcap=softcap, partial=True, compute=compute)


def decode(codes: CodePlanes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers, [batch, blocks, heads, tokens, head_dim]."""
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
    """The codes [..., dim], uint8, as `CodePlanes` says they are packed."""
    if bits == 3:
        lower, upper = torch.split(packed, [-(-dim // 4), -(-dim // 8)], dim=-1)
        return unpack(lower, 2, dim) + 4 * unpack(upper, 1, dim)
    parts = [packed >> (bits * place) & ((1 << bits) - 1) for place in range(8 // bits)]
    return torch.cat(parts, dim=-1)[..., :dim]
