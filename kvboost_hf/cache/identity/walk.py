"""All that K/V of a model may depend on besides tokens, found by a walk through its modules.

To look at every attribute of every module takes milliseconds, and is done at each prompt. So the walk notes the layout
of the modules: which there are, the names and types of their attributes, and the values of those that are numbers or
strings. While the layout is the same, tensors and objects are read where they were found. A layout holds none of them,
for memory that a user frees has to be free.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from kvboost_hf.cache.identity.checksum import checksum
from kvboost_hf.cache.identity.durable_names import is_of_package, is_written_where_it_says
from kvboost_hf.cache.identity.foreign import (
    OF_TORCH,
    HookWatch,
    Reached,
    Reader,
    foreign_functions,
    hooks_of_all_modules,
    is_own,
    only_looks,
    watch_hooks,
)
from kvboost_hf.cache.identity.offloaded import (
    FileMark,
    files_at_rest,
    offloaded_files,
    offloaded_tensors,
    weight_maps,
    weights_at_rest,
)
from kvboost_hf.cache.identity.weights import plain_tensors
from kvboost_hf.compat import KeptOnModel, frequencies_vary

_SCALARS = frozenset((float, bool, str, int))
# Attributes that are read elsewhere, or by generate(), or that are our own.
_PASSED_OVER = (PreTrainedConfig, GenerationConfig, KeptOnModel, type(None))
_PLAIN = frozenset((nn.Parameter, torch.Tensor))
_ADAPTER_STATE = frozenset(("_active_adapter", "_disable_adapters"))  # read through PEFT's own names
_RECOMPUTED = ("_orig", "_v")  # pruning and old weight norms compute `weight` from `weight_orig` at each forward
# What models note on themselves in the course of a forward. Positions that follow from an image are part of what K/V
# is found by; hooks that only look are put in place when hidden states are first asked for, as with a first image;
# generate() notes the size of the static cache that it has made; what is compiled is the same code; and `attach` puts
# a method before the one that makes caches.
PREPARE_CACHE = "_prepare_cache_for_generation"
_NOTES = frozenset(
    (
        *(PREPARE_CACHE, "rope_deltas", "_output_capturing_hooks_installed", "_previous_max_cache_length", "_cache"),
        *("_compiled_call", "_last_compile_config", "_compiled_call_impl"),
    )
)
# What transformers says of a class, not of how it computes.
_SAID_OF_CLASSES = frozenset(
    (
        *("_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size", "_no_split_modules", "all_tied_weights_keys"),
        *("_skip_keys_device_placement", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "model_tags"),
        *("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_save"),
        *("warnings_issued", "_weight_conversions", "hf_device_map", "peft_config", "_tied_weights_keys"),
    )
)
_SAME_IN_TRAINING = frozenset((nn.Identity, nn.Linear, nn.Embedding, nn.ModuleDict, nn.ParameterDict))
_OURS = "_kvboost_hf_"  # begins the names of what we keep on modules
_READ_WHOLE_BYTES = 2**20  # of what is kept in containers, and of what hooks can reach
_READ_ELSEWHERE = OF_TORCH | _NOTES | _SAID_OF_CLASSES | {"_hf_hook", "_old_forward", "forward"}
# Attributes whose values a walk does not look at.
_UNREAD = (OF_TORCH - {"training"}) | _NOTES | _SAID_OF_CLASSES


@dataclass(slots=True)
class Found:
    """What K/V of a model may depend on."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    switches: list[Hashable] = field(default_factory=list)  # what can be switched without touching a tensor
    own_configs: list[Hashable] = field(default_factory=list)  # of parts that do not share the model's
    parts: list[Any] = field(default_factory=list)  # hooks and functions: told apart by identity
    foreign: slice = field(default_factory=lambda: slice(0))  # of the parts: functions of others
    files: set[FileMark] = field(default_factory=set)
    used_on: dict[int, torch.device] = field(default_factory=dict)  # by id, of tensors that are kept elsewhere
    in_training: bool = False
    watched: list[HookWatch] = field(default_factory=list)  # hooks that may turn out to change what is computed


class ModelWalk:
    """Finds what K/V of one model depends on, again and again."""

    def __init__(self) -> None:
        self._layout: _Layout | None = None

    def look(self, model: nn.Module) -> Found:
        """What there is in the model now."""
        walk = self._layout.read(model) if self._layout is not None else None
        if walk is None:
            walk = _Walk(model)
            self._layout = _Layout(walk) if walk.is_ordinary else None
        return walk.complete(model)


class _Walk:
    """What the modules of a model consist of.

    Args:
        model: Is walked through; None to be filled in otherwise.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.found = Found()
        self.held: list[Any] = []  # attributes that may hold values
        self.configs: list[PreTrainedConfig] = []  # of modules
        self.hooked: list[nn.Module] = []  # modules with forward hooks
        self.modules: list[nn.Module] = []
        self.kinds: dict[type, None] = {}  # of modules
        self.is_ordinary = True  # all is where the layout of the modules says
        self.held_at: list[tuple[int, str]] = []  # number of a module, and an attribute of it
        self.configs_at: list[tuple[int, str]] = []
        self._maps: dict[int, Any] = {}
        self._at_rest: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # of streamed layers
        seen: set[int] = set()  # ids of modules
        todo = (
            [model] if model is not None else []
        )  # by hand: the generators of model.modules() take three times as long
        while todo:
            module = todo.pop()
            if id(module) in seen:  # of several parents
                continue
            seen.add(id(module))
            children = self._add(module)
            todo += [child for child in children if child is not None]

    def _add(self, module: nn.Module) -> Iterable[nn.Module | None]:
        """Add what a module has, but for its children, which are returned."""
        found, tensors, switches = self.found, self.found.tensors, self.found.switches
        attributes = module.__dict__
        number = len(self.modules)
        self.modules.append(module)
        self.kinds[type(module)] = None
        if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            self.hooked.append(module)
        if frequencies_vary(module):  # it writes its frequencies anew at each forward; their regime is in the root
            self.is_ordinary = False
            switches += [value for name, value in attributes.items() if name.endswith("attention_scaling")]
            if "forward" in attributes:
                found.parts.append(attributes["forward"])
                self.held.append(attributes["forward"])
            return ()
        found.in_training |= module.training and not _is_the_same_in_training(module)
        switches.append(type(module).__qualname__)
        hook = attributes.get("_hf_hook")
        if hook is not None:
            self.is_ordinary = False
            if not is_of_package(type(hook)):
                self.held.append(hook)
            self._at_rest |= weights_at_rest(hook)
            found.files |= files_at_rest(hook)
            self._maps |= {id(weights): weights for weights in weight_maps(hook)}
        for group in (attributes["_parameters"], attributes["_buffers"]):
            for tensor in group.values() if group else ():
                if id(tensor) in self._at_rest:
                    kept = self._at_rest[id(tensor)][1]
                    if kept is not None:
                        found.used_on[id(kept)] = tensor.device
                        tensors.append(kept)
                elif type(tensor) in _PLAIN:
                    if not tensor.is_meta:
                        tensors.append(tensor)
                    else:
                        self.is_ordinary = False
                elif tensor is not None:
                    self.is_ordinary = False
                    tensors += plain_tensors(tensor)
        if "_active_adapter" in attributes:
            self.is_ordinary = False
            switches += _adapter_switches(module)
            attributes = {name: value for name, value in attributes.items() if name not in _ADAPTER_STATE}
        switches += [v for name, v in attributes.items() if type(v) in _SCALARS and name not in _NOTES]
        for name, value in [item for item in attributes.items() if item[0] not in _READ_ELSEWHERE]:
            if name.startswith(_OURS) or type(value) in _SCALARS or isinstance(value, _PASSED_OVER):
                if isinstance(value, PreTrainedConfig):
                    self.configs.append(value)
                    self.configs_at.append((number, name))
            elif isinstance(value, torch.Tensor):  # neither parameter nor buffer
                self.is_ordinary = False
                if not any(name + suffix in attributes["_parameters"] for suffix in _RECOMPUTED):
                    tensors += plain_tensors(value)
            elif isinstance(value, torch.ScriptObject):  # packed weights
                self.is_ordinary = False
                found.parts.append(value)
            else:
                self.held.append(value)
                self.held_at.append((number, name))
        replaced = attributes.get("forward")  # on the object; accelerate puts the own one there when a hook goes
        if replaced is not None:
            self.is_ordinary = False
            if not any(getattr(by, "leaves_kv_alone", False) for by in (hook, replaced)):
                if replaced != type(module).forward.__get__(module):
                    found.parts.append(replaced)
                    self.held.append(replaced)
        children: dict[str, nn.Module | None] = module.__dict__["_modules"]
        return children.values()

    def complete(self, model: nn.Module) -> Found:
        """Add what is not a part of any one module: configurations, hooks, functions, and what these can reach."""
        found = self.found
        config = getattr(model, "config", None)
        seen = _ids_of_configs(config)
        for own in self.configs:
            if id(own) not in seen:
                seen.add(id(own))
                found.own_configs += config_scalars(own)
        for module in self.hooked:
            _add_hooks(found, module)
        found.parts += [getattr(kind, "forward", None) for kind in self.kinds]
        foreign = foreign_functions(model, self.kinds)
        found.foreign = slice(len(found.parts), len(found.parts) + len(foreign))
        found.parts += foreign
        found.switches = [autocast(), *config_scalars(config), *found.switches, *found.own_configs]
        everywhere = [hook for hooks in hooks_of_all_modules() for hook in hooks.values() if not only_looks(hook)]
        found.parts += everywhere
        held = [*self.held, *everywhere]
        held += [forward for kind in self.kinds if not is_own(forward := getattr(kind, "forward", None))]
        held += _values_of_classes(self.kinds)
        if held or foreign:
            _read_values(found, [*held, *foreign], set(map(id, self.modules)))
        for weights in self._maps.values():
            for tensor in offloaded_tensors(weights):
                found.tensors += plain_tensors(tensor)
            found.files |= offloaded_files(weights)
        return found


_Take = Callable[[Any], tuple[Any, ...]]
_INSIDE = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")


class _Layout:
    """Where a walk has found what there is, without any of it.

    Args:
        walk: Has found nothing but plain tensors, and nothing that is kept elsewhere or put in place by others.
    """

    def __init__(self, walk: _Walk) -> None:
        attributes = [module.__dict__ for module in walk.modules]
        numbers = {id(module): number for number, module in enumerate(walk.modules)}
        self._modules = list(map(weakref.ref, walk.modules))
        self._types = list(map(type, walk.modules))
        # Of each module, the attributes that a walk looks at. If there are no more than there were, and these are
        # there, there is nothing new.
        self._lengths = list(map(len, attributes))
        names = [(*_INSIDE, *(name for name in own if _is_looked_at(name))) for own in attributes]
        takers = {own: itemgetter(*own) for own in set(names)}
        self._takers: list[_Take] = [takers[own] for own in names]
        looked_at = list(chain.from_iterable(names))
        values = [own[name] for own, taken in zip(attributes, names, strict=True) for name in taken]
        self._types_of_values = list(map(type, values))
        self._scalars = _take([i for i, value in enumerate(values) if type(value) in _SCALARS])
        self._scalar_values = self._scalars(values)
        self._inside = _take([i for i, name in enumerate(looked_at) if name in _INSIDE])
        inside = self._inside(values)
        self._sizes = list(map(len, inside))
        filled = [i for i, size in enumerate(self._sizes) if size]
        self._groups = _take([i for i in filled if i % 5 < 2])  # parameters and buffers
        self._children = _take([i for i in filled if i % 5 == 2])
        groups, children = self._groups(inside), self._children(inside)
        self._names_inside = list(chain.from_iterable((*groups, *children)))
        self._types_inside = list(map(type, _values(groups)))
        self._numbers = [numbers[id(child)] if child is not None else None for child in _values(children)]
        self._rotary = [number for number, own in enumerate(attributes) if "rope_type" in own]
        self._hooked = [numbers[id(module)] for module in walk.hooked]
        self._kinds = walk.kinds
        self._held_at, self._configs_at = walk.held_at, walk.configs_at
        self._in_training, self._switches = walk.found.in_training, list(walk.found.switches)

    def read(self, model: nn.Module) -> _Walk | None:
        """What a walk through the model would find, or None if something about the modules is another than it was."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if modules[:1] != [model] or list(map(type, modules)) != self._types:
            return None
        attributes = list(map(_DICT, modules))
        if list(map(len, attributes)) != self._lengths:
            return None
        try:
            values = list(chain.from_iterable([take(own) for take, own in zip(self._takers, attributes, strict=True)]))
        except KeyError:
            return None
        if list(map(type, values)) != self._types_of_values or self._scalars(values) != self._scalar_values:
            return None
        inside = self._inside(values)
        if list(map(len, inside)) != self._sizes:
            return None
        groups, children = self._groups(inside), self._children(inside)
        if list(chain.from_iterable((*groups, *children))) != self._names_inside:
            return None
        now = [None if number is None else modules[number] for number in self._numbers]
        tensors = list(_values(groups))
        if not all(map(is_, _values(children), now)) or list(map(type, tensors)) != self._types_inside:
            return None
        tensors = [tensor for tensor in tensors if tensor is not None]
        if any(map(_IS_META, tensors)) or any(frequencies_vary(modules[number]) for number in self._rotary):
            return None
        walk = _Walk()
        walk.modules, walk.kinds = modules, self._kinds
        walk.found.tensors, walk.found.switches = tensors, self._switches
        walk.found.in_training = self._in_training
        walk.held = [attributes[number][name] for number, name in self._held_at]
        walk.configs = [attributes[number][name] for number, name in self._configs_at]
        walk.hooked = [modules[number] for number in self._hooked]
        return walk


_DICT, _IS_META, _VALUES = attrgetter("__dict__"), attrgetter("is_meta"), methodcaller("values")


def _is_looked_at(name: str) -> bool:
    """Whether a walk looks at the value of an attribute, and not only at whether it is there."""
    return name not in _UNREAD and not name.startswith(_OURS)


def _values(dicts: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(_VALUES, dicts))


def _take(indices: Sequence[int]) -> _Take:
    """Takes the items with these numbers out of a sequence."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)


def _values_of_classes(kinds: Iterable[type]) -> list[dict[str, Any]]:
    """Of all classes of modules and what they inherit from, the attributes of those that are not of a package."""
    others = {base: None for kind in kinds for base in kind.__mro__[:-1] if not is_own(base)}
    return [{name: value for name, value in vars(base).items() if not name.startswith("__")} for base in others]


def _add_hooks(found: Found, module: nn.Module) -> None:
    """Add the forward hooks of a module."""
    hooks, watch = watch_hooks(module)
    found.parts += hooks
    if watch is not None:
        found.watched.append(watch)


def _is_the_same_in_training(module: nn.Module) -> bool:
    """Whether a module computes the same in training mode, in which `model.add_adapter()` leaves what it adds."""
    return type(module) in _SAME_IN_TRAINING or type(module).__module__.startswith("peft.tuners.lora")


def _read_values(found: Found, values: list[Any], modules: set[int]) -> None:
    """Add what attributes, hooks and functions of others can reach, but for the modules of the model."""
    reached = Reached()
    reader = Reader(reached, modules)
    for value in values:
        if not (is_own(value) and is_written_where_it_says(value)):
            reader.read(value)
    tensors = [plain for tensor in reached.tensors for plain in plain_tensors(tensor)]
    if tensors and sum(tensor.nbytes for tensor in tensors) <= _READ_WHOLE_BYTES:
        found.switches.append(checksum(tensors).hex())  # switched back, they give the old fingerprint again
    else:
        found.tensors += tensors
    found.switches += reached.values
    found.parts += reached.functions


def _adapter_switches(layer: Any) -> list[Hashable]:
    """Of a layer that PEFT has put in. While adapters are disabled, it does not matter which one it is."""
    if layer.disable_adapters:
        return ["disabled", str(layer.merged_adapters)]
    return [str(layer.merged_adapters), str(layer.active_adapters), str(layer.__dict__.get("scaling"))]


def config_scalars(config: Any) -> list[Hashable]:
    """Read at each forward: how attention is computed, how many layers there are, what is taken of a vision tower."""
    if config is None:
        return []
    found: list[Hashable] = []
    for value in config.__dict__.values():
        kind = type(value)
        if kind in _SCALARS:
            found.append(value)
        elif kind is list or kind is tuple or (kind is dict and value):
            found.append(_shown(value))
        elif isinstance(value, PreTrainedConfig):  # of a text model or a vision tower
            found += config_scalars(value)
    return found


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # of something in it
        return type(value).__name__


def _ids_of_configs(config: Any) -> set[int]:
    """Those of a configuration and of the ones in it."""
    inner = [value for value in getattr(config, "__dict__", {}).values() if isinstance(value, PreTrainedConfig)]
    return {id(config)}.union(*map(_ids_of_configs, inner))


def autocast() -> Hashable:
    """With how many bits this thread computes."""
    precision = torch.get_float32_matmul_precision()
    kinds = [kind for kind in _device_kinds() if torch.is_autocast_enabled(kind)]
    return precision, *[(kind, torch.get_autocast_dtype(kind)) for kind in kinds]


@cache
def _device_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
