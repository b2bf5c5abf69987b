"""The arguments of one call of attention without its keys and values, which have several forms, and its result."""

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

    Args:
        query: [batch, heads, queries, head_dim]; the heads are a multiple of those of the keys.
        scale: Factor of the logits; above 0 for Triton kernels.
        visibility: Which columns each query may attend to.
        softcap: Bounds the logits by `softcap * tanh(logits / softcap)`; 0 for no bound.
        sinks: [heads], or None: logits of one more column, which all queries see and which has no value.
        partial: The columns are only some of all: the result stays in float32 and has a log-sum-exp, for `merge`.
    """

    query: torch.Tensor
    scale: float
    visibility: Visibility
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    partial: bool = False
