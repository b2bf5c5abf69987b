"""Finds weights that accelerate or layer streaming keep in host memory or in files between forwards."""

import os
from collections.abc import Iterator
from typing import Any

import torch

from kvboost_hf.checksum import Content

FileMark = tuple[str, int, int]  # path, size in bytes, time of the last change in ns


def weight_maps(hook: Any) -> Iterator[Any]:
    """The mappings from names to weights behind an accelerate hook; many hooks share one."""
    for inner in getattr(hook, "hooks", ()):  # SequentialHook
        yield from weight_maps(inner)
    found: Any = getattr(hook, "weights_map", None)
    while hasattr(found, "dataset"):  # PrefixedDataset
        found = found.dataset
    if found is not None:
        yield found


def weights_at_rest(hook: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor | Content]]:
    """By the id of each tensor of a streamed layer: the tensor, and its values in host memory or content in a file.

    The layer's own tensors share slots with other layers, so that their values are not stable.
    """
    found: dict[int, tuple[torch.Tensor, torch.Tensor | Content]] = {}
    for inner in getattr(hook, "hooks", (hook,)):
        found |= getattr(inner, "weights_at_rest", {})
    return found


def offloaded_tensors(weights: Any) -> list[torch.Tensor]:
    """Weights in host memory."""
    held = getattr(weights, "state_dict", weights)  # OffloadedWeightsLoader, or a dict
    return [value for value in held.values() if isinstance(value, torch.Tensor)] if isinstance(held, dict) else []


def offloaded_files(weights: Any) -> set[FileMark]:
    """Files with weights, with size and time of change; they are not read."""
    folder = getattr(weights, "save_folder", None) or ""
    paths = {
        info.get("safetensors_file") or os.path.join(folder, f"{name}.dat")
        for name, info in getattr(weights, "index", {}).items()
    }
    return _marks(paths)


def _marks(paths: set[str]) -> set[FileMark]:
    found = [(path, os.stat(path)) for path in paths]
    return {(path, stat.st_size, stat.st_mtime_ns) for path, stat in found}
