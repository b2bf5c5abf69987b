"""Attention over parts of the columns, made one."""

from collections.abc import Sequence

import torch

Part = tuple[torch.Tensor, torch.Tensor]  # [batch, queries, heads, value_dim], float32; [batch, heads, queries]


def merge(parts: Sequence[Part], sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What attention over all columns would have been.

    Args:
        parts: As `attend(…, partial=True)` returns them: over columns of which each is in one part.
        sinks: [heads], or None; as for `attend`.
        dtype: Of the result.

    Returns:
        [batch, queries, heads, value_dim].
    """
    logs = [lse for _, lse in parts]
    if sinks is not None:
        logs.append(sinks.float()[None, :, None].expand_as(logs[0]))
    total = torch.logsumexp(torch.stack(logs), dim=0)
    total = total.clamp_min(torch.finfo(torch.float32).min)  # a query that sees nothing gets zeros
    merged = torch.zeros_like(parts[0][0])
    for out, lse in parts:
        merged.addcmul_(out, torch.exp(lse - total).transpose(1, 2)[..., None])
    return merged.to(dtype)
