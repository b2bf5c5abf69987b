"""Settings that K/V depends on besides weights: configurations, autocast, PEFT's adapters, and what rounds."""

import json
import platform
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

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


def autocast() -> Hashable:
    """The precision this thread computes with: float32 matmul precision, and autocast by device type."""
    found: tuple[Hashable, ...] = (torch.get_float32_matmul_precision(),)
    for kind in _device_kinds():
        if torch.is_autocast_enabled(kind):
            found += ((kind, torch.get_autocast_dtype(kind)),)
    return found


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


@cache
def _device_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
