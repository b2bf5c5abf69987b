"""Kernels in CUDA C++ for sm_70 and sm_75, where Triton does not use tensor cores."""

import torch

from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.attention.cuda import launch, nvrtc


def runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be compiled for a device, and take a dtype."""
    fits = dtype == torch.float16 and (7, 0) <= torch.cuda.get_device_capability(device) < (8, 0)
    return fits and nvrtc.library() is not None


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `attend` takes these."""
    half = all(each.is_cuda and each.dtype == torch.float16 for each in (query, key, value))
    return half and all(dim % 16 == 0 and dim <= launch.MAX_DIM for dim in (key.shape[3], value.shape[3]))


def attend(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> Part:
    """Compute what `reference.attend` defines. The log-sum-exp is empty unless `call.partial`."""
    device = call.query.device
    kernel = nvrtc.load(device, key.shape[3], value.shape[3])
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return launch.attend(kernel, call, key, value, processors)
