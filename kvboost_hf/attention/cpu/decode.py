"""Decodes one token of each row over K/V in pieces: each piece is read once for all rows that have it."""

import torch

from kvboost_hf.attention.call import AttentionCall
from kvboost_hf.attention.cpu.pieces import can_attend_pieces, holders
from kvboost_hf.handles import PiecedKV


def can_decode(call: AttentionCall, kv: PiecedKV) -> bool:
    """Whether each row has one query, behind all columns, in numbers that can be added up as they are."""
    plain = can_attend_pieces(kv.table, call.visibility) and call.query.shape[2] == 1
    return plain and call.query.dtype == kv.table.keys[0].dtype == torch.float32


def decode(call: AttentionCall, kv: PiecedKV) -> torch.Tensor:
    """Compute attention of one query for each row over all columns of K/V; returns [batch, 1, heads, value_dim]."""
    query, softcap, sinks = call.query, call.softcap, call.sinks
    batch, heads, _, dim = query.shape
    kv_heads, before, behind = kv.keys.shape[1], kv.table.columns, kv.keys.shape[2]
    groups = heads // kv_heads
    rows = query.reshape(batch, kv_heads, groups, dim).mul(call.scale)
    by_head = rows.transpose(0, 1)  # [kv_heads, batch, groups, dim]
    logits = rows.new_full((batch, kv_heads, groups, before + behind), float("-inf"))
    torch.matmul(rows, kv.keys.mT, out=logits[..., before:])
    for piece, column, place, count in holders(kv.table.rows):
        key = kv.table.keys[piece]
        asked = by_head[:, place].reshape(kv_heads, count * groups, dim)
        found = torch.bmm(asked, key.mT).view(kv_heads, count, groups, -1)
        logits[place, ..., column : column + key.shape[1]] = found.transpose(0, 1)
    if softcap:
        logits = torch.where(logits.isinf(), logits, (logits / softcap).tanh() * softcap)
    if kv.keep is not None:
        logits[..., before:].masked_fill_(~kv.keep[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.view(1, kv_heads, groups, 1).expand(batch, -1, -1, -1)
        logits = torch.cat([logits, sink.to(logits.dtype)], dim=3)
    weights = logits.softmax(dim=3)[..., : before + behind]
    out = weights[..., before:] @ kv.values
    by_head = weights.transpose(0, 1)
    for piece, column, place, count in holders(kv.table.rows):
        value = kv.table.values[piece]
        weighed = by_head[:, place, :, column : column + value.shape[1]].reshape(kv_heads, count * groups, -1)
        out[place] += torch.bmm(weighed, value).view(kv_heads, count, groups, -1).transpose(0, 1)
    return out.view(batch, 1, heads, -1)
