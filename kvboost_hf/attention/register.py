"""Registers `kvboost_fa2` with transformers, and as a reader with caches."""

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvboost_hf.attention.backends import backend_of
from kvboost_hf.attention.layer import attention
from kvboost_hf.attention.masks import make_mask
from kvboost_hf.handles import ATTENTION, CodedKV, MixedKV, register_reader


def _reads(kind: type[MixedKV], device: torch.device) -> bool:
    backend = backend_of(device)
    return backend == "triton" or (backend == "cpu" and kind is CodedKV)


def register() -> None:
    """Register the attention with transformers, and as a reader with caches."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, make_mask)
    register_reader(ATTENTION, _reads)
