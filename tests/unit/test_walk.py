"""What a walk through a model finds is the same whether it reads every attribute or what it noted of the modules."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.internals.cache import Found, ModelWalk, _Walk


@pytest.fixture
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8
    )
    return LlamaForCausalLM(config).eval()


def _attention(model: Any) -> nn.Module:
    found: nn.Module = model.model.layers[1].self_attn
    return found


def _rename(model: Any) -> None:
    module = _attention(model)
    module.gate = module.__dict__.pop("scaling")


def _equal_parameter(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().clone())


def _other_class(model: Any) -> None:
    class Own(type(model.model.norm)):
        pass

    model.model.norm.__class__ = Own


def _own_config(model: Any) -> None:
    _attention(model).config = LlamaConfig(vocab_size=32, rms_norm_eps=0.5)  # type: ignore[assignment]


def _write_to_own_config(model: Any) -> None:
    model.config.rms_norm_eps = 0.25


def _packed_parameter(model: Any) -> None:
    class Packed(nn.Parameter):
        pass

    packed = Packed(model.lm_head.weight.detach().clone())
    packed.scales = torch.ones(4)  # type: ignore[attr-defined]
    model.lm_head.weight = packed


def _exchange(model: Any) -> None:
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def _append_to_list(model: Any) -> None:
    model.kept.append(3)


_EDITS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "a number": lambda model: setattr(_attention(model), "scaling", 0.5),
    "True in place of 1": lambda model: setattr(_attention(model), "groups", True),
    "a number of another type": lambda model: setattr(_attention(model), "attention_dropout", 0),
    "a new attribute": lambda model: setattr(_attention(model), "extra", 7),
    "an attribute deleted": lambda model: delattr(_attention(model), "is_causal"),
    "an attribute renamed": _rename,
    "an equal parameter": _equal_parameter,
    "a bias in place of None": lambda model: setattr(_attention(model).q_proj, "bias", nn.Parameter(torch.zeros(16))),
    "a new buffer": lambda model: _attention(model).register_buffer("late", torch.ones(2)),
    "a tensor as attribute": lambda model: model.model.norm.__dict__.update(bias=torch.ones(16)),
    "a meta parameter": lambda model: setattr(
        model.lm_head, "weight", nn.Parameter(torch.empty(32, 16, device="meta"))
    ),
    "a parameter of another kind": _packed_parameter,
    "another child": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU()),
    "children exchanged": _exchange,
    "a layer less": lambda model: model.model.layers.__delitem__(1),
    "another class": _other_class,
    "training": lambda model: model.model.layers[1].train(),
    "a hook": lambda model: _attention(model).register_forward_hook(lambda *given: None),
    "a forward": lambda model: setattr(_attention(model), "forward", lambda *given: None),
    "another configuration": _own_config,
    "a value of the configuration": _write_to_own_config,
    "a value in a list": _append_to_list,
    "another list": lambda model: setattr(model, "kept", [1, 2, 4]),
    "frequencies that vary": lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"),
}


def _shown(found: Found) -> tuple[Any, ...]:
    parts = [part for part in found.parts if not _is_watch(part)]
    return list(map(id, found.tensors)), found.switches, list(map(id, parts)), found.in_training, found.files


def _is_watch(part: Any) -> bool:
    return type(getattr(part, "__self__", None)).__name__ == "HookWatch"


@pytest.mark.parametrize("edit", _EDITS)
def test_an_edit_is_found(model: LlamaForCausalLM, edit: str) -> None:
    model.kept = [1, 2]  # type: ignore[assignment]
    _attention(model).groups = 1  # type: ignore[assignment]
    walk = ModelWalk()
    before = _shown(walk.look(model))
    assert walk._layout is not None  # else nothing is tested
    _EDITS[edit](model)
    now = _shown(walk.look(model))
    assert now == _shown(_Walk(model).complete(model))
    assert repr(now) == repr(_shown(_Walk(model).complete(model)))  # True and 1 are equal, and not the same
    assert (repr(now) == repr(before)) == (edit == "nothing")
    assert _shown(walk.look(model)) == now


def test_a_layout_keeps_nothing_alive(model: LlamaForCausalLM) -> None:
    walk = ModelWalk()
    walk.look(model)
    alive: list[bool] = []
    weakref.finalize(model.lm_head.weight, alive.append, False)
    weakref.finalize(model.model.norm, alive.append, False)
    del model.lm_head, model.model.norm
    assert alive == [False, False]
