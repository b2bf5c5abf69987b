"""`KVBoost`: a model, its tokenizer and a store behind one object, with the names of the kvboost package."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost_hf.config import RecomputeStrategy
    from kvboost_hf.engine.kvboost import InferenceEngine, KVBoost
    from kvboost_hf.engine.prompts import group_by_prefix
    from kvboost_hf.engine.results import GenerationMode, GenerationResult, WarmResult
    from kvboost_hf.engine.settings import EngineSettings

__all__ = [
    "EngineSettings",
    "GenerationMode",
    "GenerationResult",
    "InferenceEngine",
    "KVBoost",
    "RecomputeStrategy",
    "WarmResult",
    "group_by_prefix",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A name of this package; settings alone need no torch."""
        for part in ("settings", "results", "prompts", "kvboost") if name in __all__ else ():
            if hasattr(module := import_module(f"{__name__}.{part}"), name):
                return getattr(module, name)
        raise AttributeError(f"{__name__} has no `{name}`.", name=name)
