"""Measures what the end of a prompt attends to, by a forward of its last tokens over the keys that are there."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.moved import BlendPlan
from kvboost_hf.cache.forward.scatter import ScatterPass
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.compat import PrivateCache, run_model

_MAX_QUERIES = 32
_OPERATOR = "kvboost_hf.attend.default"


def attention_of_the_end(
    model: PreTrainedModel, layers: Sequence[ReuseLayer], plan: BlendPlan, ids: torch.Tensor, first: int
) -> tuple[NDArray[np.float64], list[int]]:
    """Run the last tokens over the stored keys, and see where they look.

    Their own K/V is put into the layers on the way; whoever asks must compute them again.

    Args:
        model: The model.
        layers: They hold all columns.
        plan: What they hold.
        ids: [batch, m], those that the caller passed.
        first: The column of the first of them.

    Returns:
        Per row, how much attention each column gets from them [batch, columns], as `AttentionProbe.scores`; and the
        tokens that went through each layer.
    """
    queries = num_queries(plan)
    columns = np.arange(plan.columns - queries, plan.columns)[None].repeat(len(plan.rows), axis=0)
    present = plan.present
    present[:, -queries:] = True
    cache = PrivateCache([layer.native for layer in layers])
    scatter = ScatterPass(model, cache, layers, columns, plan.pads, present=present, compact=False)
    cache.take = scatter.update
    try:
        given = scatter.arguments(ids, first)
        with AttentionProbe(scatter, plan.columns) as probe:
            run_model(model, cache=cache, **given)
    finally:
        scatter.close()
        cache.take = None
    return probe.scores, scatter.layer_tokens


def num_queries(plan: BlendPlan) -> int:
    """How many tokens look: the last ones, which are computed in every row that has begun."""
    ends = [int(row.computed[::-1].cumprod().sum()) for row in plan.rows]
    return min(_MAX_QUERIES, *(end for end in ends if end > 0))  # a row without an end is all padding so far


class AttentionProbe(TorchFunctionMode):
    """Sums up the attention weights of a forward in this thread: of SDPA, of a softmax, or of `kvboost_fa2`."""

    def __init__(self, running: ScatterPass, columns: int) -> None:
        super().__init__()
        self._pass, self._columns = running, columns
        self._sum: torch.Tensor | None = None

    @property
    def scores(self) -> NDArray[np.float64]:
        """[batch, columns]: of each layer the square root of what a column gets, summed over layers.

        What a column gets is the sum over queries, and the mean over heads. Its root lets no layer decide alone.
        """
        assert self._sum is not None, "no attention was seen"
        return self._sum.double().cpu().numpy()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            weights, found = _attend(*args, **kwargs)
            self._add(weights)
            return found
        if str(func) == _OPERATOR:
            self._add(_weights(*args, **kwargs))
        found = func(*args, **kwargs)
        if func is F.softmax and found.ndim == 4:
            self._add(found)
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as `ScatterPass.update`
    def _add(self, weights: torch.Tensor) -> None:
        """Add [batch, heads, queries, keys]; keys may be followed by an attention sink."""
        first = self._pass.first_column
        got = weights[..., : self._columns - first].float().mean(dim=1).sum(dim=1).sqrt()
        if self._sum is None:
            self._sum = torch.zeros(len(got), self._columns, device=got.device)
        self._sum[:, first:] += got.to(self._sum.device)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of `F.scaled_dot_product_attention`, [batch, heads, queries, keys] in float32, and its result."""
    scores = _products(query, key.float()) * (scale or query.shape[-1] ** -0.5)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(dim=-1)
    return weights, _products(weights, value.float().mT).to(query.dtype)


def _products(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Of `rows` [batch, heads, m, dim] with `others` [batch, kv_heads, n, dim], each of which several heads share."""
    batch, heads, m, dim = rows.shape
    grouped = rows.float().reshape(batch, others.shape[1], -1, dim)
    return (grouped @ others.mT).view(batch, heads, m, -1)


def _weights(
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    scale: float,
    seen: Sequence[torch.Tensor | None],
    causal: bool,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    partial: bool,
) -> torch.Tensor:
    """The weights of the operator of `kvboost_fa2`, [batch, heads, queries, keys] in float32.

    Its arguments are those of `kvboost_hf::attend`. A mask says which keys are seen; that of a single query is `keep`.
    """
    keep, _, _, mask = seen
    scores = _products(query, key.float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for there in (mask, keep[:, None, None] if keep is not None else None):
        if there is not None:
            scores = scores.masked_fill(~there, float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    return scores.softmax(dim=-1)
