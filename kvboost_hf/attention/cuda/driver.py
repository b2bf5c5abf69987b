"""Loads compiled kernels into the memory of a GPU, and launches them with the CUDA driver."""

import ctypes
from functools import cache

import torch

from kvboost_hf.attention.cuda import nvrtc
from kvboost_hf.attention.cuda.launch import Arguments, Kernel, shared_bytes

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # a CUfunction_attribute


@cache
def load(device: torch.device, head_dim: int, value_dim: int) -> Kernel:
    """Compile `attend.cu` for a device, once in a process."""
    major, minor = torch.cuda.get_device_capability(device)
    binary, _ = nvrtc.compile_attend(10 * major + minor, head_dim, value_dim)
    driver, module, function = _open(), ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(driver.cuModuleLoadData(ctypes.byref(module), binary))
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"attend"))
        room = shared_bytes(head_dim, value_dim)
        _check(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, room))

    def run(arguments: Arguments, grid: tuple[int, int, int], threads: int, shared_bytes: int) -> None:
        given = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
            _check(driver.cuLaunchKernel(function, *grid, threads, 1, 1, shared_bytes, stream, given, None))

    return run


@cache
def _open() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        _open().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"The CUDA driver failed: {(name.value or b'unknown error').decode()} ({status}).")
