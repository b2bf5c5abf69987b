"""`kvboost_fa2`: an attention implementation for transformers that reads reused K/V where a cache holds it."""

from kvboost_hf.attention.backends import active_tier, use_tier
from kvboost_hf.attention.register import register
from kvboost_hf.kernels import kernel_calls

register()

__all__ = ["active_tier", "kernel_calls", "use_tier"]
