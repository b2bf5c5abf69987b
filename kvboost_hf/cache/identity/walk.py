"""Walks through the modules of a model and collects all that its K/V may depend on besides tokens.

The walk is repeated for each prompt, and reading every attribute of every module takes milliseconds. So the first walk
records a layout: the modules, the names and types of their attributes, and the values of numbers and strings. While
the layout is unchanged, later walks read tensors and objects directly where the first one found them. A layout holds
no reference to tensors, so that memory a user frees is free.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from kvboost_hf.cache.identity.foreign import (
    foreign_functions,
    is_of_package,
    is_own,
    is_written_where_it_says,
    only_looks,
)
from kvboost_hf.cache.identity.hooks import (
    ForwardWatch,
    HookWatch,
    hooks_of_all_modules,
    unwatch_forward,
    watch_forward,
    watch_hooks,
)
from kvboost_hf.cache.identity.values import (
    OF_TORCH,
    AtRest,
    FileMark,
    FileWeight,
    Reached,
    Reader,
    adapter_switches,
    ids_of_configs,
    offloaded_files,
    offloaded_tensors,
    only_moves,
    weight_maps,
    weights_at_rest,
)
from kvboost_hf.cache.identity.versions import INSIDE, NOTES, OURS, UNREAD, is_read
from kvboost_hf.cache.identity.weights import plain_tensors
from kvboost_hf.checksum import Content, checksum
from kvboost_hf.compat import SCALARS, KeptOnModel, autocast, config_scalars, forward_of, frequencies_vary

# Attributes that are read elsewhere, or by generate(), or that are our own.
_PASSED_OVER = (PreTrainedConfig, GenerationConfig, KeptOnModel, type(None))
_PLAIN = frozenset((nn.Parameter, torch.Tensor))
_ADAPTER_STATE = frozenset(("_active_adapter", "_disable_adapters"))  # read through PEFT's own names
_RECOMPUTED = ("_orig", "_v")  # pruning and old weight norms compute `weight` from `weight_orig` at each forward
_SAME_IN_TRAINING = frozenset((nn.Identity, nn.Linear, nn.Embedding, nn.ModuleDict, nn.ParameterDict))
_NO_FLAGS = frozenset(("training", "_hf_peft_config_loaded"))  # they come and go, and say nothing of what is kept
_OF_LAYERS = ("torch.nn.", "torch._", "peft.")  # of layers that say nothing of what is kept, or are adapters
_READ_WHOLE_BYTES = 2**20  # of what is kept in containers, and of what hooks can reach
_READ_ELSEWHERE = OF_TORCH | UNREAD | {"_hf_hook", "_old_forward", "forward"}


@dataclass(slots=True)
class ModelParts:
    """The tensors, settings, functions and files that K/V of a model may depend on."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    # Weights in files, each with the number of tensors before it.
    in_files: list[tuple[int, Content | FileWeight]] = field(default_factory=list)
    switches: list[Hashable] = field(default_factory=list)  # settings that can change without a tensor changing
    configs: list[Hashable] = field(default_factory=list)  # scalars of configurations, those of parts included
    flags: list[Hashable] = field(default_factory=list)  # classes, flags, counts and names of modules that models have
    frequencies: list[int] = field(default_factory=list)  # which of the tensors are rotary frequencies
    parts: list[Any] = field(default_factory=list)  # hooks and functions, compared by identity
    foreign: slice = field(default_factory=lambda: slice(0))  # of the parts: functions of others
    files: set[FileMark] = field(default_factory=set)  # of weights that accelerate reads
    are_all_placed: bool = True  # the weights in files are all among the other ones
    used_on: dict[int, torch.device] = field(default_factory=dict)  # by id, of weights that are kept elsewhere
    in_training: bool = False
    is_same: bool = False  # it is what was found before
    has_others: bool = False  # functions and values of others
    facts: dict[Hashable, Any] = field(default_factory=dict)  # what follows from all of this but the tensors
    serials: list[int] = field(default_factory=list)  # of the parts, see `ModelFingerprint`
    number: int = 0  # another one for each model that was found
    # Hooks, and a function in place of the forward, that may turn out to change what is computed.
    watched: list[HookWatch | ForwardWatch] = field(default_factory=list)

    @property
    def weights(self) -> list[AtRest]:
        """All weights, in the order in which the modules have them."""
        found: list[AtRest] = []
        taken = 0
        for before, content in self.in_files:
            found += [*self.tensors[taken:before], content]
            taken = before
        return [*found, *self.tensors[taken:]]


class Walk:
    """One walk through the modules of a model; None for a walk that `Layout.read` fills in."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.found = ModelParts()
        self.others: list[Any] = []  # attributes that may reach tensors or values
        self.configs: list[PreTrainedConfig] = []  # of modules
        self.hooked: list[nn.Module] = []  # modules with forward hooks
        self.modules: list[nn.Module] = []
        self.classes: dict[type, None] = {}  # of modules, in order
        self.is_ordinary = True  # all is where the layout of the modules says
        self.others_at: list[tuple[int, str]] = []  # number of a module, and an attribute of it
        self.configs_at: list[tuple[int, str]] = []
        self._maps: dict[int, Any] = {}
        self._at_rest: dict[int, tuple[torch.device, AtRest]] = {}  # of tensors by id
        seen: set[int] = set()  # ids of modules
        todo = [model] if model is not None else []  # model.modules() takes three times as long
        while todo:
            module = todo.pop()
            if id(module) in seen:  # of several parents
                continue
            seen.add(id(module))
            children = self._add(module)
            todo += [child for child in children if child is not None]

    def _add(self, module: nn.Module) -> Iterable[nn.Module | None]:
        """Add all that a module holds except its children, which are returned."""
        attributes = module.__dict__.copy()  # another thread may set one, or take one away
        number = len(self.modules)
        self.modules.append(module)
        self.classes[type(module)] = None
        if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            self.hooked.append(module)
        if frequencies_vary(module):  # it writes its frequencies anew at each forward; their regime is in the root
            self.is_ordinary = False
            self.found.switches += [value for name, value in attributes.items() if name.endswith("attention_scaling")]
            if "forward" in attributes:
                self._add_function(attributes["forward"])
            return ()
        self.found.in_training |= module.training and not _is_the_same_in_training(module)
        self.found.switches.append(type(module).__qualname__)
        if (hook := attributes.get("_hf_hook")) is not None:
            self._add_accelerate_hook(hook, module)
        for group in (attributes["_parameters"], attributes["_buffers"]):
            for name, tensor in list(group.items()) if group else ():
                before = len(self.found.tensors)
                self._add_tensor(tensor)
                if "inv_freq" in name:
                    self.found.frequencies += range(before, len(self.found.tensors))
        self._add_attributes(number, attributes)
        replaced = attributes.get("forward")  # on the object; accelerate puts the own one there when a hook goes
        if replaced is not None:
            self.is_ordinary = False
            if hook is not None and only_moves(hook, replaced):
                replaced = attributes.get("_old_forward")
            if not any(getattr(by, "leaves_kv_alone", False) for by in (hook, replaced)):
                if replaced != type(module).forward.__get__(module):
                    self._add_replaced(module, replaced, whole=not number)
        elif not number:
            unwatch_forward(module)
        children: dict[str, nn.Module | None] = attributes["_modules"]
        return list(children.values())

    def _add_function(self, function: Any) -> None:
        self.found.parts.append(function)
        self.others.append(function)

    def _add_replaced(self, module: nn.Module, function: Any, *, whole: bool) -> None:
        """Add a function in place of a forward: one that is seen to change nothing without what it keeps."""
        watch = watch_forward(module) if whole else None
        if watch is None:
            self._add_function(function)
        else:
            self.found.parts.append(watch.code)
            self.found.watched.append(watch)

    def _add_accelerate_hook(self, hook: Any, module: nn.Module) -> None:
        self.is_ordinary = False
        if not is_of_package(type(hook)):
            self.others.append(hook)
        self._at_rest |= weights_at_rest(hook, module)
        self._maps |= {id(weights): weights for weights in weight_maps(hook)}

    def _add_tensor(self, tensor: torch.Tensor | None) -> None:
        """Add a parameter or buffer, or what it is loaded from before each forward."""
        if id(tensor) in self._at_rest:
            assert tensor is not None
            self._add_at_rest(tensor)
        elif tensor is not None and type(tensor) in _PLAIN and not tensor.is_meta:
            self.found.tensors.append(tensor)
        elif tensor is not None:
            self.is_ordinary = False
            self.found.are_all_placed &= not tensor.is_meta
            if type(tensor) not in _PLAIN:  # quantized, perhaps with inputs that are scaled all together
                self.found.flags.append(type(tensor).__qualname__)
                for part in plain_tensors(tensor):
                    if id(part) in self._at_rest:
                        self._add_at_rest(part)
                    else:
                        self.found.tensors.append(part)

    def _add_at_rest(self, tensor: torch.Tensor) -> None:
        device, kept = self._at_rest[id(tensor)]
        if not isinstance(kept, torch.Tensor):
            self.found.used_on[id(kept)] = device
            self.found.in_files.append((len(self.found.tensors), kept))
            return
        for part in plain_tensors(kept):
            self.found.used_on[id(part)] = device
            self.found.tensors.append(part)

    def _add_attributes(self, number: int, attributes: dict[str, Any]) -> None:
        """Add the attributes of module `number` that `nn.Module` does not define."""
        found, parameters = self.found, attributes["_parameters"]
        if "_active_adapter" in attributes:
            self.is_ordinary = False
            found.switches += adapter_switches(self.modules[number])
            attributes = {name: value for name, value in attributes.items() if name not in _ADAPTER_STATE}
        scalars = {name: v for name, v in attributes.items() if type(v) in SCALARS and name not in NOTES}
        found.switches += scalars.values()
        kind = type(self.modules[number])
        if not kind.__module__.startswith(_OF_LAYERS):
            found.flags.append(kind.__qualname__)
            # Not floats, such as the strength of a steering vector: K/V are not arranged by them.
            found.flags += [v for name, v in scalars.items() if type(v) is not float and name not in _NO_FLAGS]
        for name, value in [item for item in attributes.items() if item[0] not in _READ_ELSEWHERE]:
            if name.startswith(OURS) or type(value) in SCALARS or isinstance(value, _PASSED_OVER):
                if isinstance(value, PreTrainedConfig):
                    self.configs.append(value)
                    self.configs_at.append((number, name))
            elif isinstance(value, torch.Tensor):  # neither parameter nor buffer
                self.is_ordinary = False
                if not any(name + suffix in parameters for suffix in _RECOMPUTED):
                    found.tensors += plain_tensors(value)
            elif isinstance(value, torch.ScriptObject):  # packed weights
                self.is_ordinary = False
                found.parts.append(value)
            else:
                self.others.append(value)
                self.others_at.append((number, name))

    def complete(self, model: nn.Module) -> ModelParts:
        """Add what is no part of any one module: configurations, hooks, functions, and all that these can reach."""
        found = self.found
        config = getattr(model, "config", None)
        seen, of_parts = ids_of_configs(config), list[Hashable]()  # configurations that are not the model's own
        for each in self.configs:
            if id(each) not in seen:
                seen.add(id(each))
                of_parts += config_scalars(each)
        before = len(found.parts)
        for module in self.hooked:
            own_hooks, watch = watch_hooks(module)
            found.parts += own_hooks
            if watch is not None:
                found.watched.append(watch)
        hooks = len(found.parts) > before
        found.parts += [forward_of(kind) for kind in self.classes]
        foreign = foreign_functions(model, self.classes)
        found.foreign = slice(len(found.parts), len(found.parts) + len(foreign))
        found.parts += foreign
        own = config_scalars(config)
        found.configs = [*own, *of_parts]
        found.switches = [autocast(), *own, *found.switches, *of_parts]
        everywhere = [hook for hooks in hooks_of_all_modules() for hook in hooks.values() if not only_looks(hook)]
        found.parts += everywhere
        theirs = [*everywhere, *(forward for kind in self.classes if not is_own(forward := forward_of(kind)))]
        theirs += _values_of_classes(self.classes)
        reach = [*self.others, *theirs]
        found.has_others = bool(theirs or foreign or hooks)
        if reach or foreign:
            _read_values(found, [*reach, *foreign], set(map(id, self.modules)))
        for weights in self._maps.values():
            if not found.are_all_placed:
                for tensor in offloaded_tensors(weights):
                    found.tensors += plain_tensors(tensor)
            found.files |= offloaded_files(weights)
        return found


_Take = Callable[[Any], tuple[Any, ...]]


class Layout:
    """Where an ordinary walk has found things, without a reference to them. All tensors are plain."""

    def __init__(self, walk: Walk) -> None:
        attributes = [module.__dict__.copy() for module in walk.modules]
        numbers = {id(module): number for number, module in enumerate(walk.modules)}
        self._modules = list(map(weakref.ref, walk.modules))
        self._types = list(map(type, walk.modules))
        # Of each module, the attributes that a walk looks at. If there are no more than there were, and these are
        # there, there is nothing new.
        self._lengths = list(map(len, attributes))
        names = [(*INSIDE, *(name for name in own if is_read(name))) for own in attributes]
        takers = {own: itemgetter(*own) for own in set(names)}
        self._takers: list[_Take] = [takers[own] for own in names]
        looked_at = list(chain.from_iterable(names))
        values = [own[name] for own, taken in zip(attributes, names, strict=True) for name in taken]
        self._types_of_values = list(map(type, values))
        self._scalars = _take([i for i, value in enumerate(values) if type(value) in SCALARS])
        self._scalar_values = self._scalars(values)
        self._inside = _take([i for i, name in enumerate(looked_at) if name in INSIDE])
        inside = self._inside(values)
        self._sizes = list(map(len, inside))
        filled = [i for i, size in enumerate(self._sizes) if size]
        self._groups = _take([i for i in filled if i % 5 < 2])  # parameters and buffers
        self._children = _take([i for i in filled if i % 5 == 2])
        groups, children = self._groups(inside), self._children(inside)
        self._names_inside = list(chain.from_iterable((*groups, *children)))
        self._types_inside = list(map(type, _values(groups)))
        self._numbers = [numbers[id(child)] if child is not None else None for child in list(_values(children))]
        self._rotary = [number for number, own in enumerate(attributes) if "rope_type" in own]
        self._hooked = [numbers[id(module)] for module in walk.hooked]
        self._classes = walk.classes
        self._others_at, self._configs_at = walk.others_at, walk.configs_at
        self._in_training, self._switches = walk.found.in_training, list(walk.found.switches)
        self._flags, self._frequencies = list(walk.found.flags), list(walk.found.frequencies)

    def read(self, model: nn.Module) -> Walk | None:
        """The walk through the model as it is now, or None if the layout of its modules has changed."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if modules[:1] != [model] or list(map(type, modules)) != self._types:
            return None
        attributes = list(map(_DICT, modules))
        if list(map(len, attributes)) != self._lengths:
            return None
        try:
            values = list(chain.from_iterable([take(own) for take, own in zip(self._takers, attributes, strict=True)]))
            others = [attributes[number][name] for number, name in self._others_at]
            configs = [attributes[number][name] for number, name in self._configs_at]
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
        walk = Walk()
        walk.modules, walk.classes, walk.others, walk.configs = modules, self._classes, others, configs
        walk.found.tensors, walk.found.switches = tensors, self._switches
        walk.found.in_training = self._in_training
        walk.found.flags, walk.found.frequencies = self._flags, self._frequencies
        walk.hooked = [modules[number] for number in self._hooked]
        return walk


_DICT, _IS_META, _VALUES = attrgetter("__dict__"), attrgetter("is_meta"), methodcaller("values")


def _values(dicts: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(_VALUES, dicts))


def _take(indices: Sequence[int]) -> _Take:
    """Takes the items with these numbers out of a sequence."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)


def _values_of_classes(classes: Iterable[type]) -> list[dict[str, Any]]:
    """Attributes of the classes of modules, and of their bases, that are no classes of a package."""
    others = {base: None for kind in classes for base in kind.__mro__[:-1] if not is_own(base)}
    return [{name: value for name, value in vars(base).copy().items() if not name.startswith("__")} for base in others]


def _is_the_same_in_training(module: nn.Module) -> bool:
    """Whether a module computes the same in training mode, in which `model.add_adapter()` leaves what it adds."""
    return type(module) in _SAME_IN_TRAINING or type(module).__module__.startswith("peft.tuners.lora")


def _read_values(found: ModelParts, values: list[Any], modules: set[int]) -> None:
    """Add what attributes, hooks and functions of others can reach, except the modules of the model."""
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
