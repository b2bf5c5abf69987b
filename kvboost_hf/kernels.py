"""Finds out whether Triton can launch kernels on this machine, and counts the calls of each kernel.

At the first launch Triton compiles C code of its own, which talks to the driver of the GPU. Without a C compiler that
fails. So Triton itself is asked for its driver, once, before any kernel is chosen; it is not imported where nothing
asks for it. `kernel_calls` tells tests and users which kernels have run.
"""

import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch

from kvboost_hf import forks

_logger = logging.getLogger(__name__)
_INSTALL = "pip install triton-windows" if sys.platform == "win32" else "pip install triton"
_COMPILER = "install gcc and the headers of libc, on Debian and Ubuntu by `apt-get install gcc libc6-dev`"
_HEADERS = "install the headers of libc and Python, on Debian and Ubuntu by `apt-get install libc6-dev python3-dev`"
_calls: Counter[str] = Counter()
_lock = forks.lock()


class Missing(NamedTuple):
    """The requirement of Triton that a machine lacks."""

    what: str  # the requirement, as a noun phrase
    remedy: str  # what to do about it


def triton_runs(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device; a warning says once in a process what a GPU lacks.

    Which GPUs a kernel is for is the caller's to know.
    """
    missing = missing_for_triton(device)
    if missing is not None and device.type == "cuda":
        _warn(missing)
    return missing is None


def missing_for_triton(device: torch.device) -> Missing | None:
    """What Triton lacks to run kernels on a device, or None.

    Args:
        device: A GPU, or the CPU, on which kernels run in Triton's interpreter alone.
    """
    if find_spec("triton") is None:
        return Missing("the package triton", _INSTALL)
    try:
        from triton import knobs
    except ImportError as error:
        return Missing(f"what it imports: {error}", _INSTALL)
    if knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return Missing("a GPU, or TRITON_INTERPRET=1 in the environment", "run on a GPU")
    return _missing_on_gpus()


@cache
def _missing_on_gpus() -> Missing | None:
    from triton.runtime.driver import driver

    try:
        active = driver.active  # compiled now, or read from Triton's cache
    except subprocess.CalledProcessError as error:
        return Missing(f"headers of C, without which {error.cmd[0]} fails", _HEADERS)
    except (RuntimeError, AssertionError, ImportError, OSError) as error:
        if not _has_compiler():
            return Missing("a C compiler", _COMPILER)
        return Missing(f"access to the driver of the GPU: {error}", "see that `import triton` works beside the GPU")
    # Before Triton 3.7 each kernel has a launcher in C as well.
    if hasattr(import_module(type(active).__module__), "make_launcher") and not _has_compiler():
        return Missing("a C compiler", _COMPILER)
    return None


def _has_compiler() -> bool:
    """Whether Triton finds a compiler, looked for as `triton.runtime.build` does."""
    from triton import knobs

    named = os.environ.get("CC")
    if knobs.build.impl is not None:  # such as the compiler that triton-windows brings
        return True
    return shutil.which(named) is not None if named else any(map(shutil.which, ("gcc", "clang")))


@cache
def _warn(missing: Missing) -> None:
    _logger.warning(
        "Triton's kernels cannot run on the GPU: Triton lacks %s. Slower operations of PyTorch take their place. "
        "To have the kernels, %s, and start again.",
        missing.what,
        missing.remedy,
    )


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
