"""Every causal language model of transformers, tiny: what reuse does for it, and the table made from that."""

from tests.architectures.models import BROKEN_SINCE, NOT_BUILT, TRIED, make_architecture

__all__ = ["BROKEN_SINCE", "NOT_BUILT", "TRIED", "make_architecture"]
