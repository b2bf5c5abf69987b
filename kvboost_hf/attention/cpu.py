"""On a CPU: PyTorch's flash attention, in parts that need no mask of queries and columns, merged."""

import torch

from kvboost_hf.attention import reference
from kvboost_hf.attention.merge import Part
from kvboost_hf.attention.visibility import Visibility
from kvboost_hf.handles import CodePlanes


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    visibility: Visibility,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    partial: bool = False,
) -> Part:
    """See `reference.attend`."""
    out, lse = reference.attend(
        query, key, value, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks, partial=partial
    )
    return out, lse if partial else lse.new_empty(0)


def attend_codes(
    query: torch.Tensor,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> Part:
    """See `reference.attend_codes`."""
    return reference.attend_codes(query, keys, values, lengths, scale=scale, softcap=softcap)
