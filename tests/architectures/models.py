"""A tiny random model of every causal language model that transformers knows."""

import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests import multimodal
from tests.architectures.sizes import OPTIONAL, OVERRIDES, SIZES

CAUSAL_LM_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_DRAFTER = "a drafter that reads the K/V of the Gemma 4 that it drafts for, and has none of its own"
# Types with which plain generate() cannot be compared, and why.
NOT_BUILT = {
    "blt": "stock transformers cannot make a cache for it: BltConfig has no num_hidden_layers",
    "gemma3n": "its vision tower needs the timm package; its language model is tested as gemma3n_text",
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "musicgen": "stock generate() shows it only the last token of a prompt",
}

# What a release of transformers has broken: the first such release, and how.
BROKEN_SINCE = {
    "llama4-multimodal": (
        "5.24",
        "stock transformers 5.24 fails at each forward: its model with an image encoder reads `image_outputs` of what "
        "its language model returns, which has none. With transformers 5.17 to 5.23 it is reused",
    )
}
NOT_BUILT |= {
    name: why for name, (since, why) in BROKEN_SINCE.items() if Version(transformers.__version__) >= Version(since)
}

# Multimodal ones that are no causal language models to transformers, by the name that they are tried under. Here they
# are shown text only. Gemma 3 is one of the others, too.
MULTIMODAL = {
    f"{name}-multimodal": name
    for name in sorted(multimodal.FAMILIES)
    if not name.endswith("_video") and not name.startswith("gemma3")
}
TRIED = [name for name in (*CAUSAL_LM_TYPES, *MULTIMODAL) if name not in NOT_BUILT]

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# What tells a configuration's kinds of layers: a tiny model must have all that the real one has.
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "no_rope_layers")


def make_architecture(model_type: str) -> PreTrainedModel:
    """A tiny random model in eval mode, the same at each call, that never ends an answer early."""
    if model_type in MULTIMODAL:
        model = multimodal.make_model(MULTIMODAL[model_type])
    else:
        config_class, model_class = classes_of(model_type)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = model_class(_small(config_class)).eval()
            _stir(model)
    told = model.generation_config
    told.pad_token_id = told.decoder_start_token_id = SIZES["pad_token_id"]
    told.eos_token_id = told.forced_eos_token_id = None
    told.num_return_sequences = 1  # MusicGen reads it, and cannot do with the default None
    return model


def _stir(model: PreTrainedModel) -> None:
    """Move what starts as zeros or ones (biases, norms, gates, sinks, decays), which would hide what it is for."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.min() == parameter.max():
            parameter.data += 0.1 * torch.randn_like(parameter)


def classes_of(model_type: str) -> tuple[type[PreTrainedConfig], type[PreTrainedModel]]:
    """The configuration and the model of a type; of a composite type's language model if that is what it maps to."""
    config_class = CONFIG_MAPPING[model_type]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if config_class.sub_configs and model_class.config_class is not config_class:  # type: ignore[attr-defined]
        config_class = model_class.config_class  # type: ignore[attr-defined]
    return config_class, model_class  # type: ignore[return-value]


def _small(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    default = config_class()
    known = inspect.signature(config_class.__init__).parameters
    given = {name: size for name, size in SIZES.items() if name in known and _is_used(name, default)}
    if "kv_lora_rank" in given:  # latent attention: all heads have keys, and some name the rotary part `head_dim`
        given |= {"num_key_value_heads": SIZES["num_attention_heads"]} if "num_key_value_heads" in given else {}
        if "head_dim" in given and default.get_text_config().qk_rope_head_dim == default.head_dim:
            given["head_dim"] = given["qk_rope_head_dim"]
    given |= OVERRIDES.get(config_class.model_type, {})
    for name in default.sub_configs:
        part = getattr(default, name)
        if name not in given and part is not None:
            given[name] = _small(type(part))
    depth = next((name for name in _DEPTHS if name in known), None)
    if depth is None or not given.keys().isdisjoint(_DEPTHS):
        return config_class(**given)
    return _shallow(config_class, given, depth, _kinds(default))


def _shallow(
    config_class: type[PreTrainedConfig], given: dict[str, Any], depth: str, kinds: dict[str, set[Any]]
) -> PreTrainedConfig:
    """The configuration with the fewest layers, two or more, that has layers of all kinds."""
    for layers in range(2, 9):
        config = config_class(**given, **{depth: layers})  # type: ignore[arg-type]
        if _kinds(config) == kinds:
            return config
    raise ValueError(f"{config_class.__name__} does not show all of {kinds} in 8 layers. Say which in OVERRIDES.")


def _is_used(name: str, default: PreTrainedConfig) -> bool:
    return name not in OPTIONAL or bool(getattr(default, name, None))


def _kinds(config: PreTrainedConfig) -> dict[str, set[Any]]:
    return {name: set(getattr(config, name)) for name in _KINDS if getattr(config, name, None)}
