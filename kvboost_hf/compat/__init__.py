"""What each model allows, and why not."""

from kvboost_hf.compat.kept import KeptOnModel
from kvboost_hf.compat.models import (
    SERVED_LAYERS,
    bytes_per_token,
    cache_argument,
    cache_layers,
    decoder_layers,
    has_own_cache,
    input_device,
    require_cache,
)
from kvboost_hf.compat.probes import (
    difference,
    known_reason,
    padding_reason,
    probe_reason,
    steps_reason,
    tolerance,
)
from kvboost_hf.compat.report import CompatibilityReport, check_model_compatibility, known_architectures, moving_reason
from kvboost_hf.compat.rope import frequencies_vary, rope_regime
from kvboost_hf.compat.rotary import key_rotation
from kvboost_hf.compat.rotation import KeyRotation, LayerRotation

__all__ = [
    "SERVED_LAYERS",
    "CompatibilityReport",
    "KeptOnModel",
    "KeyRotation",
    "LayerRotation",
    "bytes_per_token",
    "cache_argument",
    "cache_layers",
    "check_model_compatibility",
    "decoder_layers",
    "difference",
    "frequencies_vary",
    "has_own_cache",
    "input_device",
    "key_rotation",
    "known_architectures",
    "known_reason",
    "moving_reason",
    "padding_reason",
    "probe_reason",
    "require_cache",
    "rope_regime",
    "steps_reason",
    "tolerance",
]
