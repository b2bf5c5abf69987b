"""Tiny models with every kind of rotary embedding, and how far from their own keys a rotated one may be."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from transformers import DynamicCache, PreTrainedModel

from tests.conftest import _COMMON
from tests.internals.compat import LayerRotation

LIMIT = 600  # the original length of those whose frequencies depend on it
_ROPE: dict[str, Any] = {"rope_theta": 10_000.0}
_SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 1.3, 1.7, 2.0, 3.0, 4.0, 6.0, 8.0],
    },
}


def _llama(kind: str) -> PreTrainedModel:
    sizes = {**_COMMON, "max_position_embeddings": LIMIT} if kind == "dynamic" else _COMMON
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, rope_parameters={**_ROPE, **_SCALED[kind]}))


def _partial(share: float) -> dict[str, Any]:
    return {"rope_parameters": {**_ROPE, "rope_type": "default", "partial_rotary_factor": share}}


_FOUR_LAYERS: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
}

KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    **{kind: lambda kind=kind: _llama(kind) for kind in _SCALED},
    "partial (phi)": lambda: tf.PhiForCausalLM(tf.PhiConfig(**{**_COMMON, "num_key_value_heads": 4}, **_partial(0.5))),
    "partial (stablelm)": lambda: tf.StableLmForCausalLM(tf.StableLmConfig(**_COMMON, **_partial(0.25))),
    "partial, interleaved (glm)": lambda: tf.GlmForCausalLM(tf.GlmConfig(**_COMMON, head_dim=16, **_partial(0.5))),
    "interleaved (cohere)": lambda: tf.CohereForCausalLM(tf.CohereConfig(**_COMMON)),
    "interleaved, from a table (gptj)": lambda: tf.GPTJForCausalLM(
        tf.GPTJConfig(vocab_size=200, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, initializer_range=0.2)
    ),
    "by layer type (gemma3)": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_FOUR_LAYERS, head_dim=16)),
    "no positions in some layers (smollm3)": lambda: tf.SmolLM3ForCausalLM(
        tf.SmolLM3Config(**{**_COMMON, "num_hidden_layers": 4}, no_rope_layers=[1, 1, 1, 0])
    ),
    "none in full layers, interleaved (cohere2)": lambda: tf.Cohere2ForCausalLM(tf.Cohere2Config(**_FOUR_LAYERS)),
    "the other way round (nanochat)": lambda: tf.NanoChatForCausalLM(tf.NanoChatConfig(**_COMMON)),
}
# Positions that the frequencies, or a table, are good for.
LIMITS = {"dynamic": LIMIT, "longrope": LIMIT, "interleaved, from a table (gptj)": 2048}


def make_rotary(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny random model in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return KINDS[kind]().eval().to(dtype)


@torch.no_grad()
def computed(model: PreTrainedModel, ids: torch.Tensor, *starts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, [starts, heads, tokens, dim], of the same ids at several positions."""
    cache = DynamicCache(config=model.config)
    positions = torch.tensor(starts)[:, None] + torch.arange(ids.shape[1])
    model(input_ids=ids.expand(len(starts), -1), position_ids=positions, past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


def pair_sizes(rotation: LayerRotation, keys: torch.Tensor) -> torch.Tensor:
    """The length of the pair that each element of [..., head_dim] belongs to, or of itself where it does not turn."""
    keys = keys.double()
    sizes, pairs = keys.abs(), rotation.inv_freq.numel()
    turning = keys[..., rotation.offset : rotation.stop]
    if rotation.style == "half":
        sizes[..., rotation.offset : rotation.stop] = turning.unflatten(-1, (2, pairs)).norm(dim=-2).tile(2)
    else:
        sizes[..., rotation.offset : rotation.stop] = (
            turning.unflatten(-1, (pairs, 2)).norm(dim=-1).repeat_interleave(2, -1)
        )
    return sizes


def rotated_bound(dtype: torch.dtype) -> float:
    """What `rotate` may be off by, as a share of a pair's size.

    Cosine and sine are rounded (half a unit), their products, and the sum: 3 halves of a float32 unit, as |a cos| +
    |b sin| <= the pair's size. One more for terms of second order. Then the result is rounded to the keys' dtype.
    """
    once = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    return 4 * torch.finfo(torch.float32).eps / 2 + once


def computed_bound(rotation: LayerRotation, dtype: torch.dtype, old: int, new: int) -> torch.Tensor:
    """What a rotated key may differ by from the model's own one, for each of the rotated dimensions.

    A model rounds cosine, sine, products and sum in its own dtype: 3 halves of a unit for either key, the first of
    which then turns (twice a root of 2). Before, it rounds position times frequency in float32: angles are off by up
    to half a unit of theirs. Then the float32 cosine itself, the attention factor, and `rotate`.
    """
    half, half32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    angles = rotation.inv_freq.double().abs() * (abs(old) + abs(new)) * half32
    bound = angles + 3 * (2**0.5 + 1) * half + 8 * half32 + rotated_bound(dtype)
    return bound.tile(2) if rotation.style == "half" else bound.repeat_interleave(2)


def off(rotation: LayerRotation, found: torch.Tensor, expected: torch.Tensor, bound: float | torch.Tensor) -> float:
    """The largest difference of keys, in bounds: up to 1 is rounding. What does not turn must be the same."""
    difference = (found.double() - expected.double()).abs() / pair_sizes(rotation, expected)
    return float((difference[..., rotation.offset : rotation.stop] / bound).max())
