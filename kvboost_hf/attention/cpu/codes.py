"""Attention over codes: decodes a few blocks at a time, and rotates the queries in place of what it decodes."""

import torch

from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.attention.cpu.blocks import NUMBERS, join, weighted
from kvboost_hf.attention.cpu.decoder import Decoder
from kvboost_hf.attention.cpu.dense import flash
from kvboost_hf.handles import CodePlanes

_FEW = 16  # rows of queries for which it is cheaper to turn and scale these than what is decoded


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
        hidden = (torch.arange(tokens) >= lengths[some, None]).flatten()
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
            bias = torch.zeros(1, 1, 1, len(hidden)).masked_fill_(hidden, float("-inf")) if hidden.any() else None
            part = flash(turned, key.read(some), value.read(some), bias, scale=1.0)
        join(out, lse, part)
    return value.turn_back(out).view(query.shape).transpose(1, 2).contiguous(), lse.view(query.shape[:3])
