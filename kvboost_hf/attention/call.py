"""One call of attention: its arguments without keys and values, which have several forms, and its result in parts.

`merge` makes attention over all columns of attention over parts of them.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from kvboost_hf.visibility import Visibility

# Attention [batch, queries, heads, value_dim], and the log of the sum of the exponentiated logits,
# [batch, heads, queries], float32: -inf for queries that see nothing, empty where nobody asked for it.
Part = tuple[torch.Tensor, torch.Tensor]


class AttentionCall(NamedTuple):  # made once for each layer: a frozen dataclass takes three times as long to make
    """The queries of a layer, and how their logits are scaled, bounded and masked.

    Keys and values are given beside it: as tensors, in pieces (`PieceTable`) or as codes (`CodePlanes`). A call over
    pieces or codes is always `partial`, and leaves `sinks` to the merge.
    """

    query: torch.Tensor  # [batch, heads, queries, head_dim]; the heads are a multiple of those of the keys
    scale: float  # factor of the logits; above 0 for Triton kernels
    visibility: Visibility  # which columns each query may attend to
    softcap: float = 0.0  # bounds the logits by `softcap * tanh(logits / softcap)`; 0 for no bound
    # [heads], or None: logits of one more column, which all queries see and which has no value.
    sinks: torch.Tensor | None = None
    # The columns are only some of all: the result stays in float32 and has a log-sum-exp, for `merge`.
    partial: bool = False


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
        dtype: The data type of the result.

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
