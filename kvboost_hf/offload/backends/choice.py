"""Chooses the backend for a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from kvboost_hf.offload.backends.base import Backend

_factories: list[Callable[[], Backend]] = []


@contextmanager
def use_backend(make: Callable[[], Backend]) -> Iterator[None]:
    """Stream models with the backends of `make` in this context, as if their device had its own memory."""
    _factories.append(make)
    try:
        yield
    finally:
        _factories.pop()


def is_overridden() -> bool:
    """Whether `use_backend` has chosen the backend."""
    return bool(_factories)


def make_backend(device: torch.device) -> Backend:
    """The backend for a device."""
    if _factories:
        return _factories[-1]()
    if device.type == "cuda":
        from kvboost_hf.offload.backends.cuda import CudaBackend

        return CudaBackend(device)
    from kvboost_hf.offload.backends.threaded import ThreadedBackend

    return ThreadedBackend(device)


def make_mapping(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that maps pinned host memory to a tensor of the device; None if the device cannot read it."""
    if _factories:
        return lambda flat: flat
    if device.type != "cuda":
        return None
    from kvboost_hf.offload.backends.mapped import can_map, map_to_cuda

    return partial(map_to_cuda, device=device) if can_map(device) else None


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if it shares the host's memory."""
    if _factories:
        return 1 << 62
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
