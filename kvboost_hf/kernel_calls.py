"""Counts the calls of each kernel, so that tests and users can tell which ones have run."""

from collections import Counter

import torch

from kvboost_hf import forks

_calls: Counter[str] = Counter()
_lock = forks.lock()


def kernel_calls() -> Counter[str]:
    """Return how often each kernel was called in this process, by `"<backend>.<kernel>"`."""
    with _lock:
        return Counter(_calls)


def count(backend: str, kernel: str) -> None:
    """Count one call, but not while `torch.compile` traces: its graphs hold no lock, and operators count when run."""
    if torch.compiler.is_dynamo_compiling():
        return
    with _lock:
        _calls[f"{backend}.{kernel}"] += 1
