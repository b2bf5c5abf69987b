"""Code that others have put into a model: what is given the cache, and what K/V may depend on besides weights.

A compression method hooks the attention layers, and edits the cache that they are given: with it, a model runs on
transformers' own layers, whole prompts and all, as it would without us. Other hooks are watched: if one changes what
is computed, nothing is reused. A patch takes the place of a forward, or of a function that a forward calls: it is part
of the fingerprint, with the values that it can reach.
"""

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from hashlib import blake2b
from operator import is_
from threading import get_ident
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvboost_hf.cache.identity.durable_names import is_of_package, is_written_where_it_says
from kvboost_hf.compat import attention_function, attn_implementation, own_hook, own_hooks

_CACHE_ARGUMENTS = frozenset(("past_key_values", "past_key_value", "cache_params", "layer_past"))
_ANYTHING = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
# Whose hooks capture outputs, and tell modules for FLOPs to be counted.
_LOOKING = frozenset(("transformers.utils.output_capturing", "torch.utils.module_tracker"))
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PLAIN_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type(None))
_MAX_DEPTH = 4
_MAX_READ = 1000  # things in a container; of a larger one, only how many they are
_WATCH = "_kvboost_hf_hook_watch"
_IMPORTED = frozenset(("causal_conv1d", "einops", "kernels", "numpy"))  # packages that modules of transformers import


def hooks_registered() -> int:
    """How many hooks others have put anywhere so far."""
    return int(RemovableHandle.next_id) - own_hooks()


def only_looks(hook: Any) -> bool:
    """Whether a forward hook, or what takes a function's place, is known to leave what is computed as it is."""
    try:
        if getattr(hook, "__module__", None) in _LOOKING:
            return True
        return any(getattr(each, "leaves_kv_alone", False) is True for each in (hook, getattr(hook, "__self__", None)))
    except Exception:  # whatever an object does when it is asked for an attribute
        return False


def holder_of_cache(model: nn.Module) -> str | None:
    """Why a model must run whole prompts on transformers' own layers: somebody else's code is given the cache.

    That is a forward hook that gets keyword arguments, on a module whose forward takes a cache, or there a forward
    that is not the module's own. Whole models (`LlamaForCausalLM`, `LlamaModel`) are passed over: hooks on them mostly
    count.

    Returns:
        What it is, to follow "because", or None.
    """
    todo = [model]
    native: set[type] = set()  # classes whose forward is their own
    while todo:
        module = todo.pop()
        kind: Any = type(module)
        if not _takes_cache(kind):
            continue
        attributes = module.__dict__
        if not issubclass(kind, _CONTAINERS):
            if isinstance(module, PreTrainedModel):
                todo += [child for child in attributes["_modules"].values() if child is not None]
                continue
            for hooks, with_kwargs in (
                (attributes["_forward_pre_hooks"], attributes["_forward_pre_hooks_with_kwargs"]),
                (attributes["_forward_hooks"], attributes["_forward_hooks_with_kwargs"]),
            ):
                for number in with_kwargs if hooks else ():
                    if number in hooks and not only_looks(hooks[number]):
                        return f"a forward hook ({name_of(hooks[number])}) on {kind.__name__} is given the cache"
            if kind not in native or "forward" in attributes:
                if (patch := _patched_forward(module)) is not None:
                    return f"the forward of {kind.__name__} was replaced ({name_of(patch)})"
                native.add(kind)
        todo += [child for child in attributes["_modules"].values() if child is not None]
    return None


@cache
def _takes_cache(kind: Any) -> bool:
    """Whether modules of a class, or what they contain, may be given a cache."""
    if issubclass(kind, _CONTAINERS):
        return True
    try:
        _, *parameters = inspect.signature(kind.forward).parameters.values()
    except (TypeError, ValueError):  # it is no function of Python's
        return False
    return any(each.name in _CACHE_ARGUMENTS for each in parameters) or {each.kind for each in parameters} == _ANYTHING


def _patched_forward(module: nn.Module) -> Any:
    """The forward that somebody has put in place of a module's own, or None."""
    own = module.__dict__.get("forward")
    if own is not None and "_hf_hook" not in module.__dict__ and not _is_native(own, type(module)):
        return own
    forward = type(module).forward
    return None if _is_native(forward, type(module)) else forward


def _is_native(function: Any, kind: type) -> bool:
    """Whether a forward was written by the authors of a class, or by those of transformers and its kin."""
    while isinstance(function, functools.partial | types.MethodType) and not only_looks(function):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if only_looks(function):
        return True
    if not isinstance(function, types.FunctionType):
        return False
    modules = {base.__module__ for base in kind.__mro__}
    return (function.__module__ in modules or is_of_package(function)) and is_written_where_it_says(function)


def foreign_attention(model: PreTrainedModel) -> Any:
    """The function that computes attention if somebody else has written it, or None."""
    function = attention_function(model)
    return None if is_own(function) and is_written_where_it_says(function) else function


def is_own(function: Any) -> bool:
    """Whether a function or class is of this package, or of one that is named by its version."""
    return is_of_package(function) or str(getattr(function, "__module__", "")).startswith("kvboost_hf.")


def is_stock(cache: Any) -> bool:
    """Whether a cache of transformers, and its layers, are as transformers made them."""
    return all(
        is_package_code(type(each).update) and "update" not in each.__dict__ and is_of_package(type(each))
        for each in (cache, *cache.layers)
        if hasattr(type(each), "update")
    ) and all(is_package_code(kind.update) for kind in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer))


def is_package_code(function: Any) -> bool:
    """Whether a function is what a package has under its name."""
    return is_of_package(function) and is_written_where_it_says(function)


def foreign_functions(model: nn.Module, kinds: Iterable[type]) -> list[Any]:
    """Functions of others that forwards call: attention and masks, and what was put into modules and classes."""
    found = _replaced_in(F)
    if isinstance(model, PreTrainedModel):
        mask = ALL_MASK_ATTENTION_FUNCTIONS.get(attn_implementation(model))
        attention = foreign_attention(model)
        found += [] if attention is None else [attention]
        found += [] if mask is None or _is_original(mask) else [mask]
    classes = {base: None for kind in kinds for base in kind.__mro__ if _is_of_a_model(base)}
    own = attention_function(model) if isinstance(model, PreTrainedModel) else None
    around = [sys.modules[own.__module__]] if own is not None and is_of_package(own) else []
    for place in (
        nn.Module,
        *around,
        *classes,
        *(sys.modules[name] for name in {each.__module__: None for each in classes}),
    ):
        found += _replaced_in(place)
    return found


def _is_of_a_model(kind: type) -> bool:
    return kind.__module__.startswith("transformers.models.")


class _Names:
    """What the names in a module or a class stand for.

    Args:
        place: The module or class.
    """

    def __init__(self, place: Any) -> None:
        called = {name: value for name, value in list(vars(place).items()) if _is_called(name, value)}
        self._first = {name: value if _is_original(value) else None for name, value in called.items()}
        self._place = place
        self._last: tuple[list[str], list[Any]] = [], []  # when this was last looked at
        self._found: list[Any] = []

    def replaced(self) -> list[Any]:
        """What they stand for now where it is not what they stood for at first, or not original."""
        now = dict(vars(self._place))
        names, values = list(now), list(now.values())
        if names != self._last[0] or not all(map(is_, values, self._last[1])):
            first = self._first
            new = [value for name, value in now.items() if name not in first and _is_called(name, value)]
            self._found = new + [now[name] for name, value in first.items() if name in now and now[name] is not value]
            self._last = names, values
        return [value for value in self._found if not only_looks(value)]


_names: dict[Any, _Names] = {}  # of modules and classes, since they were first seen


def _replaced_in(place: Any) -> list[Any]:
    """What names in a module or a class stand for, where it is not what they stood for at first, or not original."""
    names = _names.get(place)
    if names is None:
        names = _names[place] = _Names(place)
    return names.replaced()


def _is_called(name: str, value: Any) -> bool:
    """Whether a name may be called. torch.compile puts its own into modules, which begin with two underscores."""
    return (name == "__call__" or not name.startswith("__")) and (callable(value) or hasattr(value, "__get__"))


def _is_original(value: Any) -> bool:
    """Whether something in a module or a class of a package is what was written or imported there."""
    if isinstance(value, types.FunctionType):
        return _is_usual(value) and is_written_where_it_says(value)
    return not isinstance(value, functools.partial) and _is_usual(value if isinstance(value, type) else type(value))


def hooks_of_all_modules() -> tuple[dict[int, Any], dict[int, Any]]:
    """Forward hooks that torch calls for each module, before and after its forward."""
    return nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks


class HookWatch:
    """Notes whether others' hooks on a module change anything: what is given to the first is compared behind the last.

    Most hooks count or record. One that puts something else in the place of what it was given, or writes to it,
    changes what the model computes, in a way that nobody can read off it: then nothing is reused or stored.
    """

    leaves_kv_alone = True

    def __init__(self) -> None:
        self.alters: Any = None  # the first hook of those that do
        self.compiled = False  # they have run where nobody can see what they do
        self.handles: list[RemovableHandle] = []
        self._before: dict[int, list[tuple[Any, Any]]] = {}  # by thread

    def first(self, module: nn.Module, *given: Any) -> None:
        """Called before the others."""
        if torch.compiler.is_compiling():
            self.compiled = True
        else:
            self._before[get_ident()] = _marks(given)

    def last(self, module: nn.Module, *given: Any) -> None:
        """Called after the others."""
        if torch.compiler.is_compiling():
            return
        before = self._before.pop(get_ident(), None)
        if before is None or self.alters is not None:
            return
        now = _marks(given)
        same = len(now) == len(before) and all(
            a is b and bool(torch.equal(m, n) if isinstance(m, torch.Tensor) else m == n)
            for (a, m), (b, n) in zip(now, before, strict=True)
        )
        if not same:
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            self.alters = next((hook for hook in hooks if not only_looks(hook)), self)

    @property
    def reason(self) -> str | None:
        """Why nothing is known of what the module computes, or None."""
        if self.alters is not None:
            return f"a forward hook ({name_of(self.alters)}) changes what the model computes"
        return "forward hooks are compiled, so that it cannot be seen what they change" if self.compiled else None

    def __reduce__(self) -> Any:
        return type(self), ()


def _marks(given: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """All tensors in what a hook is given, and what tells whether they have been written to."""
    return [(tensor, _mark(tensor)) for tensor in _tensors_in(given)]


def _mark(tensor: torch.Tensor) -> Any:
    """The version; on a CPU, and where there is none, the values, bit by bit."""
    if tensor.device.type != "cpu" and not tensor.is_inference():
        return tensor._version
    return tensor.detach().reshape(-1).clone().view(torch.uint8)


def watch_hooks(module: nn.Module) -> tuple[list[Any], HookWatch | None]:
    """The hooks of a module that may change what is computed, and who watches those of others from now on."""
    attributes = module.__dict__
    found = [
        hook
        for name in ("_forward_pre_hooks", "_forward_hooks")
        for hook in list(attributes[name].values())
        if not only_looks(hook)
    ]
    watch: HookWatch | None = attributes.get(_WATCH)
    every = (*attributes["_forward_pre_hooks"].values(), *attributes["_forward_hooks"].values())
    between = any(isinstance(hook, types.MethodType) and hasattr(hook.__self__, "changes_arguments") for hook in every)
    if between or not any(map(_is_function_of_others, found)):
        if watch is not None:  # those that were watched are gone
            del attributes[_WATCH]
            for handle in watch.handles:
                handle.remove()
        return found, None
    if watch is None:
        watch = attributes[_WATCH] = HookWatch()
    for register, hooks in (
        (module.register_forward_pre_hook, attributes["_forward_pre_hooks"]),
        (module.register_forward_hook, attributes["_forward_hooks"]),
    ):
        numbers = list(hooks)
        ours = {getattr(hook, "__name__", ""): n for n, hook in list(hooks.items()) if _watches(hook, watch)}
        if not ours:
            watch.handles.append(own_hook(register(watch.first, prepend=True, with_kwargs=True)))
            watch.handles.append(own_hook(register(watch.last, with_kwargs=True)))
        elif numbers[0] != ours["first"] or numbers[-1] != ours["last"]:
            hooks.move_to_end(ours["first"], last=False)
            hooks.move_to_end(ours["last"])
    return found, watch


def _watches(hook: Any, watch: HookWatch) -> bool:
    return isinstance(hook, types.MethodType) and hook.__self__ is watch


def _is_function_of_others(hook: Any) -> bool:
    """Whether a hook was written by nobody whose hooks can be told by their state."""
    while isinstance(hook, functools.partial | types.MethodType):
        if isinstance(hook, types.MethodType) and is_of_package(type(hook.__self__)):
            return False
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return not is_of_package(hook if isinstance(hook, types.FunctionType) else type(hook))


def _tensors_in(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict):
        for inner in given.values():
            yield from _tensors_in(inner)
    elif isinstance(given, list | tuple):
        for inner in given:
            yield from _tensors_in(inner)


def _is_usual(code: Any) -> bool:
    """Whether a function or class is what a module of transformers would import: from a package, or from Python's."""
    package = str(getattr(code, "__module__", "")).partition(".")[0]
    return is_own(code) or package in sys.stdlib_module_names or package in _IMPORTED


def name_of(part: Any) -> str:
    """What people call a hook or a function."""
    if isinstance(part, functools.partial):
        part = part.func
    if isinstance(part, types.MethodType):
        return f"{type(part.__self__).__module__}.{part.__func__.__qualname__}"
    kind = part if isinstance(part, types.FunctionType) else type(part)
    return f"{kind.__module__}.{kind.__qualname__}"


# What code and attributes can reach


@dataclasses.dataclass(slots=True)
class Reached:
    """What values consist of."""

    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    values: list[Any] = dataclasses.field(default_factory=list)  # that can be compared and have a stable repr
    functions: list[Any] = dataclasses.field(default_factory=list)  # told apart by identity


class Reader:
    """Reads everything that a value holds, each object once.

    Args:
        reached: Is added to.
        known: Ids of what is read elsewhere, such as the modules of the model.
    """

    def __init__(self, reached: Reached, known: set[int]) -> None:
        self._reached, self._seen = reached, set(known)

    def read(self, value: Any, depth: int = 0) -> None:
        """Add what a value consists of: containers, dataclasses, tensors, functions and their closures."""
        reached = self._reached
        if isinstance(value, _PLAIN_VALUES):
            reached.values.append(value if not isinstance(value, torch.dtype | torch.device | Enum) else str(value))
            return
        if isinstance(value, torch.Tensor):
            reached.tensors.append(value)
            return
        if id(value) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, np.ndarray):
            octets = value.tobytes() if value.dtype != object else repr(value).encode()
            reached.values.append((str(value.dtype), value.shape, blake2b(octets, digest_size=20).hexdigest()))
        elif isinstance(value, dict | list | tuple | set | frozenset) and len(value) > _MAX_READ:
            reached.values.append((type(value).__name__, len(value)))
        elif isinstance(value, dict):
            reached.values.append(("dict", len(value)))
            for key, inner in list(value.items()):
                reached.values.append(repr(key) if isinstance(key, _PLAIN_VALUES) else type(key).__qualname__)
                self.read(inner, depth + 1)
        elif isinstance(value, list | tuple):
            reached.values.append((type(value).__name__, len(value)))
            for inner in list(value):
                self.read(inner, depth + 1)
        elif isinstance(value, set | frozenset):
            plain = sorted(repr(each) for each in value if isinstance(each, _PLAIN_VALUES))
            reached.values.append(("set", len(value), *plain))
        elif isinstance(value, nn.Module):
            reached.values.append(type(value).__qualname__)
            reached.tensors += [*value.parameters(), *value.buffers()]
            for name, inner in list(value.__dict__.items()):
                if name not in OF_TORCH:
                    self.read(inner, depth + 1)
        elif isinstance(value, functools.partial):
            for inner in (value.func, value.args, value.keywords):
                self.read(inner, depth + 1)
        elif isinstance(value, types.MethodType):
            self.read(value.__func__, depth)
            self.read(value.__self__, depth + 1)
        elif isinstance(value, types.FunctionType):
            self.function(value, depth)
        elif not isinstance(value, type | types.ModuleType | PreTrainedConfig):
            self._object(value, depth)

    def function(self, function: types.FunctionType, depth: int) -> None:
        """Add a function: itself, its defaults, its closure, and the globals that it names."""
        self._reached.functions.append(function)
        if is_package_code(function):
            return
        code = function.__code__
        inner: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # not set yet
                continue
        named = (function.__globals__.get(name) for name in code.co_names)
        inner += [value for value in named if value is not None and not isinstance(value, type | types.ModuleType)]
        for value in inner:
            self.read(value, depth + 1)

    def _object(self, value: Any, depth: int) -> None:
        """Add any other object: its attributes, wherever it was written but in a package."""
        package = str(type(value).__module__).partition(".")[0]
        if package == "kvboost_hf":  # what is kept on a model
            return
        self._reached.values.append(type(value).__qualname__)
        if package in ("torch", "transformers", "accelerate", "builtins") and not callable(value):
            return
        call = type(value).__call__ if callable(value) else None
        if isinstance(call, types.FunctionType) and not is_of_package(call):
            self.function(call, depth)
        for inner in list(getattr(value, "__dict__", {}).values()):
            self.read(inner, depth + 1)
        for name in getattr(type(value), "__slots__", ()):
            if isinstance(name, str) and hasattr(value, name):
                self.read(getattr(value, name), depth + 1)


OF_TORCH = frozenset(nn.Module().__dict__)  # attributes that every module has
