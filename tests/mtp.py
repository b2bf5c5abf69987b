"""Tiny models that draft by multi-token-prediction layers of their own, as `generate(use_mtp=True)` runs them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.architectures import make_architecture
from tests.architectures.models import classes_of

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
        for name, tensor in [*heads.layers.named_parameters(), *heads.layers.named_buffers()]:
            if tensor.ndim > 1:
                tensor.data.normal_(std=0.02)
            else:
                tensor.data.fill_("norm" in name)
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


def save_with_layers(family: str, folder: Path) -> PreTrainedModel:
    """Save a tiny model with a multi-token-prediction layer in its files, and load it as anybody would."""
    _, model_class = classes_of(family)
    deeper = make_architecture(family)
    config: Any = deeper.config
    kept = config.num_hidden_layers - 1  # the last layer becomes that of the draft
    weights = {name: tensor.contiguous() for name, tensor in _saved(deeper, folder).items()}
    width = config.hidden_size
    last = f"model.layers.{kept}."
    weights[last + "eh_proj.weight"] = torch.cat([torch.eye(width), 0.2 * torch.eye(width)], dim=1)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{last}{name}.weight"] = torch.ones(width)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    told |= {"num_hidden_layers": kept, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_class, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{kept}.*"])
        model: Any = model_class.from_pretrained(folder).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{kept}.*"]  # names the layers of the real sizes
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def _saved(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")
