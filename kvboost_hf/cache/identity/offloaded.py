"""Finds weights that accelerate or layer streaming keep in host memory or in files between forwards."""

import functools
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvboost_hf.checksum import Content, contents

# Path, size in bytes, times of the last change of content and of inode in ns, and inode.
FileMark = tuple[str, int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class FileWeight:
    """A weight that accelerate reads from a file before each forward.

    Args:
        weights: The mapping that reads it.
        name: The name of the tensor in the map.
    """

    weights: Mapping[str, torch.Tensor]
    name: str

    def read(self, known: dict[Hashable, Content]) -> Content:
        """Its content, read if the file is not the one that it was.

        Args:
            known: Contents that were read before; the new one is added.
        """
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

    Args:
        hook: The hook on the module.
        module: The module.
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
