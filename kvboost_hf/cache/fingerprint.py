"""What K/V depends on besides tokens: configuration, weights, adapters, hooks, autocast.

Stored K/V is right only for the model as it was when it computed them. Reading all weights at each call would cost
more than it saves, so changes of weights are noticed in cheap ways (`weights.py`), or all of them are read if that is
asked for (`checksum.py`). What can be switched on and off without touching a weight (adapters, forward hooks, scalar
attributes) is read from the modules, and gives the old fingerprint again when it is switched back.
"""

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from kvboost_hf.cache.checksum import checksum
from kvboost_hf.cache.code_names import code_name, is_of_package, is_written_where_it_says, library_versions
from kvboost_hf.cache.foreign import (
    OF_TORCH,
    HookWatch,
    Reached,
    Reader,
    foreign_functions,
    hooks_of_all_modules,
    only_looks,
    watch_hooks,
)
from kvboost_hf.cache.offloaded import (
    FileMark,
    files_at_rest,
    offloaded_files,
    offloaded_tensors,
    weight_maps,
    weights_at_rest,
)
from kvboost_hf.cache.weights import WeightsWatch, plain_tensors
from kvboost_hf.compat import KeptOnModel, frequencies_vary, note_changes

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


class ModelFingerprint:
    """Follows one model; `current()` changes whenever its K/V may have changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bumps = 0  # how often all that was computed before was declared another model's
        self._weights = WeightsWatch()
        self._digests: dict[bool, tuple[Hashable, bytes]] = {}  # full or not -> what was digested, and the result
        self._parts: dict[int, tuple[Any, int]] = {}  # id -> hook or function and its serial; only those in place
        self._next_serial = 0
        self.watched: list[HookWatch] = []  # others' hooks, as they were when this was last asked
        self._durable: tuple[Hashable, bytes] | None = None  # what was digested, and the result

    def look(self, model: nn.Module) -> None:
        """Find out what others have changed in `model`, so that probes of it are told apart by that."""
        with self._lock:
            self._look(model)

    def current(self, model: nn.Module, *, full: bool = False) -> bytes | None:
        """The fingerprint of `model` as it is now; None while a part of it is in training mode.

        What is computed then may be drawn at random.

        Args:
            model: The one that is followed.
            full: Read every weight, so that no change can be missed. Weights that are changed back find their old
                fingerprint again. It never equals one without `full`.
        """
        with self._lock:
            found, serials = self._look(model)
            if found.in_training:
                return None
            switches = (*found.switches, *sorted(found.files), *serials)
            weights: Hashable = checksum(found.tensors, found.used_on) if full else self._weights.epoch(found.tensors)
            state = (switches, weights, self.bumps)
            known = self._digests.get(full)
            if known is None or known[0] != state:
                known = self._digests[full] = state, self._digest(model, state, b"" if full else self._weights.sample)
            return known[1]

    def durable(self, model: nn.Module, *, full: bool = False) -> bytes | str | None:
        """A fingerprint that another process finds, too, for the same model; or why there is none.

        None while a part of the model is in training mode, as `current`.

        All weights are read when it is first asked for, and again when they seem to have changed. Code counts by the
        version of its package, or by its source file; hooks and functions that were put in place one by one cannot
        be told apart across processes.

        Args:
            model: The one that is followed.
            full: Read every weight again. It never equals one without `full`, under which a change may be missed.
        """
        with self._lock:
            found, _ = self._look(model)
            if found.in_training:
                return None
            codes: set[str] = set()
            for part in found.parts:
                name = code_name(part)
                if name is None:
                    return f"{getattr(part, '__qualname__', type(part).__qualname__)} cannot be told apart from others"
                codes.add(name)
            switches = (*found.switches, *sorted(found.files), *sorted(codes))
            weights: Hashable = checksum(found.tensors, found.used_on) if full else self._weights.epoch(found.tensors)
            state = (switches, full, weights, self.bumps)
            if self._durable is None or self._durable[0] != state:
                read = checksum(found.tensors, found.used_on)
                self._durable = state, self._digest(model, (switches, full, library_versions()), read)
            return self._durable[1]

    @property
    def altered(self) -> str | None:
        """Why nothing is known of what the model computes, or None: a hook changes it, or may do so."""
        return next((reason for watch in self.watched if (reason := watch.reason) is not None), None)

    def bump(self) -> None:
        """Make all that was computed before count as another model's."""
        with self._lock:
            self.bumps += 1

    def _look(self, model: nn.Module) -> "tuple[_Found, list[int]]":
        """What there is in the model now, and the serials of its parts."""
        found = _walk(model)
        self.watched = found.watched
        serials = self._serials(found.parts)
        if isinstance(model, PreTrainedModel):
            note_changes(model, (*found.own_configs, *serials[found.foreign]))
        return found, serials

    def _serials(self, parts: Iterable[Any]) -> list[int]:
        """A number for each part: the same as long as it stays in place, never used again."""
        seen: dict[int, tuple[Any, int]] = {}
        numbers: list[int] = []
        for part in parts:
            key = id(part)
            known = seen.get(key) or self._parts.get(key)
            if known is None or known[0] is not part:
                self._next_serial += 1
                known = part, self._next_serial
            seen[key] = known
            numbers.append(known[1])
        self._parts = seen
        return numbers

    def _digest(self, model: nn.Module, state: Hashable, sample: bytes) -> bytes:
        digest = blake2b(digest_size=20)
        _digest_shapes(digest, model)
        digest.update(repr(state).encode())
        digest.update(sample)
        return digest.digest()


def model_name(model: nn.Module) -> bytes:
    """What models of one configuration share, whatever their weights."""
    digest = blake2b(digest_size=20)
    _digest_shapes(digest, model)
    return digest.digest()


@dataclass(slots=True)
class _Found:
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


def _digest_shapes(digest: Any, model: nn.Module) -> None:
    config = getattr(model, "config", None)
    try:
        shown = str(config.to_json_string(use_diff=False) if config is not None else type(model))
    except Exception:  # somebody has put something into it that cannot be written
        shown = repr(_config_scalars(config))
    digest.update(shown.encode())
    for name, tensor in model.named_parameters():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())


def _walk(model: nn.Module) -> _Found:
    found = _Found()
    tensors, switches = found.tensors, found.switches
    switches += [autocast(), *_config_scalars(getattr(model, "config", None))]
    maps: dict[int, Any] = {}
    at_rest: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # of streamed layers
    kinds: dict[type, None] = {}
    held: list[Any] = []  # attributes that may hold values
    seen: set[int] = set()  # ids of modules
    configs = _ids_of_configs(getattr(model, "config", None))
    todo = [model]  # by hand: the generators of model.modules() take three times as long
    while todo:
        module = todo.pop()
        if id(module) in seen:  # of several parents
            continue
        attributes = module.__dict__
        if frequencies_vary(module):  # it writes its frequencies anew at each forward; their regime is in the root
            seen.add(id(module))
            switches += [value for name, value in attributes.items() if name.endswith("attention_scaling")]
            kinds[type(module)] = None
            if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
                _add_hooks(found, module)
            if "forward" in attributes:
                found.parts.append(attributes["forward"])
                held.append(attributes["forward"])
            continue
        if children := attributes["_modules"]:
            todo += [child for child in children.values() if child is not None]
        seen.add(id(module))
        found.in_training |= module.training and not _is_the_same_in_training(module)
        kinds[type(module)] = None
        switches.append(type(module).__qualname__)
        hook = attributes.get("_hf_hook")
        if hook is not None:
            if not is_of_package(type(hook)):
                held.append(hook)
            at_rest |= weights_at_rest(hook)
            found.files |= files_at_rest(hook)
            maps |= {id(weights): weights for weights in weight_maps(hook)}
        for group in (attributes["_parameters"], attributes["_buffers"]):
            if group:
                for tensor in group.values():
                    if id(tensor) in at_rest:
                        kept = at_rest[id(tensor)][1]
                        if kept is not None:
                            found.used_on[id(kept)] = tensor.device
                            tensors.append(kept)
                    elif type(tensor) in _PLAIN:
                        if not tensor.is_meta:
                            tensors.append(tensor)
                    elif tensor is not None:
                        tensors += plain_tensors(tensor)
        if "_active_adapter" in attributes:
            switches += _adapter_switches(module)
            attributes = {name: value for name, value in attributes.items() if name not in _ADAPTER_STATE}
        switches += [v for name, v in attributes.items() if type(v) in _SCALARS and name not in _NOTES]
        for name, value in [item for item in attributes.items() if item[0] not in _READ_ELSEWHERE]:
            if name.startswith(_OURS) or type(value) in _SCALARS or isinstance(value, _PASSED_OVER):
                if isinstance(value, PreTrainedConfig) and id(value) not in configs:  # of its own
                    configs.add(id(value))
                    found.own_configs += _config_scalars(value)
                continue
            if isinstance(value, torch.Tensor):  # neither parameter nor buffer
                if not any(name + suffix in attributes["_parameters"] for suffix in _RECOMPUTED):
                    tensors += plain_tensors(value)
            elif isinstance(value, torch.ScriptObject):  # packed weights
                found.parts.append(value)
            else:
                held.append(value)
        if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            _add_hooks(found, module)
        replaced = attributes.get("forward")  # on the object; accelerate puts the own one there when a hook goes
        if replaced is not None and not any(getattr(by, "leaves_kv_alone", False) for by in (hook, replaced)):
            if replaced != type(module).forward.__get__(module):
                found.parts.append(replaced)
                held.append(replaced)
    found.parts += [getattr(kind, "forward", None) for kind in kinds]
    foreign = foreign_functions(model, kinds)
    found.foreign = slice(len(found.parts), len(found.parts) + len(foreign))
    found.parts += foreign
    switches += found.own_configs
    everywhere = [hook for hooks in hooks_of_all_modules() for hook in hooks.values() if not only_looks(hook)]
    found.parts += everywhere
    held += everywhere
    held += [forward for kind in kinds if not is_of_package(forward := getattr(kind, "forward", None))]
    held += _values_of_classes(kinds)
    if held or foreign:
        _read_values(found, [*held, *foreign], seen)
    for weights in maps.values():
        for tensor in offloaded_tensors(weights):
            tensors += plain_tensors(tensor)
        found.files |= offloaded_files(weights)
    return found


def _values_of_classes(kinds: Iterable[type]) -> list[dict[str, Any]]:
    """Of all classes of modules and what they inherit from, the attributes of those that are not of a package."""
    others = {base: None for kind in kinds for base in kind.__mro__[:-1] if not is_of_package(base)}
    return [{name: value for name, value in vars(base).items() if not name.startswith("__")} for base in others]


def _add_hooks(found: _Found, module: nn.Module) -> None:
    """Add the forward hooks of a module."""
    hooks, watch = watch_hooks(module)
    found.parts += hooks
    if watch is not None:
        found.watched.append(watch)


def _is_the_same_in_training(module: nn.Module) -> bool:
    """Whether a module computes the same in training mode, in which `model.add_adapter()` leaves what it adds."""
    return type(module) in _SAME_IN_TRAINING or type(module).__module__.startswith("peft.tuners.lora")


def _read_values(found: _Found, values: list[Any], modules: set[int]) -> None:
    """Add what attributes, hooks and functions of others can reach, but for the modules of the model."""
    reached = Reached()
    reader = Reader(reached, modules)
    for value in values:
        if not (is_of_package(value) and is_written_where_it_says(value)):
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


def _config_scalars(config: Any) -> list[Hashable]:
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
            found += _config_scalars(value)
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
