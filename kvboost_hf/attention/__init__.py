"""`kvboost_fa2`: an attention implementation for transformers that reads reused K/V where a cache holds it."""

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvboost_hf.attention.backends import active_tier, backend_of, use_tier
from kvboost_hf.attention.layer import attention
from kvboost_hf.attention.masks import make_mask
from kvboost_hf.handles import ATTENTION, CodedKV, MixedKV, register_reader
from kvboost_hf.kernels import kernel_calls

__all__ = ["active_tier", "kernel_calls", "use_tier"]


def _reads(kind: type[MixedKV], device: torch.device) -> bool:
    backend = backend_of(device)
    return backend == "triton" or (backend == "cpu" and kind is CodedKV)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, make_mask)
register_reader(ATTENTION, _reads)
