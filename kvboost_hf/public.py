"""The public names of the package; `kvboost_hf` loads this module when it is asked for the first of them."""

import kvboost_hf.attention as attention
from kvboost_hf.assisted.load import load_assistant, speculation_stats
from kvboost_hf.assisted.lookup import lookup_assistant
from kvboost_hf.assisted.rounds import SpeculationStats
from kvboost_hf.assisted.tree_decoding import TreeDecoding
from kvboost_hf.cache.attach import attach, detach, last_cache
from kvboost_hf.cache.layers.quantized import live_bytes
from kvboost_hf.cache.planning.chunks import ContentChunker
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.cache.store.integrity import IntegrityReport
from kvboost_hf.compatibility import CompatibilityReport, check_model_compatibility
from kvboost_hf.config import DraftTreeConfig, KVQuantConfig, ReusePolicy, StreamingConfig
from kvboost_hf.engine import (
    GenerationMode,
    GenerationResult,
    InferenceEngine,
    KVBoost,
    RecomputeStrategy,
    WarmResult,
)
from kvboost_hf.errors import (
    CacheInUseError,
    CacheModelMismatchError,
    InterruptedForwardError,
    KVBoostError,
    NonFiniteLogitsError,
    RankError,
    StoreClosedError,
    StoreFullError,
    StreamingError,
)
from kvboost_hf.offload.build import stop_streaming, stream_layers, streaming_plan, streaming_stats
from kvboost_hf.offload.load import load_streamed, with_streaming
from kvboost_hf.offload.plan import ResidencyPlan
from kvboost_hf.offload.sizes import what_fits
from kvboost_hf.offload.stream import LayerStreamingHook, StreamingStats
from kvboost_hf.scoring import Score, score, score_ids
from kvboost_hf.verify import CorrectnessReport, verify_correctness

__all__ = [
    "CacheInUseError",
    "CacheModelMismatchError",
    "ChunkReuseCache",
    "ChunkStore",
    "CompatibilityReport",
    "ContentChunker",
    "CorrectnessReport",
    "DraftTreeConfig",
    "GenerationMode",
    "GenerationResult",
    "InferenceEngine",
    "IntegrityReport",
    "InterruptedForwardError",
    "KVBoost",
    "KVBoostError",
    "KVQuantConfig",
    "LayerStreamingHook",
    "NonFiniteLogitsError",
    "RankError",
    "RecomputeStrategy",
    "ResidencyPlan",
    "ReusePolicy",
    "ReuseReport",
    "Score",
    "SpeculationStats",
    "StoreClosedError",
    "StoreFullError",
    "StreamingConfig",
    "StreamingError",
    "StreamingStats",
    "TreeDecoding",
    "WarmResult",
    "attach",
    "attention",
    "check_model_compatibility",
    "detach",
    "last_cache",
    "live_bytes",
    "load_assistant",
    "load_streamed",
    "lookup_assistant",
    "score",
    "score_ids",
    "speculation_stats",
    "stop_streaming",
    "stream_layers",
    "streaming_plan",
    "streaming_stats",
    "verify_correctness",
    "what_fits",
    "with_streaming",
]
