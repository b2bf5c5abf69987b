"""Adapts to models of transformers: their layers, attention and caches, and which kinds of reuse they allow."""

from typing import TYPE_CHECKING, Any

from kvboost_hf.compat.attention import attention_function, attn_implementation, mask_form
from kvboost_hf.compat.cache_names import CACHE, cache_argument, cache_in, take_newest_name, with_cache_by
from kvboost_hf.compat.calls import (
    MAX_DEPTH,
    AssistedCall,
    assisted_call,
    generate_frame,
    give_back_tokenizer,
    is_generate,
    running_streamer,
    waits_for_peers,
)
from kvboost_hf.compat.forwards import forward_arguments, forward_of
from kvboost_hf.compat.generating import loader_of, loader_of_pair, require_generates
from kvboost_hf.compat.hooks import hook_hidden_states, hook_layers, hooks_registered, own_hook
from kvboost_hf.compat.memo import KeptOnModel, attempt, recall, remember
from kvboost_hf.compat.models import (
    SERVED_LAYERS,
    available_device,
    bytes_per_token,
    cache_layers,
    decoder_layers,
    has_own_cache,
    head_widths,
    input_device,
    keeps_positions,
    kv_bytes_per_token,
    kv_sources,
    layer_configs,
    require_cache,
    require_model,
    require_reusable_model,
    text_model,
    unwrapped,
    weights_come_and_go,
)
from kvboost_hf.compat.private import PrivateCache, run_model
from kvboost_hf.compat.probes import (
    difference,
    hidden_states_reason,
    known_hidden_states_reason,
    known_reason,
    note_changes,
    padding_reason,
    probe_ids,
    probe_logits,
    probe_reason,
    steps_reason,
    tolerance,
)
from kvboost_hf.compat.rope import frequencies_vary, original_length, rope_regime
from kvboost_hf.compat.rotary import key_rotation
from kvboost_hf.compat.rotation import KeyRotation, LayerRotation, Shifts
from kvboost_hf.compat.training import checkpointing_reason, training_reason
from kvboost_hf.migration import old_name

__all__ = [
    "CACHE",
    "MAX_DEPTH",
    "SERVED_LAYERS",
    "AssistedCall",
    "KeptOnModel",
    "KeyRotation",
    "LayerRotation",
    "PrivateCache",
    "Shifts",
    "assisted_call",
    "attempt",
    "attention_function",
    "attn_implementation",
    "available_device",
    "bytes_per_token",
    "cache_argument",
    "cache_in",
    "cache_layers",
    "checkpointing_reason",
    "decoder_layers",
    "difference",
    "forward_arguments",
    "forward_of",
    "frequencies_vary",
    "generate_frame",
    "give_back_tokenizer",
    "has_own_cache",
    "head_widths",
    "hidden_states_reason",
    "hook_hidden_states",
    "hook_layers",
    "hooks_registered",
    "input_device",
    "is_generate",
    "keeps_positions",
    "key_rotation",
    "known_hidden_states_reason",
    "known_reason",
    "kv_bytes_per_token",
    "kv_sources",
    "layer_configs",
    "loader_of",
    "loader_of_pair",
    "mask_form",
    "note_changes",
    "original_length",
    "own_hook",
    "padding_reason",
    "probe_ids",
    "probe_logits",
    "probe_reason",
    "recall",
    "remember",
    "require_cache",
    "require_generates",
    "require_model",
    "require_reusable_model",
    "rope_regime",
    "run_model",
    "running_streamer",
    "steps_reason",
    "take_newest_name",
    "text_model",
    "tolerance",
    "training_reason",
    "unwrapped",
    "waits_for_peers",
    "weights_come_and_go",
    "with_cache_by",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a name that kvboost has here, or raise an error that names its replacement."""
        return old_name(__name__, name)
