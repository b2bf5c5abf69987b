"""Values that K/V depends on besides weights in memory.

Configurations, precision, adapters, what others' objects reach, and weights that accelerate or layer streaming keep in
host memory or in files between forwards.
"""

import functools
import json
import os
import platform
import types
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
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
from kvboost_hf.checksum import Content, contents
from kvboost_hf.compat import ORIGIN

NAME = "name_or_path"  # of a model, as an attribute


def adapter_switches(layer: Any) -> list[Hashable]:
    """The state of a PEFT layer: which adapters are merged and active; while disabled, only the merged ones."""
    if layer.disable_adapters:
        return ["disabled", str(layer.merged_adapters)]
    return [str(layer.merged_adapters), str(layer.active_adapters), str(layer.__dict__.get("scaling"))]


def written_config(config: Any) -> str:
    """A configuration as text, without what it says of where it comes from."""
    written: dict[str, Any] = config.to_dict()
    return json.dumps(_without_origin(written), indent=2, sort_keys=True)


def _without_origin(written: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in written.items() if name not in ORIGIN}
    return {name: _without_origin(value) if isinstance(value, dict) else value for name, value in kept.items()}


def ids_of_configs(config: Any) -> set[int]:
    """The ids of a configuration and of those in it."""
    held = list(getattr(config, "__dict__", {}).values())
    inner = [value for value in held if isinstance(value, PreTrainedConfig)]
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
_CONTAINERS = (dict, types.MappingProxyType, list, tuple, deque, set, frozenset)
_MAX_DEPTH = 4
_MAX_READ = 1000  # items of a container that are read; of a larger one, only how many they are


@dataclass(slots=True)
class Reached:
    """Parts of values that were read."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)  # that can be compared and have a stable repr
    functions: list[Any] = field(default_factory=list)  # compared by identity


class Reader:
    """Adds all that values hold to a `Reached`, each object once."""

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
        elif isinstance(value, bytearray | memoryview | array):
            octets = bytes(value)
            reached.values.append((type(value).__name__, blake2b(octets, digest_size=20).hexdigest()))
        elif isinstance(value, _CONTAINERS) and len(value) > _MAX_READ:
            reached.values.append((type(value).__name__, len(value)))
        elif isinstance(value, dict | types.MappingProxyType):
            reached.values.append(("dict", len(value)))
            for key, inner in list(value.items()):
                reached.values.append(repr(key) if isinstance(key, _PLAIN_VALUES) else type(key).__qualname__)
                self.read(inner, depth + 1)
        elif isinstance(value, list | tuple | deque):
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


# Path, size in bytes, times of the last change of content and of inode in ns, and inode.
FileMark = tuple[str, int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class FileWeight:
    """A weight that accelerate reads from a file before each forward."""

    weights: Mapping[str, torch.Tensor]
    name: str  # the name of the tensor in the map

    def read(self, known: dict[Hashable, Content]) -> Content:
        """The content of the weight. It is read, and added to `known`, if the file has changed."""
        key = self.name, *_marks({_path(self.weights, self.name)})
        if key not in known:
            (known[key],) = contents([self.weights[self.name]])
        return known[key]


AtRest = torch.Tensor | Content | FileWeight  # a weight in host memory, or in a file


def weight_maps(hook: Any) -> Iterator[Any]:
    """The mappings from names to weights behind an accelerate hook; many hooks share one."""
    for inner in getattr(hook, "hooks", ()):  # SequentialHook
        yield from weight_maps(inner)
    found: Any = getattr(hook, "weights_map", None)
    while hasattr(found, "dataset"):  # PrefixedDataset
        found = found.dataset
    if found is not None:
        yield found


def weights_at_rest(hook: Any, module: nn.Module) -> dict[int, tuple[torch.device, AtRest]]:
    """By the id of each tensor whose values are elsewhere between forwards: the device it is used on, and its values.

    The tensors of streamed layers share slots with other layers, so that their own values are not stable.
    """
    found: dict[int, tuple[torch.device, AtRest]] = {}
    for inner in getattr(hook, "hooks", (hook,)):
        streamed: dict[int, tuple[torch.Tensor, torch.Tensor | Content]] = getattr(inner, "weights_at_rest", {})
        found |= {key: (tensor.device, kept) for key, (tensor, kept) in streamed.items()}
        if getattr(inner, "weights_map", None) is not None and getattr(inner, "execution_device", None) is not None:
            found |= _moved_by_accelerate(inner, module)
    return found


def _moved_by_accelerate(hook: Any, module: nn.Module) -> dict[int, tuple[torch.device, AtRest]]:
    weights, prefix = hook.weights_map, ""
    while hasattr(weights, "dataset"):  # PrefixedDataset
        prefix, weights = weights.prefix + prefix, weights.dataset
    in_memory = getattr(weights, "state_dict", weights)  # OffloadedWeightsLoader, or a dict
    in_files = getattr(weights, "index", {})
    device = torch.empty(0, device=hook.execution_device).device  # with its number
    found: dict[int, tuple[torch.device, AtRest]] = {}
    whole = hook.place_submodules
    for name, tensor in (*module.named_parameters(recurse=whole), *module.named_buffers(recurse=whole)):
        key = prefix + name
        if tensor.is_meta and isinstance(in_memory, dict) and isinstance(in_memory.get(key), torch.Tensor):
            found[id(tensor)] = device, in_memory[key]
        elif tensor.is_meta and key in in_files:
            found[id(tensor)] = device, FileWeight(weights, key)
    return found


def only_moves(hook: Any, forward: Any) -> bool:
    """Whether a hook of accelerate, with its function in place of the forward, does nothing but move tensors."""
    from accelerate.hooks import AlignDevicesHook

    inner = getattr(hook, "hooks", (hook,))
    is_theirs = isinstance(forward, functools.partial) and forward.func.__module__ == AlignDevicesHook.__module__
    return is_theirs and all(
        type(each) is AlignDevicesHook or getattr(each, "leaves_kv_alone", False) for each in inner
    )


def offloaded_tensors(weights: Any) -> list[torch.Tensor]:
    """Weights in host memory."""
    held = getattr(weights, "state_dict", weights)  # OffloadedWeightsLoader, or a dict
    return [value for value in held.values() if isinstance(value, torch.Tensor)] if isinstance(held, dict) else []


def offloaded_files(weights: Any) -> set[FileMark]:
    """Files with weights, with size and time of change; they are not read."""
    return _marks({_path(weights, name) for name in getattr(weights, "index", {})})


def _path(weights: Any, name: str) -> str:
    inside = weights.index[name].get("safetensors_file")
    return str(inside or os.path.join(weights.save_folder or "", f"{name}.dat"))


def _marks(paths: Iterable[str]) -> set[FileMark]:
    found = [(path, os.stat(path)) for path in paths]
    return {(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for path, stat in found}
