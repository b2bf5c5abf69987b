"""Names of `kvboost_hf.compat`."""

from kvboost_hf.compat import (
    CACHE,
    SERVED_LAYERS,
    KeyRotation,
    LayerRotation,
    PrivateCache,
    attention_function,
    bytes_per_token,
    cache_argument,
    cache_in,
    cache_layers,
    decoder_layers,
    forward_arguments,
    generate_frame,
    hidden_states_reason,
    key_rotation,
    known_reason,
    kv_bytes_per_token,
    loader_of,
    probe_reason,
    rope_regime,
    run_model,
    steps_reason,
    text_model,
    training_reason,
)
from kvboost_hf.compat.probes import padding_reason
