"""What K/V depends on besides tokens: configuration, weights, and which of them are active.

Stored K/V is right only for the weights that computed it. Reading all of them at each call would cost more than it
saves, so changes are noticed in two cheap ways: PyTorch's own version counter and address of every tensor (optimizer
steps, loading, moving), and a sample of its values (`param.data += …`, as adapters are merged, counts no version).
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

_SAMPLES_PER_TENSOR = 32


@dataclass(frozen=True, slots=True)
class _Identity:
    """Cheap to compare, and different after any change that PyTorch can see."""

    tensors: tuple[tuple[int, int], ...]  # (data_ptr, _version) of every parameter and buffer
    adapters: str


class ModelFingerprint:
    """Follows one model; `current()` changes whenever its K/V may have changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._identity: _Identity | None = None
        self._groups: list[list[torch.Tensor]] = []  # strided views into the weights, by device and dtype
        self._sampled = b""
        self._value = b""

    def current(self, model: nn.Module) -> bytes:
        """The fingerprint of `model` as it is now."""
        with self._lock:
            tensors, adapters = _walk(model)
            identity = _Identity(tuple((t.data_ptr(), _version(t)) for t in tensors), adapters)
            changed = identity != self._identity
            if changed:
                self._groups = _sample_views(tensors)
            sampled = _read(self._groups)
            if changed or sampled != self._sampled:
                if self._identity is not None:
                    self._epoch += 1
                self._identity, self._sampled = identity, sampled
                self._value = self._digest(model, adapters)
            return self._value

    def bump(self) -> None:
        """Make all that was computed before count as another model's."""
        with self._lock:
            self._epoch += 1
            self._identity = None

    def _digest(self, model: nn.Module, adapters: str) -> bytes:
        digest = blake2b(digest_size=20)
        config = getattr(model, "config", None)
        digest.update(str(config.to_json_string(use_diff=False) if config is not None else type(model)).encode())
        for name, tensor in model.named_parameters():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(adapters.encode())
        digest.update(self._sampled)
        digest.update(self._epoch.to_bytes(8, "little"))
        return digest.digest()


def _walk(model: nn.Module) -> tuple[list[torch.Tensor], str]:
    """All tensors that hold data, and the state of adapters: which are active, which are merged (PEFT's names)."""
    tensors: list[torch.Tensor] = []
    adapters: list[str] = []
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not tensor.is_meta:
                tensors.append(tensor)
        kind: Any = type(module)
        if _is_adapter(kind):
            layer: Any = module
            adapters.append(f"{layer.active_adapters}:{layer.merged}:{layer.disable_adapters}")
    return tensors, ";".join(adapters)


@cache
def _is_adapter(kind: Hashable) -> bool:
    return all(isinstance(getattr(kind, name, None), property) for name in ("active_adapters", "merged"))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _sample_views(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach()
        if not flat.numel() or not flat.is_contiguous():
            continue
        flat = flat.view(-1)
        step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
        groups.setdefault((flat.device, flat.dtype), []).append(flat[::step])
    return list(groups.values())


def _read(groups: list[list[torch.Tensor]]) -> bytes:
    digest = blake2b(digest_size=20)
    for views in groups:
        sample = torch.cat(views).contiguous()
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()
