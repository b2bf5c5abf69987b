"""Builds `products.cpp` with the machine's C++ compiler, and loads the operators in it.

PyTorch's own 4-bit product converts each weight to float32. These operators multiply integers, which takes less than
half as long, and do not round inputs and scales to bfloat16. The library is built when a model in 4 bits is first
loaded on a CPU, and kept for later processes in a folder that belongs to the user. Without a compiler, PyTorch's
product runs.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import torch

from kvboost_hf import forks

SOURCE = Path(__file__).with_name("products.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-mavx2", "-mfma", "-mf16c")
_VNNI = ("-mavx512f", "-mavx512vl", "-mavx512vnni")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of inputs
_TIMEOUT_S = 600.0
_log = logging.getLogger(__name__)
_lock = forks.lock()


class _Library:
    """Whether the library is there: read on each product, and by torch.compile as a constant."""

    asked = False
    loaded = False
    block = 0  # as `load` takes it
    folder: "tempfile.TemporaryDirectory[str] | None" = None  # of the process, where the user's cannot be taken


def is_loaded() -> bool:
    """Whether the operators can be called."""
    return _Library.loaded


def block_of_codes() -> int:
    """Columns of a block of 4-bit codes that the operator multiplies; 0 where there is no operator."""
    return _Library.block if _Library.loaded else 0


def load(block: int) -> bool:
    """Load the operators, and build them before if need be; the first call decides for the process.

    Args:
        block: Columns of a block of 4-bit codes on this machine.

    Returns:
        Whether they can be called. If not, the log says why.
    """
    with _lock:
        if not _Library.asked:
            reason = _reason_against() or _load()
            _Library.asked, _Library.block, _Library.loaded = True, block, reason is None  # unless interrupted
            if reason is None:
                _log.info("4-bit weights on the CPU: operators built from %s.", SOURCE.name)
            else:
                _log.warning(
                    "4-bit weights on the CPU are multiplied by PyTorch's own product, and slowly: %s.", reason
                )
    return _Library.loaded


def _reason_against() -> str | None:
    """Why the operators cannot be built here, or None."""
    if sys.platform != "linux" or not torch.cpu._is_avx2_supported():
        return "others are for Linux and processors with AVX2"
    if _compiler() is None:
        return f"others need a C++ compiler, one of {', '.join(_COMPILERS)} (`apt-get install g++`)"
    return None


def _compiler() -> str | None:
    return next((found for name in _COMPILERS if (found := shutil.which(name)) is not None), None)


def _load() -> str | None:
    """Build the library unless a file has it, and load it; why that failed, or None."""
    compiler = _compiler()
    assert compiler is not None
    flags = [*_FLAGS, *(_VNNI if torch.cpu._is_vnni_supported() else ())]
    name = sha256(repr((SOURCE.read_bytes(), torch.__version__, compiler, flags)).encode()).hexdigest()[:32]
    try:
        path = _folder() / f"products-{name}.so"
        if not path.exists():
            _build(compiler, flags, path)
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except subprocess.CalledProcessError as error:
        return f"others did not compile with {compiler}: {error.stderr.strip()[-2000:]}"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"others could not be built or loaded: {error}"
    torch.library.register_fake("kvboost_hf::int4pack_mm", _shape_of_product)
    torch.library.register_fake("kvboost_hf::int8_mm", _shape_of_product)
    return None


def _folder() -> Path:
    """A folder in which nobody but the user of this process can put libraries."""
    try:
        folder = Path.home() / ".cache" / "kvboost_hf"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home, or none that can be written to
        pass
    if _Library.folder is None:
        _Library.folder = tempfile.TemporaryDirectory(prefix="kvboost_hf-")
    return Path(_Library.folder.name)


def _build(compiler: str, flags: list[str], path: Path) -> None:
    """Compile the source to a file that appears when it is whole."""
    from torch.utils.cpp_extension import include_paths, library_paths  # which imports setuptools

    _log.info("Building %s with %s: this takes some 20 seconds, once.", SOURCE.name, compiler)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        compiled, linked = Path(made, "products.o"), Path(made, path.name)
        included = [f"-I{folder}" for folder in include_paths()]
        _run([compiler, *flags, *included, "-c", str(SOURCE), "-o", str(compiled)])
        # Without -fopenmp, so that the threads are those of PyTorch's own OpenMP.
        searched = [f"-L{folder}" for folder in library_paths()]
        _run([compiler, "-shared", str(compiled), "-o", str(linked), *searched, "-ltorch_cpu", "-lc10"])
        os.replace(linked, path)
    _log.info("Built %s in %.1f s.", path, time.perf_counter() - began)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)


def _shape_of_product(x: torch.Tensor, qweight: torch.Tensor, *_: torch.Tensor | int) -> torch.Tensor:
    return x.new_empty(x.shape[0], qweight.shape[0])
