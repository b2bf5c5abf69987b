"""Every causal language model of transformers, tiny: what reuse does for it, and the table made from that."""

from tests.architectures.models import CAUSAL_LM_TYPES, NOT_BUILT, make_architecture

__all__ = ["CAUSAL_LM_TYPES", "NOT_BUILT", "make_architecture"]
