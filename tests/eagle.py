"""Tiny EAGLE-3 heads in files as the field has them, and targets whose text they know."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from tests.conftest import VOCAB

DRAFTED = 150  # tokens of the vocabulary of the heads
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}
TARGETS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES),
    "gemma2": lambda: Gemma2Config(**_SIZES, sliding_window=32, tie_word_embeddings=False),
}


def make_target(kind: str = "llama") -> Any:
    """A model whose text follows from its last token and, a little, from what is before it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(TARGETS[kind]()).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data *= 0.3
        elif name.endswith("embed_tokens.weight"):
            parameter.data *= 20
    return model


def weights_of(target: PreTrainedModel, drafted: int = DRAFTED) -> dict[str, torch.Tensor]:
    """Weights of heads that continue a text much as `target` does, and need its hidden states for it."""
    model: Any = target
    width, eye, none = 64, torch.eye(64), torch.zeros(64, 64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        known = torch.randperm(VOCAB)[:drafted].sort().values
    scale = 1.0 if "Gemma" not in type(target).__name__ else width**0.5  # its embeddings are multiplied by it
    norm = model.get_decoder().norm.weight.data
    norm = norm + 1 if scale > 1 else norm
    return {
        "fc.weight": torch.cat([none, none, 0.1 * eye], dim=1),
        "midlayer.self_attn.q_proj.weight": 3.0 * torch.cat([eye, none], dim=1),
        "midlayer.self_attn.k_proj.weight": 3.0 * torch.cat([eye, none], dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat([eye, none], dim=1),
        "midlayer.self_attn.o_proj.weight": eye.clone(),
        "midlayer.mlp.gate_proj.weight": torch.full((96, 64), 0.001),
        "midlayer.mlp.up_proj.weight": torch.full((96, 64), 0.001),
        "midlayer.mlp.down_proj.weight": torch.full((64, 96), 0.001),
        "midlayer.input_layernorm.weight": torch.ones(64),
        "midlayer.hidden_norm.weight": torch.ones(64),
        "midlayer.post_attention_layernorm.weight": torch.ones(64),
        "norm.weight": norm.clone(),
        "lm_head.weight": model.get_output_embeddings().weight.data[known].clone(),
        "d2t": known - torch.arange(drafted),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known, True),
    }


def save_heads(folder: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Write heads in files, as the repositories of the field have them."""
    config = {
        **_SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "draft_vocab_size": DRAFTED,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in weights.items()}, folder / "model.safetensors")
    return folder
