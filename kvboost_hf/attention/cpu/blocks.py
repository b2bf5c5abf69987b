"""Computes attention a few columns at a time, and merges each part into the result as it comes."""

from collections.abc import Callable

import torch

from kvboost_hf.attention.call import Part

NUMBERS = 1 << 19  # handled at once, so that intermediate results stay in the cache of a processor


def join(out: torch.Tensor, lse: torch.Tensor, part: Part) -> None:
    """Merge a part into the results [..., queries, value_dim] and [..., queries], which begin as zeros and -inf."""
    total = torch.logaddexp(lse, part[1])
    weight = torch.exp(part[1] - total).nan_to_num_(0.0)  # no number where nothing is seen at all
    out.lerp_(part[0].to(out.dtype), weight[..., None])
    lse.copy_(total)


def weighted(logits: torch.Tensor, weigh: Callable[[torch.Tensor], torch.Tensor]) -> Part:
    """Compute the part of some columns.

    Args:
        logits: [..., queries, columns], float32; overwritten.
        weigh: Multiplies weights of that shape by the values of the columns.
    """
    largest = logits.amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = weigh(weights).div_(total.clamp_min(torch.finfo(total.dtype).tiny))
    return out, total.log_().add_(largest).squeeze(-1)


def attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> Part:
    """Compute attention with a softcap, which no flash attention on a CPU has.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, num_kv_heads, columns, head_dim].
        value: [batch, num_kv_heads, columns, value_dim].
        mask: [batch or 1, heads or 1, queries, columns], bool, or None where all is seen.
        scale: Factor of the logits.
        softcap: Bound of the logits.

    Returns:
        [batch, heads, queries, value_dim], float32, and the log-sum-exp.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, total = key.shape[1:3]
    shape = (batch, kv_heads, heads // kv_heads, queries, -1)
    rows = query.float().mul(scale / softcap).reshape(batch, kv_heads, -1, dim)
    out = rows.new_zeros(*rows.shape[:3], value.shape[3])
    lse = rows.new_full(rows.shape[:3], float("-inf"))
    step = max(16, NUMBERS // (batch * max(heads * queries, kv_heads * dim)))
    for start in range(0, total, step):
        columns = slice(start, start + step)
        keys, values = (each[:, :, columns].float() for each in (key, value))
        logits = (rows @ keys.mT).tanh_().mul_(softcap)
        if mask is not None:
            part = mask[..., columns]
            part = part.reshape(len(part), kv_heads, -1, *part.shape[2:]) if part.shape[1] > 1 else part[:, None]
            logits.view(shape).masked_fill_(~part, float("-inf"))
        join(out, lse, weighted(logits, values.__rmatmul__))
    return out.view(shape).flatten(1, 2), lse.view(batch, heads, queries)
