"""Kernels in CUDA C++ for GPUs that get no tensor cores from Triton: sm_70 and sm_75."""

import torch

from kvboost_hf.attention.cuda import driver, launch, nvrtc
from kvboost_hf.attention.merge import Part
from kvboost_hf.attention.visibility import Visibility


def runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be compiled for a device, and take a dtype."""
    fits = dtype == torch.float16 and (7, 0) <= torch.cuda.get_device_capability(device) < (8, 0)
    return fits and nvrtc.library() is not None


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visibility: Visibility) -> bool:
    """Whether `attend` takes these."""
    half = all(each.is_cuda and each.dtype == torch.float16 for each in (query, key, value))
    return half and all(dim % 16 == 0 and dim <= launch.MAX_DIM for dim in (key.shape[3], value.shape[3]))


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
    """See `reference.attend`. Without a log-sum-exp, unless `partial`."""
    return launch.attend(
        driver.load(query.device, key.shape[3], value.shape[3]),
        query,
        key,
        value,
        scale=scale,
        visibility=visibility,
        softcap=softcap,
        sinks=sinks,
        partial=partial,
        processors=torch.cuda.get_device_properties(query.device).multi_processor_count,
    )
