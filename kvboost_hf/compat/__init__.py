"""Adapts to models of transformers: their layers, attention and caches, and which kinds of reuse they allow."""

from typing import TYPE_CHECKING, Any

from kvboost_hf.compat.calls import (
    SHARED_KV,
    AssistedCall,
    GenerateCall,
    assisted_call,
    at_end,
    autocast,
    cache_left_out,
    calling,
    encoded_from,
    generate_frame,
    give_back_tokenizer,
    in_generate,
    in_prefill,
    is_in_forward,
    is_in_stock_loop,
    is_running,
    is_under_way,
    may_draft,
    outputs_read,
    precision_readers,
    reads_last_logits,
    running_config,
    running_streamer,
    under_autocast,
    waits_for_peers,
    whole_of_piece,
)
from kvboost_hf.compat.forwards import (
    CACHE,
    cache_argument,
    cache_in,
    forward_arguments,
    forward_of,
    take_newest_name,
    with_cache_by,
)
from kvboost_hf.compat.hooks import LAST, OwnHooks, Shown, hook_hidden_states, hook_layers, own_hook
from kvboost_hf.compat.memo import (
    ORIGIN,
    SCALARS,
    KeptOnModel,
    attempt,
    config_scalars,
    note_changes,
    recall,
    remember,
    shown,
)
from kvboost_hf.compat.models import (
    SERVED_LAYERS,
    STATEFUL_LAYERS,
    attention_function,
    attn_implementation,
    available_device,
    bytes_per_token,
    cache_layers,
    decoder_layers,
    embedding_table,
    forms_of,
    has_own_cache,
    head_widths,
    input_device,
    is_compiled,
    kv_bytes_per_token,
    kv_sources,
    layer_configs,
    layer_forms,
    loader_of,
    loader_of_pair,
    mask_form,
    needs_positions,
    position_planes,
    reads_shared_kv,
    require_cache,
    require_generates,
    require_known_ids,
    require_model,
    require_reusable_model,
    text_model,
    unwrapped,
    weights_come_and_go,
)
from kvboost_hf.compat.naming import for_config, naming
from kvboost_hf.compat.private import OF_EACH_TOKEN, TAKE_MASKS, LayerMasks, PrivateCache, masks_reason, run_model
from kvboost_hf.compat.probes import (
    HiddenForm,
    as_steps,
    checkpointing_reason,
    difference,
    hidden_form,
    hidden_states_reason,
    known_hidden_states_reason,
    known_reason,
    padding_reason,
    probe_ids,
    probe_logits,
    probe_reason,
    several_steps_reason,
    steps_reason,
    tolerance,
    training_reason,
)
from kvboost_hf.compat.ranks import Ranks, ranks_of, require_one_process
from kvboost_hf.compat.rotary import frequencies_vary, has_unmasked_windows, key_rotation, original_length, rope_regime
from kvboost_hf.compat.rotation import KeyRotation, LayerRotation, Shifts
from kvboost_hf.old_names import old_name

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a name that kvboost has here, or raise an error that names its replacement."""
        return old_name(__name__, name)
