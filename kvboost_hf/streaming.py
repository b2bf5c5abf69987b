"""Layer streaming under the module name of kvboost: `from kvboost_hf.streaming import StreamingConfig`."""

from typing import TYPE_CHECKING, Any

from kvboost_hf.config import StreamingConfig
from kvboost_hf.offload.build import stop_streaming, stream_layers, streaming_plan, streaming_stats
from kvboost_hf.offload.load import load_streamed
from kvboost_hf.old_names import old_name

__all__ = [
    "StreamingConfig",
    "load_streamed",
    "stop_streaming",
    "stream_layers",
    "streaming_plan",
    "streaming_stats",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Raise an error that names the replacement of a name of kvboost."""
        return old_name(__name__, name)
