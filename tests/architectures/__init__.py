"""Every causal language model of transformers, tiny: what reuse does for it, and the table made from that."""

from tests.architectures.models import NOT_BUILT, TRIED, make_architecture

__all__ = ["NOT_BUILT", "TRIED", "make_architecture"]
