"""Tiny models that draft by multi-token-prediction layers of their own, as `generate(use_mtp=True)` runs them."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.architectures import make_architecture

# Families whose configurations of transformers 5.24 know such layers, and some whose checkpoints have them.
FAMILIES = (
    "glm4_moe",
    "deepseek_v3",
    "sarvam_moe",
    "sarvam_mla",
    "mellum",
    "ernie4_5_moe",
    "exaone_moe",
    "mimo_v2_flash",
)


def make_target(family: str, layers: int = 1) -> PreTrainedModel:
    """A tiny model whose text follows from its last token and, a little, from what is before it."""
    model = make_architecture(family)
    config: Any = model.config
    config.num_mtp_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = [config.layer_types[-1]] * layers
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = [config.mlp_layer_types[-1]] * layers
    decoder: Any = model.get_decoder()
    for layer in decoder.layers:
        _dampen(layer)
    return model


def use_layers(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> MtpModel:
    """Have generate() draft by layers that continue a text much as `model` does, and need its hidden states for it."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        heads = MtpModel(model, model.config.get_text_config().num_mtp_layers).eval()
        width = heads.config.hidden_size
        decoder: Any = model.get_decoder()
        for layer in heads.layers:
            layer.post_norm.weight.data = decoder.norm.weight.data.clone()
            _dampen(layer.mtp_block)
            layer.eh_proj.weight.data = torch.cat([torch.eye(width), 0.2 * torch.eye(width)], dim=1)
    heads.tie_with_main_model(model)
    monkeypatch.setattr(MtpModel, "from_pretrained", classmethod(lambda cls, main, **kwargs: heads))
    return heads


def _dampen(layer: torch.nn.Module) -> None:
    for name, parameter in layer.named_parameters():
        if name.endswith(("o_proj.weight", "dense.weight", "down_proj.weight", "down_proj")):
            parameter.data *= 0.02
