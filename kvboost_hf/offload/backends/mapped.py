"""Maps pinned host memory to a CUDA tensor, for tables of which a GPU reads a few rows at a time."""

import ctypes
import logging
import sys
from typing import Any

import torch

from kvboost_hf.offload.host import HostMemory, cuda_pinning

_log = logging.getLogger(__name__)


class _Described:
    """Memory under the CUDA array interface."""

    def __init__(self, flat: torch.Tensor, address: int) -> None:
        self.flat = flat  # lives as long as the tensor that is made of this
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (flat.numel(),),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def map_to_cuda(flat: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same bytes as a tensor of the device, without a copy.

    Args:
        flat: uint8 [nbytes], in pinned memory.
        device: A CUDA device. It reads the bytes over the link, each time anew.

    Raises:
        RuntimeError: they are not in pinned memory, or the device cannot read it.
    """
    with torch.cuda.device(device), torch.inference_mode(False):
        return torch.as_tensor(_Described(flat, _device_address(flat)), device=device)


def _device_address(flat: torch.Tensor) -> int:
    """The address by which the current device reads pinned memory: on Windows and WSL2 it is not that of the host."""
    if torch.version.hip:
        return flat.data_ptr()
    found = ctypes.c_uint64()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(flat.data_ptr()), 0)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the CUDA driver cannot be asked: {error}") from error
    if code:
        raise RuntimeError(f"cuMemHostGetDevicePointer returned {code}")
    return found.value


def can_map(device: torch.device) -> bool:
    """Whether a device can read mapped host memory, found out by reading some."""
    try:
        flat = HostMemory(cuda_pinning(device)).allocate(4096, must_pin=True)
        # from_pretrained() asks while the meta device is the default one.
        flat.copy_(torch.arange(4096, device="cpu") % 251)
        rows = map_to_cuda(flat, device).view(torch.float16).view(64, 32)
        chosen = torch.tensor([3, 60, 3], device="cpu")
        found = torch.nn.functional.embedding(chosen.to(device), rows)
        same = torch.equal(found.cpu().view(torch.int16), flat.view(torch.int16).view(64, 32)[chosen])
    except (RuntimeError, TypeError, ValueError) as error:
        _log.info("%s cannot read mapped host memory: %s", device, error)
        return False
    return same
