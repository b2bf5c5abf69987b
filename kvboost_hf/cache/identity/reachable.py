"""Reads the tensors, plain values and functions that attributes, hooks and patches of others can reach."""

import functools
import types
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from kvboost_hf.cache.identity.durable_names import is_of_package, is_package_code

_PLAIN_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type(None))
_MAX_DEPTH = 4
_MAX_READ = 1000  # items of a container that are read; of a larger one, only how many they are


@dataclass(slots=True)
class Reached:
    """Parts of values that were read."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)  # that can be compared and have a stable repr
    functions: list[Any] = field(default_factory=list)  # compared by identity


class Reader:
    """Adds all that values hold to a `Reached`, each object once.

    Args:
        reached: The parts so far.
        known: Ids of objects to skip, such as the modules of the model.
    """

    def __init__(self, reached: Reached, known: set[int]) -> None:
        self._reached, self._seen = reached, set(known)

    def read(self, value: Any, depth: int = 0) -> None:
        """Add the parts of a value: of containers, dataclasses, tensors, functions and their closures."""
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
        elif isinstance(value, torch.autocast):  # the rest of it is what it has found when it was last entered
            reached.values.append((value.device, str(value.fast_dtype), value._enabled))
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
        """Add an object of another class: its attributes, and its `__call__` unless a package has written it."""
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
