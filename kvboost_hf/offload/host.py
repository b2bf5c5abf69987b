"""Allocates host memory for streamed layers, exactly as much as they need, pinned for CUDA devices."""

import logging
import math
import mmap
import platform
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
    """Functions that pin and unpin host memory."""

    # Pins memory, given its address and size in bytes; raises RuntimeError if that is refused.
    register: Callable[[int, int], None]
    unregister: Callable[[int], None]  # unpins memory, given its address


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


class LayerMemory:
    """Allocates memory for the streamed layers of one model, and pins as much of it as the system allows.

    PyTorch rounds pinned memory up to powers of two: a layer of 444 MB would take 512.

    Args:
        pinning: How to pin it; None for pageable memory, as for devices other than CUDA.
        kept_bytes: Bytes that remain to be pinned by others after `close`, such as the buffers through which pageable
            memory is copied.
    """

    def __init__(self, pinning: Pinning | None, *, kept_bytes: int = 0) -> None:
        self.pinned_bytes = self.pageable_bytes = 0
        self.refused: str | None = None  # the reason why not all could be pinned
        self._pinning, self._kept_bytes = pinning, kept_bytes
        self._kept: np.ndarray | None = None
        self._least_refused = math.inf  # bytes; nothing as large is tried again

    def allocate(self, nbytes: int, *, must_pin: bool = False) -> torch.Tensor:
        """Zeros, uint8 [nbytes]; pinned, if possible, for as long as the tensor or a view of it lives.

        Args:
            nbytes: The number of bytes.
            must_pin: Whether pageable memory is of no use.

        Raises:
            RuntimeError: `must_pin`, and the system refuses to pin so many bytes more.
        """
        if self._pinning is not None:
            if self._kept_bytes and self._kept is None:
                self._kept = _map(self._kept_bytes)
                self._pin(self._kept, self._pinning)
        owner = _map(nbytes)
        if self._pinning is not None:
            if self._pin(owner, self._pinning):
                self.pinned_bytes += nbytes
            elif must_pin:
                raise RuntimeError(f"{nbytes} bytes of host memory cannot be pinned ({self.refused})")
            else:
                self.pageable_bytes += nbytes
        with torch.inference_mode(False):  # else nobody could write to it outside of inference mode
            return torch.from_numpy(owner)

    def close(self) -> None:
        """Let others pin `kept_bytes`; a warning says how much could not be pinned."""
        self._kept = None
        if self.refused is not None:
            _log.warning(
                "The system pins %.2f GB of host memory and refuses more (%s; `ulimit -l` is %s): %.2f GB of streamed "
                "layers are copied through a buffer, more slowly, and input embeddings that had no room stay on the "
                "device. To pin all, %s; `pin_memory=False` does without.",
                self.pinned_bytes / 1e9,
                self.refused,
                _limit(),
                self.pageable_bytes / 1e9,
                _remedy(),
            )

    def _pin(self, owner: np.ndarray, pinning: Pinning) -> bool:
        """Pin memory for as long as the array lives; returns whether it is pinned."""
        if owner.nbytes >= self._least_refused:
            return False
        address = owner.ctypes.data
        try:
            pinning.register(address, owner.nbytes)
        except RuntimeError as error:
            self._least_refused, self.refused = owner.nbytes, str(error)
            return False
        # Runs when the last view is gone, or at exit, and keeps the mapping until then.
        weakref.finalize(owner, _unpin, pinning, address, owner.base)
        return True


def _map(nbytes: int) -> np.ndarray:
    """Zeros of memory that is this array's alone."""
    if sys.platform == "win32":
        mapping = mmap.mmap(-1, nbytes)
    else:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _limit() -> str:
    """How much this process may pin."""
    if sys.platform == "win32":
        return "not known on Windows"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"


def _remedy() -> str:
    """What to do about the limit."""
    if "microsoft" in platform.release().lower():
        return "give the Windows Subsystem for Linux more memory (`memory=` below [wsl2] in .wslconfig), or use Linux"
    if sys.platform == "win32":
        return "close other programs"
    return "raise the limit (`ulimit -l unlimited`, or `--ulimit memlock=-1` for a container), or lower `host_budget`"


def _unpin(pinning: Pinning, address: int, mapping: object) -> None:
    pinning.unregister(address)


class HostSource:
    """The bytes of a layer in host memory.

    Args:
        flat: The bytes of the layer, uint8 [nbytes], contiguous, on the CPU.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.nbytes = flat.numel()
        self.host: torch.Tensor = flat
        self.contents = None

    def read_into(self, target: torch.Tensor, start: int) -> None:
        target.copy_(self.host[start : start + target.numel()])

    def close(self) -> None:
        """Let go of the memory, which lasts as long as a view of it."""
