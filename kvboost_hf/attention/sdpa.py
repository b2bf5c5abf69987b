"""Calls `scaled_dot_product_attention`: where it is fastest on a GPU, and with a mask for all else."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvboost_hf.attention.call import AttentionCall
from kvboost_hf.visibility import Visibility

_LONG = 32_768  # tokens: cuDNN plans for each length anew, for about as long as it then saves on all layers
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def faster_case(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> Literal["square", "decode"] | None:
    """Return the case for which PyTorch has a kernel of the vendor's that is at least as fast as ours, if it is one.

    Args:
        call: Queries, and how their logits are made.
        key: [batch, num_kv_heads, columns, head_dim].
        value: [batch, num_kv_heads, columns, value_dim].

    Returns:
        `"square"` for a plain square prompt, `"decode"` for one query that sees all columns, and None for every other
        call, and off a GPU.
    """
    query, seen = call.query, call.visibility
    queries, dim = query.shape[2], query.shape[3]
    if call.partial or not (queries == 1 or queries == key.shape[2]) or not query.is_cuda:
        return None
    if seen.keep is not None or seen.columns is not None or seen.tree is not None or seen.mask is not None:
        return None
    if seen.window or call.softcap or call.sinks is not None or query.dtype is torch.float32:
        return None
    if not key.shape[3] == value.shape[3] <= 256:
        return None
    if queries > 1:
        return "square"
    # Other widths it pads, in a copy of all columns. Its kernel for AMD was never timed with one query.
    return "decode" if dim % 8 == 0 and not torch.version.hip else None


def attend(
    call: AttentionCall,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute attention [batch, queries, heads, value_dim] without softcap, sinks and log-sum-exp. Differentiable."""
    assert not call.softcap
    assert not call.partial
    assert call.sinks is None
    query, visibility = call.query, call.visibility
    queries, total, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    plain = visibility.keep is None and visibility.columns is None and visibility.tree is None
    plain = plain and visibility.mask is None and bias is None and not visibility.window
    square = plain and visibility.causal and queries == total > 1
    mask = None
    if not (square or (plain and (queries == 1 or not visibility.causal))):
        mask = _mask(query, key, visibility, bias)
        if groups > 1:  # with a mask, grouped heads take the slowest kernel
            key, value, groups = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1), 1
    with _order(query) if square else nullcontext():
        out = F.scaled_dot_product_attention(
            query, key, value, mask, dropout, square, scale=call.scale, enable_gqa=groups > 1
        )
    return out.transpose(1, 2).contiguous()


def _order(query: torch.Tensor) -> AbstractContextManager[None]:
    """Ask cuDNN first for a long square prompt, on a GPU where it is faster than what PyTorch would ask first."""
    if query.shape[2] < _LONG or not query.is_cuda or torch.version.hip:
        return nullcontext()
    if torch.cuda.get_device_capability(query.device) < (9, 0):
        return nullcontext()
    return sdpa_kernel(_FASTEST_FIRST, set_priority=True)


def _mask(query: torch.Tensor, key: torch.Tensor, visibility: Visibility, bias: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads or 1, queries, columns]; a query that sees nothing sees all, rather than be no number."""
    seen = visibility.dense(query.shape[2], key.shape[2], query.device)
    if bias is not None:
        return bias.to(query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
    return seen | ~seen.any(dim=-1, keepdim=True)
