"""Keys and values as codes."""

import torch

from kvboost_hf.attention import reference
from kvboost_hf.attention.merge import Part
from kvboost_hf.handles import CodePlanes


def attend_codes(
    query: torch.Tensor,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> Part:
    """See `ops.attend_codes`."""
    return reference.attend_codes(query, keys, values, lengths, scale=scale, softcap=softcap)
