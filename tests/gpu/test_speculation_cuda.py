"""Drafts for a target with streamed layers on a CUDA device."""

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvboost_hf import ChunkReuseCache, StreamingConfig, load_assistant, speculation_stats, stream_layers
from tests.conftest import as_inputs, counted, random_ids
from tests.gpu.device import DEVICE, ON_GPU

LAYERS, NEW = 8, 40


def make(layers: int) -> Any:
    """The first layers of a model; all but the first one say little, so that a short one drafts well."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.1,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers, model.config.layer_types = layers, model.config.layer_types[:layers]
    return model


def test_tokens_of_a_streamed_target() -> None:
    """Those of plain generate(), in fewer passes, in float32."""
    whole, target = make(LAYERS).to(DEVICE), make(LAYERS)
    stream_layers(target, StreamingConfig(residency_mode="full_stream"), device=DEVICE)
    draft = load_assistant(make(2).to(DEVICE), target=target)
    cache, passes, tokens = ChunkReuseCache(target), 0, 0
    for seed in range(4 if ON_GPU else 1):
        inputs = as_inputs(random_ids(60, seed).to(DEVICE))
        told = {**inputs, "max_new_tokens": NEW, "do_sample": False}
        wanted = whole.generate(**told)
        assert torch.equal(target.generate(**told), wanted)
        for kept in (None, cache):
            with counted(target) as work:
                found = target.generate(**told, assistant_model=draft, past_key_values=kept)
            assert torch.equal(found, wanted)
            passes, tokens = passes + work.calls, tokens + NEW
    assert passes < tokens / 1.5
    stats = speculation_stats(draft)
    assert stats.committed + 8 >= tokens  # one that is left to an answer is not drafted
    assert stats.verify_s > 0
    assert stats.rollback_s > 0
