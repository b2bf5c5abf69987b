"""Values that K/V depends on besides weights: configurations, precision, adapters, and what others' objects reach."""

import functools
import json
import platform
import types
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from kvboost_hf.cache.identity.foreign import is_of_package, is_package_code

SCALARS = frozenset((float, bool, str, int))
# Where a model comes from, and who wrote its configuration: the same content elsewhere is the same model.
_ORIGIN = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map")
)
_UNREAD = _ORIGIN | {"dtype", "model_type"}  # of the weights and the class: not all configurations have them
NAME = "name_or_path"  # of a model, as an attribute


def adapter_switches(layer: Any) -> list[Hashable]:
    """The state of a PEFT layer: which adapters are merged and active; while disabled, only the merged ones."""
    if layer.disable_adapters:
        return ["disabled", str(layer.merged_adapters)]
    return [str(layer.merged_adapters), str(layer.active_adapters), str(layer.__dict__.get("scaling"))]


def config_scalars(config: Any) -> list[Hashable]:
    """Values of a configuration and of those in it, which models read at each forward."""
    if config is None:
        return []
    found: list[Hashable] = []
    held = config.__dict__
    for name in sorted(held.keys() - _UNREAD):
        value = held[name]
        kind = type(value)
        if kind in SCALARS:
            found.append(value)
        elif kind is list or kind is tuple or (kind is dict and value):
            found.append(shown(value))
        elif isinstance(value, PreTrainedConfig):  # of a text model or a vision tower
            found += config_scalars(value)
    return found


def written_config(config: Any) -> str:
    """A configuration as text, without what it says of where it comes from."""
    written: dict[str, Any] = config.to_dict()
    return json.dumps(_without_origin(written), indent=2, sort_keys=True)


def _without_origin(written: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in written.items() if name not in _ORIGIN}
    return {name: _without_origin(value) if isinstance(value, dict) else value for name, value in kept.items()}


def shown(value: Any) -> str:
    """The text of a value that may change in place."""
    try:
        return repr(value)
    except Exception:  # of something in it
        return type(value).__name__


def ids_of_configs(config: Any) -> set[int]:
    """The ids of a configuration and of those in it."""
    inner = [value for value in getattr(config, "__dict__", {}).values() if isinstance(value, PreTrainedConfig)]
    return {id(config)}.union(*map(ids_of_configs, inner))


def arithmetic() -> tuple[Hashable, ...]:
    """The settings that the last bits of a result depend on: threads, devices, and kernels that PyTorch may choose."""
    sdp: Any = torch.backends.cuda  # without types; the first three count on a CPU, too
    kernels = (sdp.flash_sdp_enabled, sdp.mem_efficient_sdp_enabled, sdp.math_sdp_enabled, sdp.cudnn_sdp_enabled)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _devices(), torch.get_num_threads(), deterministic, *[enabled() for enabled in kernels]


@cache
def _devices() -> tuple[str, ...]:
    """The processor with the instructions that it has, and the GPUs."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else [platform.processor()]
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    gpus = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return (*processor, torch.backends.cpu.get_cpu_capability(), *gpus)


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
