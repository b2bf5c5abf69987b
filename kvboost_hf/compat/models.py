"""Properties of a model: its class, cache layers, decoder layers, attention, devices and sizes of K/V."""

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
)

from kvboost_hf.compat.forwards import cache_argument

# Cache layers of transformers that `cache/kv/model_form.py` can replace; stateful ones keep a sum of what they saw.
STATEFUL_LAYERS = frozenset(
    (
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DeepseekV4HCACache",
        "DeepseekV4CSACache",
    )
)
_WITHOUT_KV = frozenset(("LinearAttentionLayer", "DummyLayer"))
SERVED_LAYERS = STATEFUL_LAYERS | {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DynamicIndexedLayer",
    "DummyLayer",
    "MiniMaxM3VLSparseCacheLayer",
}


def unwrapped(model: Any) -> Any:
    """The model inside wrappers of PEFT and `torch.compile`, or `model` itself."""
    while not isinstance(model, PreTrainedModel):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            return model
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
    return model


def require_model(model: Any) -> Any:
    """The model inside wrappers, or `model` itself.

    Raises:
        ValueError: for anything but a `PreTrainedModel`.
    """
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(_not_a_model(inner))
    return inner


def require_reusable_model(model: PreTrainedModel) -> None:
    """Refuse models that K/V reuse cannot support.

    Raises:
        ValueError: for anything but a `PreTrainedModel` decoder that generates text and whose weights are loaded.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(_not_a_model(model))
    require_generates(model)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder; K/V reuse is for decoder-only models. Use it without a "
            "ChunkReuseCache."
        )
    empty = all(p.is_meta for p in model.parameters())
    if empty and not weights_come_and_go(model):
        raise ValueError(
            f"All weights of this {type(model).__name__} are on the meta device, so it cannot compute anything. Load "
            "them first, for example with from_pretrained()."
        )


def weights_come_and_go(model: nn.Module) -> bool:
    """Whether hooks of accelerate may fetch weights while the model computes, as those of streamed layers do."""
    return any("_hf_hook" in module.__dict__ for module in model.modules())


def is_compiled(model: nn.Module) -> bool:
    """Whether calling a model runs what `torch.compile` has made of it, of its forward or of one of its modules."""
    return any(
        module.__dict__.get("_compiled_call_impl") is not None
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def require_cache(model: PreTrainedModel) -> None:
    """Refuse models that take no cache.

    Raises:
        ValueError: as `require_reusable_model` does, and for a model whose forward takes no cache.
    """
    require_reusable_model(model)
    reason = no_cache_reason(model)
    if reason is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be given a cache: {reason}. Use it without a ChunkReuseCache."
        )


def _not_a_model(found: object) -> str:
    start = f"`model` must be a transformers PreTrainedModel, got {type(found).__name__}. "
    if getattr(getattr(found, "active_peft_config", None), "is_prompt_learning", False):
        return start + (
            "Prompt learning is not supported: its virtual tokens are no part of the prompt. Use it without a "
            "ChunkReuseCache."
        )
    inner = {"get_base_model": "get_base_model()", "_orig_mod": "_orig_mod", "module": "module"}
    remedy = next((f": model.{way}" for name, way in inner.items() if hasattr(found, name)), "")
    return f"{start}Pass the transformers model itself, not a wrapper around it{remedy}."


def no_cache_reason(model: PreTrainedModel) -> str | None:
    """Why a model cannot be given a cache, or None."""
    if not cache_argument(model):
        return "its forward takes none"
    if model.config.model_type.startswith("musicgen"):
        return "its own generate() runs only the last token of a prompt once a cache holds anything"
    return None


def cache_layers(model: PreTrainedModel) -> list[Any]:
    """The empty cache layers that transformers makes for `model`."""
    return list(DynamicCache(config=model.config.get_text_config(decoder=True)).layers)


def layer_forms(model: PreTrainedModel) -> tuple[Hashable, ...]:
    """What tells the kinds of cache layers of `model` apart: another one for another configuration."""
    return forms_of(cache_layers(model))


def forms_of(layers: Iterable[Any]) -> tuple[Hashable, ...]:
    """What tells the kinds of layers of transformers apart."""
    sizes = ("sliding_window", "number_of_states")
    return tuple((type(layer), *[getattr(layer, name, None) for name in sizes]) for layer in layers)


def has_own_cache(model: PreTrainedModel) -> bool:
    """Whether the model requires a cache class of its own."""
    supports: Any = model._supports_default_dynamic_cache
    return not supports()


def needs_positions(model: PreTrainedModel) -> bool:
    """Whether a forward over a later part of a text must be given positions, as generate() gives them.

    Without, some models count on from their last prompt, whose shift they keep, and Bamba counts from 0 again.
    """
    return position_planes(model) is not None or model.config.model_type == "bamba"


def position_planes(model: PreTrainedModel) -> Callable[..., torch.Tensor | None] | None:
    """Computes the positions [planes, batch, tokens] of a model whose positions have several dimensions, else None."""
    return getattr(model.base_model, "compute_3d_position_ids", None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, in order; empty if they cannot be found."""
    config: Any = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if len(lists) > 1:  # one of them may be that of an encoder of images
        owner: Any = model
        lists = [module for module in owner.get_decoder().modules() if any(module is found for found in lists)]
        towers = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.main_input_name != "input_ids"]
        foreign = {id(module) for tower in towers if tower is not model for module in tower.modules()}
        lists = [module for module in lists if id(module) not in foreign] or lists
    return list(lists[0]) if lists else []


def text_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """The part of a model that computes the hidden states which its head takes; None if it cannot be told."""
    owner: Any = model
    for inner in (owner.get_decoder(), owner.base_model, getattr(owner, "model", None)):
        if isinstance(inner, PreTrainedModel) and inner is not model:
            head: Any = inner.get_output_embeddings
            return inner if head() is None else text_model(inner)
    return None


def kv_sources(model: PreTrainedModel, has_kv: Sequence[bool]) -> list[int]:
    """For each layer, the index of the layer whose keys and values it attends to.

    A layer without any shares those of the last layer of its type before it.

    Args:
        model: The model.
        has_kv: Whether each layer has keys and values of its own.
    """
    config: Any = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or [None] * len(has_kv)
    found: list[int] = []
    for idx, own in enumerate(has_kv):
        before = [i for i in range(idx) if has_kv[i] and types[i] == types[idx]]
        found.append(idx if own or not before else before[-1])
    return found


def reads_shared_kv(config: Any) -> bool:
    """Whether a configuration is that of a draft that reads its target's K/V, and has none (Gemma 4's assistants)."""
    return getattr(config, "model_type", None) in ("gemma4_assistant", "gemma4_unified_assistant")


def embedding_table(model: PreTrainedModel) -> torch.Tensor:
    """The table of the input embeddings, [ids, width]; somebody's own module may stand around it, or have none."""
    embeddings = model.get_input_embeddings()
    for module in embeddings.modules():
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor):
            return weight
    return torch.empty(model.config.get_text_config(decoder=True).vocab_size, 0, device=model.device)


def input_device(model: PreTrainedModel) -> torch.device:
    """The device of token ids: that of the embeddings, or the one accelerate loads them to."""
    embeddings: Any = model.get_input_embeddings()
    weight = embeddings.weight if isinstance(embeddings, nn.Embedding) else embedding_table(model)
    if not weight.is_meta:
        return weight.device
    hook: Any = getattr(embeddings, "_hf_hook", None)
    return torch.device(getattr(hook, "execution_device", None) or "cpu")


def require_known_ids(model: PreTrainedModel, ids: NDArray[np.int64], what: str) -> None:
    """Refuse `ids`, named `what`, for which the model has no embeddings: looking them up would end a GPU's process.

    Ids that the configuration names, such as those in place of images, may be any numbers, as may all of them where
    somebody's own module or hook reads them.
    """
    embeddings: Any = model.get_input_embeddings()
    # A part of the weight may be here only (tp_plan); the module's own number may be that of an earlier weight.
    known = max(getattr(embeddings, "num_embeddings", 0), len(embedding_table(model)))
    if not ids.size or (ids.min() >= 0 and ids.max() < known):
        return
    named = {value for name, value in model.config.to_dict().items() if "token" in name and isinstance(value, int)}
    unknown = sorted(set(ids[(ids < 0) | (ids >= known)].tolist()) - named)
    if unknown and isinstance(embeddings, nn.Embedding) and not embeddings._forward_pre_hooks:
        raise ValueError(
            f"{what} must be from 0 to {known - 1}, for which {type(model).__name__} has embeddings, got "
            f"{unknown[-1]}. Tokenize with the tokenizer of the model."
        )


def available_device(device: torch.device | str) -> torch.device:
    """The device of this name.

    Raises:
        ValueError: the device does not exist.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found).tolist()  # which a device without numbers, "meta", refuses
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:  # each backend has its own
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"`device` must be one that PyTorch can use here, got {str(device)!r}: {why}. Pass 'cpu', or a device "
            "that this machine and this build of PyTorch have."
        ) from error
    return found


def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of K/V per token, of layers that keep any: a lower bound if they differ, 0 if unknown."""
    return kv_bytes_per_token(model.config, model.dtype)


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """As `bytes_per_token`, from a configuration and a dtype."""
    layers = layer_configs(config)
    try:
        kinds = [type(layer).__name__ for layer in DynamicCache(config=config.get_text_config(decoder=True)).layers]
    except (AttributeError, KeyError, TypeError, ValueError):  # transformers makes no cache for it
        kinds = []
    if 0 < len(kinds) <= len(layers):  # before 5.24 without the last layers where they have the K/V of others
        layers = [layer for layer, kind in zip(layers, kinds, strict=False) if kind not in _WITHOUT_KV]
    return sum(map(_kv_elements, layers)) * dtype.itemsize


def layer_configs(config: PreTrainedConfig) -> list[Any]:
    """The configuration of each decoder layer; empty if their number is unknown."""
    text: Any = config.get_text_config(decoder=True)
    layers: Any = getattr(text, "per_layer_config", None) or [text] * int(getattr(text, "num_hidden_layers", 0))
    return [layers[index] for index in range(len(layers))]


def head_widths(config: PreTrainedConfig) -> set[int]:
    """Numbers in a head's key of one token, of all layers."""
    return {
        getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in layer_configs(config)
    }


def _kv_elements(config: Any) -> int:
    """Elements of K/V of one layer for one token, 0 if unknown."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    if getattr(config, "multi_query", False):
        heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * heads * int(head_dim)


_LOADERS: tuple[tuple[Any, Any], ...] = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
)
_LOADERS_OF_PAIRS: tuple[tuple[Any, Any], ...] = (  # of an encoder and a decoder
    (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    (AutoModelForSpeechSeq2Seq, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING),
)


def loader_of(config: PreTrainedConfig) -> Any:
    """The class whose `from_pretrained()` and `from_config()` make a decoder of text with a configuration.

    That is `AutoModelForCausalLM`, or a class for models that take media where only that one has it.

    Raises:
        ValueError: there is no such class.
    """
    found = _generating(config)
    if found is None:
        raise ValueError(f"A model of the type {config.model_type!r} {_why_not(config)}")
    return found[0]


def loader_of_pair(config: PreTrainedConfig) -> Any:
    """The class that loads an encoder-decoder.

    Raises:
        ValueError: there is no such class.
    """
    found = _pair(config)
    if found is None:
        raise ValueError(
            f"A model of the type {config.model_type!r} is no encoder-decoder. Choose one, such as "
            "T5ForConditionalGeneration."
        )
    return found[0]


def require_generates(model: PreTrainedModel) -> None:
    """Refuse models that cannot generate text.

    Raises:
        ValueError: it cannot, or a part does it in its place; the message names the class or the part that can, if
            there is one.
    """
    if not hasattr(model, "can_generate"):
        raise ValueError(_not_a_model(model))
    name = type(model).__name__
    if model.can_generate():
        kind: Any = type(model)
        if _called(kind) and (parts := _parts_that_generate(model)):
            names = " and ".join(f"model.{part}" for part in parts)
            raise ValueError(f"generate() of {name} calls that of a part of it. Pass {names} in place of the model.")
        return
    found = _generating(model.config)
    if found is None:
        raise ValueError(f"{name} {_why_not(model.config)}")
    loader, kind = found
    raise ValueError(
        f"{name} cannot generate text. Load the same weights as {kind}: {loader.__name__}.from_pretrained(NAME)."
    )


def _parts_that_generate(model: PreTrainedModel) -> list[str]:
    """Names of the parts whose generate() a model's own one calls in place of going on with transformers' loop."""
    kind: Any = type(model)
    parts = [(name, model._modules.get(name)) for name in _called(kind)]
    return [name for name, part in parts if isinstance(part, PreTrainedModel) and part.can_generate()]


@cache
def _called(kind: Any) -> tuple[str, ...]:
    """What the generate() of a class names, if that is its own and calls another one than that of its bases."""
    if kind.generate is GenerationMixin.generate:
        return ()
    function: Any = inspect.unwrap(kind.generate)
    names: tuple[str, ...] = function.__code__.co_names if inspect.isfunction(function) else ()
    return names if "generate" in names and "super" not in names else ()


def _generating(config: PreTrainedConfig) -> tuple[Any, str] | None:
    """The class that loads a decoder of text, and the name of what it makes; None if there is none."""
    if config.is_encoder_decoder or _is_encoder(config):
        return None
    for loader, mapping in _LOADERS:
        kind = mapping.get(type(config), None)
        own = (getattr(config, "auto_map", None) or {}).get(loader.__name__)  # code beside the weights
        if kind is not None or own is not None:
            kind = kind[0] if isinstance(kind, tuple) else kind
            return loader, str(own).rpartition(".")[2] if kind is None else kind.__name__
    return None


def _pair(config: PreTrainedConfig) -> tuple[Any, Any] | None:
    """The class that loads an encoder-decoder, and the class that it makes; None for any other model."""
    kinds = ((loader, mapping.get(type(config), None)) for loader, mapping in _LOADERS_OF_PAIRS)
    return next(((loader, kind) for loader, kind in kinds if kind is not None), None)


def _is_encoder(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of an encoder, for which a class of decoders would be wrong."""
    return getattr(config, "is_decoder", None) is False and type(config) in MODEL_FOR_MASKED_LM_MAPPING


def _why_not(config: PreTrainedConfig) -> str:
    if (pair := _pair(config)) is not None:
        name = pair[1].__name__
        return f"is no decoder of text alone. Load it as {name}, an encoder-decoder, and use it without reuse."
    if config.is_encoder_decoder:
        return "is an encoder-decoder. Load it with the class that its card names, and use it without reuse."
    why = "is an encoder" if _is_encoder(config) else "has no class in transformers that generates text"
    return f"cannot generate text: it {why}. Choose a decoder, such as LlamaForCausalLM or another ...ForCausalLM."


MaskForm = Literal["compact", "bool", "additive"]

_MAPPINGS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)


def attn_implementation(model: PreTrainedModel) -> str:
    """The attention implementation of the decoder, as transformers names it."""
    config: Any = model.config.get_text_config(decoder=True)
    return str(config._attn_implementation)


def attention_function(model: PreTrainedModel) -> Callable[..., Any] | None:
    """The function that computes the decoder's attention; None if transformers does not look it up by name."""
    found: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(attn_implementation(model))
    return found


def mask_form(config: Any) -> MaskForm:
    """The form of mask that a registered attention can ask for, for models with this configuration.

    Returns:
        `"compact"` if models pass their attention all but padding, as FlashAttention needs it: causal or not, and the
        window. `"bool"` if they call a registered attention with less than that. `"additive"` if they may compute
        attention themselves, or are unknown.
    """
    found: MaskForm = _form(type(config))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it cannot trace `_form_of`
def _form(config: Any) -> MaskForm:
    return _form_of(config)


@cache
def _form_of(config: Any) -> MaskForm:
    classes: list[Any] = [mapping.get(config, None) for mapping in _MAPPINGS]
    flat: list[Any] = [each for found in classes for each in (found if isinstance(found, tuple) else (found,)) if each]
    if flat and all(each._supports_flash_attn for each in flat):
        return "compact"
    takes_bool = flat and all(each._supports_attention_backend and each._supports_sdpa for each in flat)
    return "bool" if takes_bool else "additive"
