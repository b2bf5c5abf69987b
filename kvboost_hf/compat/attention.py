"""Looks up the attention implementation of a model, and the form of masks that its code passes to it."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
)

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
