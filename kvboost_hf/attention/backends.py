"""Chooses the backend, whose kernels `kvboost_fa2` runs, for each device and dtype, and logs the choice once.

The public names say "tier" for a backend.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal, get_args

import torch

from kvboost_hf.kernels import missing_for_triton, triton_runs

Backend = Literal["triton", "cuda", "cpu", "sdpa", "reference"]

_logger = logging.getLogger(__name__)
_forced: ContextVar[Backend | None] = ContextVar("kvboost_backend", default=None)

_DESCRIPTIONS: dict[Backend, str] = {
    "triton": "Triton kernels",
    "cuda": "CUDA kernels for sm_70 and sm_75, compiled at run time",
    "cpu": "PyTorch's CPU flash attention, in parts without a mask",
    "sdpa": "scaled_dot_product_attention with an explicit mask",
    "reference": "plain PyTorch operations",
}


def active_tier(device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Backend:
    """Return the backend that `kvboost_fa2` runs on a device.

    Args:
        device: By default the GPU, or the CPU where there is none.
        dtype: The dtype of queries, keys and values; by default float16.

    Returns:
        `"triton"` (sm_80 and later, AMD), `"cuda"` (sm_70 and sm_75 in float16, with the `[cuda]` extra), `"cpu"`,
        `"sdpa"` with an explicit mask, or `"reference"`.

    Example:
        >>> active_tier("cpu")
        'cpu'
    """
    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    return backend_of(place, dtype or torch.float16)


def backend_of(device: torch.device, dtype: torch.dtype = torch.float16) -> Backend:
    """Return the backend that runs, which is the one of `use_tier` within it."""
    return _forced.get() or _choose(device, dtype)


@contextmanager
def use_tier(tier: Backend) -> Iterator[None]:
    """Run another backend than the active one in this thread, to compare them.

    Calls for which the backend has no kernel run on SDPA or as plain operations, as they do without this.

    Raises:
        ValueError: The backend is unknown, or cannot run on this machine.
    """
    if tier not in get_args(Backend):
        raise ValueError(f"`tier` must be one of {get_args(Backend)}, got {tier!r}.")
    if lacking := _lacking(tier):
        raise ValueError(f"`tier` must be one that runs here, got {tier!r}, which needs {lacking}. Pass 'cpu'.")
    token = _forced.set(tier)
    try:
        yield
    finally:
        _forced.reset(token)


def _lacking(backend: Backend) -> str | None:
    """What a backend needs that is not here, or None."""
    has_gpu = torch.cuda.is_available()
    if backend == "triton":
        missing = missing_for_triton(torch.device("cuda" if has_gpu else "cpu"))
        return missing and f"{missing.what} ({missing.remedy})"
    return "a CUDA GPU" if backend == "cuda" and not has_gpu else None


@cache
def _choose(device: torch.device, dtype: torch.dtype) -> Backend:
    backend = _best(device, dtype)
    name = str(dtype).removeprefix("torch.")
    _logger.info("kvboost_fa2 on %s in %s: %s.", device, name, _DESCRIPTIONS[backend])
    return backend


def _best(device: torch.device, dtype: torch.dtype) -> Backend:
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return "sdpa"
    if (torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0)) and triton_runs(device):
        return "triton"
    from kvboost_hf.attention.cuda import runs_on

    return "cuda" if runs_on(device, dtype) else "sdpa"
