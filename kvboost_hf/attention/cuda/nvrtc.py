"""Compiles `attend.cu` with NVRTC, and loads and launches it with the CUDA driver.

The extra `kvboost_hf[cuda]` installs NVRTC; no CUDA toolkit is needed.
"""

import ctypes
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from kvboost_hf.attention.cuda.launch import Arguments, Kernel, shared_bytes
from kvboost_hf.errors import how_to_install

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # a CUfunction_attribute
SOURCE = Path(__file__).with_name("attend.cu")
_WHEELS = {
    "nvidia-cuda-nvrtc-cu12": "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    "nvidia-cuda-nvrtc": "nvidia/cu13/lib/libnvrtc.so.13",  # comes with PyTorch for CUDA 13; neither knows sm_70
}


def library() -> Path | None:
    """The path of NVRTC, or None where it is not installed."""
    for wheel, name in _WHEELS.items():
        with suppress(PackageNotFoundError):
            return Path(str(distribution(wheel).locate_file(name)))
    return None


def compile_attend(architecture: int, head_dim: int, value_dim: int, *options: str) -> tuple[bytes, str]:
    """Compile `attend.cu`.

    Args:
        architecture: The GPU's compute capability, without the dot: 75 for sm_75.
        head_dim: The size of a query or a key; a multiple of 16.
        value_dim: The size of a value; a multiple of 16.
        options: Further options of NVRTC.

    Returns:
        The binary for that architecture, and the log of the compiler.

    Raises:
        ImportError: NVRTC is not installed.
        RuntimeError: The source does not compile; with the compiler's log.
    """
    nvrtc = _open()
    program = ctypes.c_void_p()
    source = SOURCE.read_bytes()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None))
    try:
        given = (
            f"--gpu-architecture=sm_{architecture}",
            f"--include-path={SOURCE.parent}",
            "--std=c++17",
            f"--define-macro=HEAD_DIM={head_dim}",
            f"--define-macro=VALUE_DIM={value_dim}",
            *options,
        )
        encoded = (ctypes.c_char_p * len(given))(*(each.encode() for each in given))
        status = nvrtc.nvrtcCompileProgram(program, len(given), encoded)
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0\n").decode()
        if status:
            raise RuntimeError(f"NVRTC could not compile {SOURCE.name} for sm_{architecture}:\n{log}")
        return _read(nvrtc, program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _open() -> ctypes.CDLL:
    path = library()
    if path is None:
        raise ImportError(f"The CUDA kernel needs NVRTC: {how_to_install('cuda')}.")
    nvrtc = ctypes.CDLL(str(path))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc, nvrtc[f"nvrtcGet{what}"](program, text))
    return text.raw


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(status).decode()}.")


@cache
def load(device: torch.device, head_dim: int, value_dim: int) -> Kernel:
    """Compile `attend.cu` for a device, once in a process."""
    major, minor = torch.cuda.get_device_capability(device)
    binary, _ = compile_attend(10 * major + minor, head_dim, value_dim)
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _require_success(driver.cuModuleLoadData(ctypes.byref(module), binary))
        _require_success(driver.cuModuleGetFunction(ctypes.byref(function), module, b"attend"))
        room = shared_bytes(head_dim, value_dim)
        _require_success(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, room))

    def run(arguments: Arguments, grid: tuple[int, int, int], threads: int, shared_bytes: int) -> None:
        given = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
            _require_success(driver.cuLaunchKernel(function, *grid, threads, 1, 1, shared_bytes, stream, given, None))

    return run


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _require_success(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"The CUDA driver failed: {(name.value or b'unknown error').decode()} ({status}).")
