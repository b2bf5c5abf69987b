"""A softmax that is told its logits a few columns at a time, by plain PyTorch operations in float32."""

import torch

from kvboost_hf.attention.merge import Part

NUMBERS = 1 << 19  # handled at once: what is in between stays in the cache of a processor


class RunningSoftmax:
    """What `add` was given so far, weighted."""

    def __init__(self) -> None:
        self._out: torch.Tensor | None = None

    def add(self, logits: torch.Tensor, values: torch.Tensor) -> None:
        """Add columns: logits [..., rows, columns], which are written to, and values [..., columns, value_dim]."""
        largest = logits.amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
        if self._out is not None:
            largest = torch.maximum(largest, self._largest)
        weights = logits.sub_(largest).exp_()
        total, out = weights.sum(dim=-1, keepdim=True), weights @ values
        if self._out is not None:
            fade = torch.exp(self._largest - largest)
            total, out = total.addcmul_(self._total, fade), out.addcmul_(self._out, fade)
        self._largest, self._total, self._out = largest, total, out

    def result(self) -> Part:
        """[..., rows, value_dim], zeros where all logits were -inf, and the log-sum-exp [..., rows]."""
        assert self._out is not None
        out = self._out / self._total.clamp_min(torch.finfo(torch.float32).tiny)
        return out, (self._largest + self._total.log()).squeeze(-1)


def attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> Part:
    """Attention with a softcap: [batch, heads, queries, value_dim], float32, and the log-sum-exp.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, num_kv_heads, columns, head_dim].
        value: [batch, num_kv_heads, columns, value_dim].
        mask: [batch or 1, heads or 1, queries, columns], bool, or None.
        scale: Factor of the logits.
        softcap: Logits are at most this far from 0.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, total = key.shape[1:3]
    groups = heads // kv_heads
    rows = query.float().mul(scale / softcap).reshape(batch, kv_heads, groups, queries, dim)
    running = RunningSoftmax()
    step = max(16, NUMBERS // (batch * heads * max(queries, dim)))
    for start in range(0, total, step):
        columns = slice(start, start + step)
        keys, values = (each[:, :, columns].float() for each in (key, value))
        logits = (rows.flatten(2, 3) @ keys.mT).tanh_().mul_(softcap).unflatten(2, (groups, queries))
        if mask is not None:
            part = mask[..., columns]
            part = part.unflatten(1, (kv_heads, groups)) if part.shape[1] > 1 else part[:, None]
            logits.masked_fill_(~part, float("-inf"))
        running.add(logits.flatten(2, 3), values)
    out, lse = running.result()
    return out.view(batch, heads, queries, -1), lse.view(batch, heads, queries)
