"""Attention over pieces, of which each is read once for all rows that have it."""

from collections import defaultdict
from functools import lru_cache

import torch

from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.attention.cpu.dense import attend_all, attend_capped, join
from kvboost_hf.handles import PiecedKV, PieceTable
from kvboost_hf.visibility import Visibility


def can_attend_pieces(table: PieceTable, visibility: Visibility) -> bool:
    """Whether each row sees all of its pieces, and these are where their keys were computed."""
    hides = visibility.window or any(each is not None for each in (visibility.keep, visibility.columns))
    return not hides and table.cos is None


def attend_pieces(call: AttentionCall, table: PieceTable) -> Part:
    """Compute attention over pieces, as `ops.attend_pieces` describes it; queries see all pieces of their row."""
    query, scale, softcap = call.query, call.scale, call.softcap
    batch, heads, queries, _ = query.shape
    out = query.new_zeros(batch, heads, queries, table.values[0].shape[2], dtype=torch.float32)
    lse = out.new_full(out.shape[:3], float("-inf"))
    for piece, _, place, count in holders(table.rows):
        key, value = table.keys[piece][None], table.values[piece][None]
        asked = query[place].transpose(0, 1).reshape(1, heads, count * queries, -1)
        part = (
            attend_capped(asked, key, value, None, scale, softcap) if softcap else attend_all(asked, key, value, scale)
        )
        found, log = (torch.unflatten(each[0], 1, (count, queries)).transpose(0, 1) for each in part)
        so_far, log_so_far = out[place], lse[place]
        join(so_far, log_so_far, (found, log))
        out[place], lse[place] = so_far, log_so_far  # which they are, where they are views
    return out.transpose(1, 2).contiguous(), lse


@lru_cache(maxsize=8)  # all layers, and all steps between two changes, have the same tensor
def holders(rows: torch.Tensor) -> list[tuple[int, int, slice | list[int], int]]:
    """Return each piece of `PieceTable.rows`, its column, the rows that have it there, and how many these are.

    Tensors are told apart by what they are, not by what they hold: they must not be written to.
    """
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for row, pieces in enumerate(rows.tolist()):
        for piece, column, _ in pieces:
            if piece >= 0:
                found[piece, column].append(row)
    return [
        (piece, column, slice(those[0], those[-1] + 1) if those[-1] - those[0] < len(those) else those, len(those))
        for (piece, column), those in found.items()
    ]


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
