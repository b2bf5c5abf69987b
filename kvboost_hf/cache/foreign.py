"""Code that others have put into a model: what is given the cache, and what K/V may depend on besides weights.

A compression method hooks the attention layers, and edits the cache that they are given; a patch takes the place of a
forward or of a function that a forward calls. With the first, a model runs on transformers' own layers, whole prompts
and all, as it would without us. The second is part of the fingerprint, with the values that it can reach.
"""

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Iterable
from enum import Enum
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvboost_hf.cache.code_names import is_of_package, is_written_where_it_says
from kvboost_hf.compat import attention_function

_CACHE_ARGUMENTS = frozenset(("past_key_values", "past_key_value", "cache_params", "layer_past"))
_ANYTHING = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_CAPTURING_MODULE = "transformers.utils.output_capturing"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PLAIN_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type(None))
_MAX_DEPTH = 4
_IMPORTED = frozenset(("causal_conv1d", "einops", "kernels", "numpy"))  # packages that modules of transformers import
_SDPA = F.scaled_dot_product_attention  # as it was when this was imported


def only_looks(hook: Any) -> bool:
    """Whether a forward hook is known to leave what is computed as it is."""
    if getattr(hook, "__module__", None) == _CAPTURING_MODULE:
        return True
    return any(getattr(each, "leaves_kv_alone", False) for each in (hook, getattr(hook, "__self__", None)))


def holder_of_cache(model: nn.Module) -> str | None:
    """Why a model must run whole prompts on transformers' own layers: somebody else's code is given the cache.

    That is a forward hook that gets keyword arguments, on a module whose forward takes a cache; or, below the model
    itself, a forward that is not the module's own.

    Returns:
        What it is, to follow "because", or None.
    """
    todo = [model]
    while todo:
        module = todo.pop()
        kind: Any = type(module)
        if not isinstance(module, _CONTAINERS):
            if not _takes_cache(kind):
                continue
            attributes = module.__dict__
            for hooks, with_kwargs in (
                (attributes["_forward_pre_hooks"], attributes["_forward_pre_hooks_with_kwargs"]),
                (attributes["_forward_hooks"], attributes["_forward_hooks_with_kwargs"]),
            ):
                for number in with_kwargs if hooks else ():
                    if number in hooks and not only_looks(hooks[number]):
                        return f"a forward hook ({_name(hooks[number])}) on {kind.__name__} is given the cache"
            if module is not model and (patch := _patched_forward(module)) is not None:
                return f"the forward of {kind.__name__} was replaced ({_name(patch)})"
        todo += [child for child in module.__dict__["_modules"].values() if child is not None]
    return None


@cache
def _takes_cache(kind: Any) -> bool:
    _, *parameters = inspect.signature(kind.forward).parameters.values()
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
    while isinstance(function, functools.partial | types.MethodType) and not hasattr(function, "leaves_kv_alone"):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if getattr(function, "leaves_kv_alone", False):
        return True
    if not isinstance(function, types.FunctionType):
        return False
    modules = {base.__module__ for base in kind.__mro__}
    return (function.__module__ in modules or is_of_package(function)) and is_written_where_it_says(function)


def foreign_attention(model: PreTrainedModel) -> Any:
    """The function that computes attention if somebody else has written it, or None."""
    function = attention_function(model)
    return None if _is_of_us(function) and is_written_where_it_says(function) else function


def _is_of_us(function: Any) -> bool:
    return is_of_package(function) or str(getattr(function, "__module__", "")).startswith("kvboost_hf.")


def foreign_functions(model: nn.Module, kinds: Iterable[type]) -> list[Any]:
    """Functions of others that forwards call: attention, and what was put into the modules that define them."""
    found: list[Any] = []
    if isinstance(model, PreTrainedModel) and (attention := foreign_attention(model)) is not None:
        found.append(attention)
    if F.scaled_dot_product_attention is not _SDPA:
        found.append(F.scaled_dot_product_attention)
    for name in dict.fromkeys(kind.__module__ for kind in kinds):
        found += _foreign_in(name)
    return found


def _foreign_in(name: str) -> list[Any]:
    """Functions and classes of a module of transformers that come from somewhere else."""
    if not name.startswith("transformers.models."):
        return []
    return [
        value
        for key, value in list(vars(sys.modules[name]).items())
        if isinstance(value, types.FunctionType | type) and not key.startswith("__") and not _is_usual(value)
    ]  # torch.compile puts its own there, under names that begin with two underscores


@cache
def _is_usual(value: Any) -> bool:
    """Whether a function or class is what a module of transformers would import: from a package, or from Python's."""
    package = str(value.__module__).partition(".")[0]
    return is_of_package(value) or package in sys.stdlib_module_names or package in _IMPORTED


def _name(part: Any) -> str:
    owner = getattr(part, "__self__", None)
    own = getattr(part, "__qualname__", type(part).__qualname__)
    return f"{type(owner).__module__}.{own}" if owner is not None else f"{getattr(part, '__module__', '')}.{own}"


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
            reached.values.append(("set", *sorted(map(repr, value))))
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
        if is_of_package(function):
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
