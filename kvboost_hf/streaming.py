"""The names of streaming, where kvboost has them: `from kvboost_hf.streaming import StreamingConfig`."""

from kvboost_hf.config import StreamingConfig
from kvboost_hf.offload.build import stop_streaming, stream_layers, streaming_plan, streaming_stats
from kvboost_hf.offload.load import load_streamed

__all__ = [
    "StreamingConfig",
    "load_streamed",
    "stop_streaming",
    "stream_layers",
    "streaming_plan",
    "streaming_stats",
]
