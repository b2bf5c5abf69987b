"""Which class of transformers generates text with a configuration, or why none does."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)

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
        ValueError: it cannot; the message names the class that can, if there is one.
    """
    if model.can_generate():
        return
    found, name = _generating(model.config), type(model).__name__
    if found is None:
        raise ValueError(f"{name} {_why_not(model.config)}")
    loader, kind = found
    raise ValueError(
        f"{name} cannot generate text. Load the same weights as {kind}: {loader.__name__}.from_pretrained(NAME)."
    )


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
