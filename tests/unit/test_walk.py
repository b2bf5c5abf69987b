"""What a walk through a model finds is the same whether it reads every attribute or what it noted of the modules."""

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.internals.cache import ModelParts, ModelState, ModelWalk, Walk, _are_counted, _counts, hooks_of_all_modules

pytestmark = pytest.mark.daily


def make() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8
    )
    model = LlamaForCausalLM(config).eval()
    _attention(model)._kernel_funcs = {"rotary": Rotary()}  # type: ignore[assignment]
    return model


class Rotary(nn.Module):
    """A function that is no child of its module, as where the package `kernels` may replace it."""

    scale = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids * self.scale


@pytest.fixture
def model() -> LlamaForCausalLM:
    return make()


def _attention(model: Any) -> nn.Module:
    found: nn.Module = model.model.layers[1].self_attn
    return found


def _function(model: Any) -> Any:
    return _attention(model)._kernel_funcs["rotary"]  # type: ignore[index]


def _replace_function(model: Any) -> None:
    class Other(Rotary):
        pass

    vars(_attention(model))["_kernel_funcs"]["rotary"] = Other()


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
    "a function": _replace_function,
    "a function less": lambda model: _attention(model)._kernel_funcs.clear(),
    "a forward of a function": lambda model: setattr(_function(model), "forward", torch.neg),
    "a number of a function": lambda model: setattr(_function(model), "scale", 2.0),
    "another configuration": _own_config,
    "a value of the configuration": _write_to_own_config,
    "a value in a list": _append_to_list,
    "another list": lambda model: setattr(model, "kept", [1, 2, 4]),
    "frequencies that vary": lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"),
}


def _shown(found: ModelParts) -> tuple[Any, ...]:
    parts = [part for part in found.parts if not _is_watch(part)]
    return list(map(id, found.tensors)), found.switches, list(map(id, parts)), found.in_training, found.files


def _is_watch(part: Any) -> bool:
    return type(getattr(part, "__self__", None)).__name__ == "HookWatch"


@pytest.mark.parametrize("edit", _EDITS)
def test_an_edit_is_found(model: LlamaForCausalLM, edit: str) -> None:
    model.kept = [1, 2]  # type: ignore[assignment]
    _attention(model).groups = 1  # type: ignore[assignment]
    walk = ModelWalk()
    found = walk.look(model)
    before, flags = _shown(found), list(found.flags)
    assert walk._layout is not None  # else nothing is tested
    assert walk._still is not None or not _are_counted()
    _EDITS[edit](model)
    found = walk.look(model)
    assert found.is_same == (edit == "nothing" and _are_counted())
    now = _shown(found)
    assert edit != "a number" or found.flags == flags  # K/V are not arranged by it
    assert now == _shown(Walk(model).complete(model))
    assert repr(now) == repr(_shown(Walk(model).complete(model)))  # True and 1 are equal, and not the same
    assert (repr(now) == repr(before)) == (edit == "nothing")
    assert _shown(walk.look(model)) == now


def test_a_forward_over_a_hook_of_accelerate_is_found(model: LlamaForCausalLM) -> None:
    """The function that accelerate puts in place of the forward only moves tensors; another one may do anything."""
    add_hook_to_module(_attention(model), AlignDevicesHook())
    walk = ModelWalk()
    before = _shown(walk.look(model))
    _attention(model).forward = _doubled
    assert _shown(walk.look(model)) != before


def test_a_model_of_one_module() -> None:
    model: Any = nn.Linear(2, 2)
    walk = ModelWalk()
    before = _shown(walk.look(model))
    model.scale = 0.5
    assert _shown(walk.look(model)) != before
    assert _shown(walk.look(model)) == _shown(Walk(model).complete(model))


_where_counted = pytest.mark.skipif(
    sys.implementation.name != "cpython" or sys.version_info[:2] > (3, 13), reason="changes of dicts are not counted"
)


@_where_counted
def test_changes_of_dicts_are_counted() -> None:
    assert _are_counted.__wrapped__()


@pytest.mark.daily
@_where_counted
@pytest.mark.parametrize(("changes", "counted"), [([1, 2, 3], True), ([1, 2, None], False), ([1], False), ([], False)])
def test_each_of_several_changes_counts(changes: list[int | None], counted: bool) -> None:
    """One that the number of a dict does not tell is enough for no number to be trusted."""

    def run() -> Iterator[Any]:
        changed = dict[str, int]()
        for value in changes:
            changed |= {"value": value} if value is not None else {}
            yield changed

    assert _counts(run) == counted


def _other_dict(model: Any) -> None:
    norm = model.model.norm
    norm.__dict__ = {**norm.__dict__, "variance_epsilon": 0.5}


def _other_group(model: Any) -> None:
    norm = model.model.norm
    norm.__dict__["_parameters"] = {"weight": nn.Parameter(torch.ones(16))}


def _by_a_dict(model: Any) -> None:
    vars(_attention(model))["scaling"] = 0.5


def _doubled(*given: Any, **kwargs: Any) -> Any:
    return 2 * torch.relu(given[0])


_PATCHES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "another __dict__": lambda model, patch: _other_dict(model),
    "another dict of parameters": lambda model, patch: _other_group(model),
    "past __setattr__": lambda model, patch: _by_a_dict(model),
    "a value in a dict of the configuration": lambda m, patch: m.config.rope_parameters.update(rope_theta=3.0),
    "a value in a list of the configuration": lambda m, patch: m.config.eos_token_id.append(3),
    "a forward of a class": lambda m, patch: patch.setattr(type(_attention(m)), "forward", _doubled),
    "a method of a class": lambda m, patch: patch.setattr(type(m.model.norm), "extra_repr", _doubled),
    "a method of nn.Module": lambda m, patch: patch.setattr(nn.Module, "__call__", _doubled),
    "a new method of a class": lambda m, patch: patch.setattr(type(m.model), "late", _doubled, raising=False),
    "a function of PyTorch": lambda m, patch: patch.setattr(nn.functional, "silu", _doubled),
    "a function of the modeling file": lambda m, patch: patch.setattr(
        sys.modules[type(m).__module__], "apply_rotary_pos_emb", _doubled
    ),
    "an attention": lambda m, patch: patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", _doubled),
    "an attention for all": lambda m, patch: patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _doubled),
    "masks": lambda m, patch: patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", _doubled),
    "another attention": lambda m, patch: m.set_attn_implementation("eager"),
    "a hook of all modules": lambda m, patch: patch.setitem(hooks_of_all_modules()[1], -1, _doubled),
    "a hook by its dict": lambda m, patch: m.model.norm._forward_hooks.update({-1: _doubled}),
    "precision": lambda m, patch: torch.set_float32_matmul_precision("high"),
}


@pytest.mark.parametrize("how", _PATCHES)
def test_a_change_from_outside_is_found(model: LlamaForCausalLM, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In dicts of modules, of classes, of Python's modules and of registries, and where no dict changes."""
    model.config.eos_token_id = [1, 2]
    walk = ModelWalk()
    walk.look(model)
    before = walk.look(model)
    assert before.is_same or not _are_counted()
    precision = torch.get_float32_matmul_precision()
    try:
        with monkeypatch.context() as patch:
            _PATCHES[how](model, patch)
            found = walk.look(model)
            assert not found.is_same
            assert repr(_shown(found)) != repr(_shown(before))
            assert repr(_shown(found)) == repr(_shown(Walk(model).complete(model)))
    finally:
        torch.set_float32_matmul_precision(precision)
    again = walk.look(model)
    assert repr(_shown(again)) == repr(_shown(Walk(model).complete(model)))


@pytest.mark.skipif(not _are_counted(), reason="this Python does not count changes of dicts")
def test_what_is_the_same_is_not_read_again(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are there all the same, and so is what autocast changes."""
    walk = ModelWalk()
    first = walk.look(model)
    monkeypatch.setattr(Walk, "complete", None)
    found = walk.look(model)
    assert found.is_same
    assert _shown(found) == _shown(first)
    with torch.autocast("cpu"), pytest.raises(TypeError):
        walk.look(model)


def test_a_model_is_freed_at_once() -> None:
    """What was seen of it is kept on the model, and holds neither it nor itself."""
    model = make()
    fingerprint = ModelState.of(model).fingerprint
    fingerprint.current(model)
    fingerprint.current(model)
    alive: list[bool] = []
    for part in (model, model.model.norm, model.lm_head.weight):
        weakref.finalize(part, alive.append, False)
    del fingerprint, model, part
    assert alive == [False] * 3


def test_a_layout_keeps_nothing_alive(model: LlamaForCausalLM) -> None:
    walk = ModelWalk()
    walk.look(model)
    alive: list[bool] = []
    weakref.finalize(model.lm_head.weight, alive.append, False)
    weakref.finalize(model.model.norm, alive.append, False)
    del model.lm_head, model.model.norm
    assert alive == [False, False]
