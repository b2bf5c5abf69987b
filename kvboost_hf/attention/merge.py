"""Attention over parts of the columns, made one."""

from collections.abc import Sequence
from functools import cache

import torch

Part = tuple[torch.Tensor, torch.Tensor]  # [batch, queries, heads, value_dim], float32; [batch, heads, queries]


@cache
def no_log(device: torch.device) -> torch.Tensor:
    """A log-sum-exp that nobody has asked for: no numbers."""
    with torch.inference_mode(False):
        return torch.empty(0, device=device)


def merge(parts: Sequence[Part], sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What attention over all columns would have been.

    Args:
        parts: As `attend(…, partial=True)` returns them: over columns of which each is in one part.
        sinks: [heads], or None; as for `attend`.
        dtype: Of the result.

    Returns:
        [batch, queries, heads, value_dim].
    """
    outs, logs = (torch.stack(each) for each in zip(*parts, strict=True))
    return merge_stacked(outs, logs, sinks)[0].to(dtype)


def merge_stacked(outs: torch.Tensor, logs: torch.Tensor, sinks: torch.Tensor | None = None) -> Part:
    """The same for parts [parts, …] that lie in one tensor; with the log-sum-exp of all."""
    total = torch.logsumexp(logs, dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None])
    finite = total.clamp_min(torch.finfo(torch.float32).min)  # a query that sees nothing gets zeros
    weights = torch.exp(logs - finite).transpose(2, 3)[..., None]
    return (outs * weights).sum(dim=0), total
