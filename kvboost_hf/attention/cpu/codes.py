"""Keys and values as codes: decoded a few blocks at a time, before their rotation, which the queries are given."""

import torch

from kvboost_hf.attention.cpu.blocks import NUMBERS, attend_capped, join
from kvboost_hf.attention.cpu.decoder import Decoder
from kvboost_hf.attention.cpu.dense import flash
from kvboost_hf.attention.merge import Part
from kvboost_hf.handles import CodePlanes


def attend_codes(
    query: torch.Tensor,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> Part:
    """See `ops.attend_codes`."""
    batch, heads, queries, dim = query.shape
    blocks, kv_heads, tokens = keys.codes.shape[1:4]
    rows = query.float().reshape(batch, kv_heads, -1, dim)
    key_decoder, value_decoder = Decoder(keys, dim), Decoder(values, dim)
    turned = key_decoder.turn(rows)
    out, lse = torch.zeros_like(rows), rows.new_full(rows.shape[:3], float("-inf"))
    apart = keys.mean is not None and rows.shape[2] <= dim and not softcap  # cheaper than to turn the means
    step = max(1, NUMBERS // (batch * kv_heads * tokens * dim))
    for start in range(0, blocks, step):
        some = slice(start, start + step)
        there = (torch.arange(tokens) < lengths[some, None]).flatten()[None, None, None]
        if not there.any():
            continue
        key, value = key_decoder.read(some), value_decoder.read(some).flatten(2, 3)
        if keys.mean is not None and not apart:
            key_decoder.add_means(key, some)
        key = key.flatten(2, 3)
        if softcap:
            part = attend_capped(turned, key, value, there, scale, softcap)
        else:
            bias = key_decoder.mean_logits(rows, some).mul_(scale) if apart else None
            if not there.all():
                bias = (bias if bias is not None else torch.zeros(there.shape)).masked_fill(~there, float("-inf"))
            part = flash(turned, key, value, bias, scale=scale)
        join(out, lse, part)
    return value_decoder.turn_back(out).view(query.shape).transpose(1, 2).contiguous(), lse.view(query.shape[:3])
