"""The CUDA kernel, compiled by the system's C++ compiler and run on the CPU, thread by thread."""

import ctypes
import shutil
import subprocess
from pathlib import Path

from tests.internals.attention import Arguments, nvrtc

_HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
_ERRORS = {1: "threads wait for each other for ever", 2: "written behind the shared memory"}


class CpuKernel:
    """A `Kernel` for tensors on the CPU.

    Args:
        folder: To compile it in.
        head_dim: As in `compile_attend`.
        value_dim: The same.
        source: The source of the kernel.
    """

    def __init__(self, folder: Path, head_dim: int, value_dim: int, source: str = nvrtc.SOURCE.read_text()) -> None:
        assert COMPILER is not None
        (folder / "attend.cu").write_text(source)
        made = folder / "attend.so"
        options = f"-std=c++17 -O1 -shared -fPIC -DHEAD_DIM={head_dim} -DVALUE_DIM={value_dim}".split()
        places = [f"-I{folder}", f"-I{_HERE}", str(_HERE / "attend.cpp"), "-o", str(made)]
        subprocess.run([COMPILER, *options, *places], check=True)
        self._run = ctypes.CDLL(str(made)).run
        self.calls = 0
        self.backwards = False

    def __call__(self, arguments: Arguments, grid: tuple[int, int, int], threads: int, shared_bytes: int) -> None:
        """Run it, block after block."""
        self.calls += 1
        status = self._run(ctypes.byref(arguments), (ctypes.c_int * 3)(*grid), threads, shared_bytes, self.backwards)
        assert not status, _ERRORS[status]
