"""`KVBoost`: a model, its tokenizer and a store behind one object, with the names of the kvboost package."""

from kvboost_hf.config import RecomputeStrategy
from kvboost_hf.engine.kvboost import KVBoost
from kvboost_hf.engine.prompts import group_by_prefix
from kvboost_hf.engine.results import GenerationMode, GenerationResult, WarmResult
from kvboost_hf.engine.settings import EngineSettings

InferenceEngine = KVBoost
"""`KVBoost`, by the name that kvboost has for the class."""
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
