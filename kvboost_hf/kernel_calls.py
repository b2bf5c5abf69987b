"""Which kernels have run, counted: so that tests and users can tell that it was not another one."""

import threading
from collections import Counter

import torch

_calls: Counter[str] = Counter()
_lock = threading.Lock()


def kernel_calls() -> Counter[str]:
    """How often each kernel was called in this process, as `"<tier>.<kernel>"`."""
    with _lock:
        return Counter(_calls)


def count(tier: str, kernel: str) -> None:
    """Count one call; not while `torch.compile` traces, whose graphs hold no lock: operators count inside."""
    if torch.compiler.is_dynamo_compiling():
        return
    with _lock:
        _calls[f"{tier}.{kernel}"] += 1
