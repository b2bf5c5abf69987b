"""A pytest plugin that runs tests as on Windows or macOS, as far as Linux can: what Python lacks there is taken away.

    SYSTEM=win32 python -m pytest -p tests.other_system tests/parity/test_generate.py

PyTorch and transformers are imported before, as themselves. Paths, the file system and processes stay those of Linux.
"""

import asyncio
import importlib.abc
import mmap
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401
import filelock
import psutil  # noqa: F401
import pytest
import torch._inductor.codecache
import torch.utils.cpp_extension  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
import uvicorn  # noqa: F401

_MODULES = {"win32": ("fcntl", "grp", "pwd", "resource", "termios"), "darwin": ()}
_ONLY_LINUX = {
    os: "O_DIRECT POSIX_FADV_DONTNEED getrandom memfd_create posix_fadvise posix_fallocate preadv pwritev "
    "sched_getaffinity sched_setaffinity",
    mmap: "MADV_HUGEPAGE MAP_POPULATE",
    socket: "TCP_DEFER_ACCEPT TCP_USER_TIMEOUT",
}
_ONLY_POSIX = {
    os: "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC chown fchmod fchown fork geteuid getgid getpgid getuid "
    "killpg mkfifo pread pwrite register_at_fork setsid sysconf uname",
    mmap: "MAP_ANON MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    signal: "SIGALRM SIGHUP SIGSTOP SIGUSR1 SIGUSR2 setitimer",
}


class _Lacking(importlib.abc.MetaPathFinder):
    """Finds no module of these names.

    Args:
        names: The names of modules.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """See `MetaPathFinder`."""
        if fullname in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """What `FileLock` leaves in a folder, without its lock."""
    path.touch()
    yield


def _pretend(system: str) -> None:
    """Let this process lack what Python lacks on a system: "win32" or "darwin"."""
    if system == "win32":
        asyncio.ProactorEventLoop = asyncio.SelectorEventLoop  # type: ignore[attr-defined]  # which Uvicorn runs there
    filelock.FileLock = _lock  # type: ignore[assignment]  # its own asks the system itself
    sys.platform = system
    sys.meta_path.insert(0, _Lacking(_MODULES[system]))
    for name in _MODULES[system]:
        sys.modules.pop(name, None)
    for lacking in (_ONLY_LINUX, _ONLY_POSIX) if system == "win32" else (_ONLY_LINUX,):
        for module, names in lacking.items():
            for name in names.split():
                if hasattr(module, name):
                    delattr(module, name)


def pytest_report_header() -> str:
    """Say so."""
    return f"as on {sys.platform}"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Begin, before anything of this package is imported."""
    _pretend(os.environ["SYSTEM"])
