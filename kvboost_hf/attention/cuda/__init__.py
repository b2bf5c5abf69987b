"""Kernels in CUDA C++ for GPUs that get no tensor cores from Triton: sm_70 and sm_75."""

import torch

from kvboost_hf.attention.merge import Part
from kvboost_hf.attention.visibility import Visibility


def runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be compiled for a device, and take a dtype."""
    return False


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visibility: Visibility) -> bool:
    """Whether `attend` takes these."""
    return False


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
    raise NotImplementedError
