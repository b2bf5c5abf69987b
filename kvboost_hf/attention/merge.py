"""Merges attention over parts of the columns into attention over all of them."""

from collections.abc import Sequence
from functools import cache

import torch

from kvboost_hf.attention.call import Part


@cache
def no_log(device: torch.device) -> torch.Tensor:
    """An empty log-sum-exp, for calls that are not `partial`."""
    with torch.inference_mode(False):
        return torch.empty(0, device=device)


def merge(parts: Sequence[Part], sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Merge parts into what attention over all columns gives.

    Args:
        parts: Results of `partial` calls; each column is in one part.
        sinks: [heads], or None: logits of a column without a value.
        dtype: Of the result.

    Returns:
        [batch, queries, heads, value_dim].
    """
    outs, logs = (torch.stack(each) for each in zip(*parts, strict=True))
    return merge_stacked(outs, logs, sinks)[0].to(dtype)


def merge_stacked(outs: torch.Tensor, logs: torch.Tensor, sinks: torch.Tensor | None = None) -> Part:
    """Merge parts that lie in one tensor, [parts, ...] each; with the log-sum-exp of all columns."""
    total = torch.logsumexp(logs, dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None])
    finite = total.clamp_min(torch.finfo(torch.float32).min)  # a query that sees nothing gets zeros
    weights = torch.exp(logs - finite).transpose(2, 3)[..., None]
    return (outs * weights).sum(dim=0), total
