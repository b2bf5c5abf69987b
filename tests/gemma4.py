"""Tiny models of Gemma 4, and assistants that know their texts."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedTextConfig,
)

from tests.conftest import VOCAB

WINDOW = 24
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}
_ALONE: dict[str, Any] = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
# A Gemma 4, one whose last layers share the K/V of those before, and one of the unified kind.
KINDS: dict[str, Any] = {
    "text": (Gemma4TextConfig, _ALONE, Gemma4AssistantConfig),
    "shares": (
        Gemma4TextConfig,
        {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
        Gemma4AssistantConfig,
    ),
    "unified": (Gemma4UnifiedTextConfig, {}, Gemma4UnifiedAssistantConfig),
}


def make_target(kind: str = "text", **changes: Any) -> Any:
    """A model whose text follows from its last token and, a little, from what is before it."""
    config, own, _ = KINDS[kind]
    types = ["sliding_attention", "full_attention"]
    given = {**_SIZES, **own, "num_hidden_layers": 4, "layer_types": 2 * types, "tie_word_embeddings": False}
    return _made(config(**{**given, **changes}), seed=0)


def make_assistant(target: Any, kind: str = "text", *, backbone: int | None = None, **changes: Any) -> Any:
    """An assistant that continues a text much as `target` does."""
    config, own, made = KINDS[kind]
    types = ["sliding_attention", "full_attention"]
    own = _ALONE if own else {}
    text = config(**{**_SIZES, **own, "num_hidden_layers": 2, "layer_types": types, **changes})
    draft = _made(made(text_config=text, backbone_hidden_size=backbone or 32), seed=1)
    draft.generation_config.num_assistant_tokens = 4
    if draft.lm_head.weight.shape == target.lm_head.weight.shape and not backbone:
        eye = torch.eye(32)
        draft.pre_projection.weight.data = torch.cat([eye, 0.2 * eye], dim=1)
        draft.post_projection.weight.data = eye.clone()
        draft.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.data.clone())
        draft.model.norm.weight.data = target.get_decoder().norm.weight.data.clone()
    return draft


def _made(config: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if ".post_" in name and name.endswith("norm.weight"):
            parameter.data *= 0.1
        elif name.endswith("embed_tokens.weight"):
            parameter.data *= 10
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model
