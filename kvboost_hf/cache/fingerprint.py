"""What K/V depends on besides tokens: configuration, weights, adapters, hooks, autocast.

Stored K/V is right only for the model as it was when it computed them. Reading all weights at each call would cost
more than it saves, so changes are noticed in two cheap ways: PyTorch's own version counter and address of every tensor
(optimizer steps, loading, moving), and a sample of its values (`param.data += …`, as adapters are merged, counts no
version). What can be switched on and off without touching a weight (adapters, forward hooks, scalar attributes) is
read from the modules, and gives the old fingerprint again when it is switched back.
"""

import threading
from collections.abc import Hashable, Iterable
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

_SAMPLES_PER_TENSOR = 32
_SCALARS = frozenset((float, bool, str))
# transformers puts hooks that only look on a part of a model when that part's hidden states are first asked for, as
# some vision towers' are with the first image.
_CAPTURING = "_output_capturing_hooks_installed"
_CAPTURING_MODULE = "transformers.utils.output_capturing"


class ModelFingerprint:
    """Follows one model; `current()` changes whenever its K/V may have changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0  # counts changes of weights
        self._versions: tuple[tuple[int, int], ...] | None = None  # (data_ptr, _version) of every tensor
        self._groups: list[list[torch.Tensor]] = []  # strided views into the weights, by device and dtype
        self._sample = b""
        self._switches: tuple[Hashable, ...] = ()
        self._value: bytes | None = None
        self._hooks: dict[int, tuple[Any, int]] = {}  # id -> hook and its serial number; only those in place
        self._next_serial = 0

    def current(self, model: nn.Module) -> bytes | None:
        """The fingerprint of `model` as it is now; None while a part of it is in training mode.

        What is computed then may be drawn at random.
        """
        with self._lock:
            tensors, switches, in_training = self._walk(model)
            if in_training:
                return None
            versions = tuple((t.data_ptr(), _version(t)) for t in tensors)
            if versions != self._versions:
                self._groups = _sample_views(tensors)
            sample = _read(self._groups)
            if versions != self._versions or sample != self._sample:
                self._epoch += self._versions is not None
                self._versions, self._sample, self._value = versions, sample, None
            if switches != self._switches:
                self._switches, self._value = switches, None
            if self._value is None:
                self._value = self._digest(model)
            return self._value

    def bump(self) -> None:
        """Make all that was computed before count as another model's."""
        with self._lock:
            self._epoch += 1
            self._value = None

    def _walk(self, model: nn.Module) -> tuple[list[torch.Tensor], tuple[Hashable, ...], bool]:
        """All tensors that hold data, all that can be switched without touching one, and whether dropout may act."""
        tensors: list[torch.Tensor] = []
        switches: list[Hashable] = [_autocast(model), _num_layers(model)]
        hooks: list[Any] = []
        in_training = False
        todo = [model]  # by hand: the generators of model.modules() take three times as long
        while todo:
            module = todo.pop()
            todo += [child for child in module._modules.values() if child is not None]
            in_training |= module.training
            for held in (module._parameters, module._buffers):
                if held:
                    tensors += [t for t in held.values() if t is not None and not t.is_meta]
            attributes = module.__dict__
            switches.append(f"{type(module).__module__}.{type(module).__qualname__}")
            switches += [v for name, v in attributes.items() if type(v) in _SCALARS and name != _CAPTURING]
            if module._forward_pre_hooks or module._forward_hooks:
                hooks += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
            if "_active_adapter" in attributes:  # PEFT
                layer: Any = module
                switches += [str(layer.active_adapters), str(layer.merged_adapters), bool(layer.disable_adapters)]
                switches.append(str(attributes.get("scaling")))
        return tensors, (*switches, *self._serials(hooks)), in_training

    def _serials(self, hooks: Iterable[Any]) -> list[int]:
        """A number for each hook: the same as long as it stays in place, never used again."""
        seen: dict[int, tuple[Any, int]] = {}
        for hook in hooks:
            if getattr(getattr(hook, "__self__", None), "leaves_kv_alone", False):
                continue
            if getattr(hook, "__module__", None) == _CAPTURING_MODULE:
                continue
            key = id(hook)
            if key not in self._hooks or self._hooks[key][0] is not hook:
                self._next_serial += 1
                seen[key] = (hook, self._next_serial)
            else:
                seen[key] = self._hooks[key]
        self._hooks = seen
        return [serial for _, serial in seen.values()]

    def _digest(self, model: nn.Module) -> bytes:
        digest = blake2b(digest_size=20)
        config = getattr(model, "config", None)
        digest.update(str(config.to_json_string(use_diff=False) if config is not None else type(model)).encode())
        for name, tensor in model.named_parameters():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(repr(self._switches).encode())
        digest.update(self._sample)
        digest.update(self._epoch.to_bytes(8, "little"))
        return digest.digest()


def _num_layers(model: nn.Module) -> int | None:
    """Early-exit drafting lowers the configured number for the length of a call."""
    config = getattr(model, "config", None)
    return getattr(config, "num_hidden_layers", None)


def _autocast(model: nn.Module) -> Hashable:
    kind = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
    if not torch.is_autocast_enabled(kind):
        return torch.get_float32_matmul_precision()
    return kind, torch.get_autocast_dtype(kind), torch.get_float32_matmul_precision()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _sample_views(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        view = tensor.detach()
        if not view.numel():
            continue
        if view.is_contiguous():
            view = view.view(-1)
        per_dim = max(2, round(_SAMPLES_PER_TENSOR ** (1 / max(view.ndim, 1))))
        for dim, size in enumerate(view.shape):
            view = view[(slice(None),) * dim + (slice(None, None, max(1, size // per_dim)),)]
        groups.setdefault((view.device, view.dtype), []).append(view)
    return list(groups.values())


def _read(groups: list[list[torch.Tensor]]) -> bytes:
    digest = blake2b(digest_size=20)
    for views in groups:
        sample = torch.cat([view if view.ndim == 1 else view.reshape(-1) for view in views])
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()
