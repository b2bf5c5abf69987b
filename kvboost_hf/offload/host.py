"""Allocates host memory for streamed layers, exactly as much as they need, pinned for CUDA devices."""

import logging
import mmap
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

if sys.platform != "win32":
    import resource

_log = logging.getLogger(__name__)
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


@dataclass(frozen=True, slots=True)
class Pinning:
    """Functions that pin and unpin host memory.

    Args:
        register: Pins memory, given its address and size in bytes; raises RuntimeError if that is refused.
        unregister: Unpins memory, given its address.
    """

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]


def cuda_pinning(device: torch.device) -> Pinning:
    """Pinning for copies to a CUDA device: the current one, if it has no index."""
    # Another may be the current one when memory is unpinned.
    device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def register(address: int, nbytes: int) -> None:
        with torch.cuda.device(device):  # on another one it would make a context, which takes memory
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
        if code:
            # CUDA would report the error once more, to the next kernel that is launched.
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
            raise RuntimeError(f"cudaHostRegister returned {code}")

    def unregister(address: int) -> None:
        torch.cuda.synchronize(device)  # a copy may still read it
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    return Pinning(register, unregister)


class HostMemory:
    """Allocates memory for the streamed layers of one model.

    PyTorch rounds pinned memory up to powers of two: a layer of 444 MB would take 512.

    Args:
        total_bytes: Bytes that all layers will take, for messages.
        pinning: How to pin it; None for pageable memory, as for devices other than CUDA.
    """

    def __init__(self, total_bytes: int, pinning: Pinning | None) -> None:
        self.pinned_bytes = 0
        self._total_bytes, self._pinning = total_bytes, pinning

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeros, uint8 [nbytes]; pinned, if possible, for as long as the tensor or a view of it lives."""
        if sys.platform == "win32":
            mapping = mmap.mmap(-1, nbytes)
        else:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        owner = np.frombuffer(mapping, np.uint8)
        if self._pinning is not None:
            self._pin(owner, mapping, self._pinning)
        with torch.inference_mode(False):  # else nobody could write to it outside of inference mode
            return torch.from_numpy(owner)

    def _pin(self, owner: np.ndarray, mapping: mmap.mmap, pinning: Pinning) -> None:
        address = owner.ctypes.data
        try:
            pinning.register(address, owner.nbytes)
        except RuntimeError as error:
            self._pinning = None
            _log.warning(
                "Only %d of %d bytes of streamed layers could be pinned in host memory (%s; `ulimit -l` is %s). The "
                "others are copied right, but more slowly. Raise the limit (`ulimit -l unlimited`, or `--ulimit "
                "memlock=-1` for a container), lower `host_budget`, or set `pin_memory=False` to do without.",
                self.pinned_bytes,
                self._total_bytes,
                error,
                _limit(),
            )
            return
        self.pinned_bytes += owner.nbytes
        # Runs when the last view is gone, or at exit, and keeps the mapping until then.
        weakref.finalize(owner, _unpin, pinning, address, mapping)


def _limit() -> str:
    """How much this process may pin."""
    if sys.platform == "win32":
        return "not known on Windows"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"


def _unpin(pinning: Pinning, address: int, mapping: mmap.mmap) -> None:
    pinning.unregister(address)


class HostSource:
    """The bytes of a layer in host memory.

    Args:
        flat: Its bytes, uint8 [nbytes], contiguous, on the CPU.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.nbytes = flat.numel()
        self.host, self.path = flat, None

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """See `Source.read_into`."""
        target.copy_(self.host[start : start + target.numel()])
