"""Launches of Triton kernels that skip Triton's front end where the compiled kernel is known. Imports Triton.

At each call the front end looks at every argument and at the environment to find the compiled kernel, and calls hooks:
together several times as long as the driver takes to launch it.
"""

from functools import cache
from itertools import compress
from math import gcd
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.driver import driver

_ALIGNMENT = 16  # Triton compiles another kernel for addresses, in bytes, and strides that are no multiples of it


# The arguments of a kernel, in the order of its parameters; what is not asked of it is None.
Arguments = tuple[
    tuple[Any, ...],  # tensors, or (tensor, *strides) each
    tuple[int, ...],  # strides, for which Triton specializes the kernel
    tuple[int | None, ...],  # numbers, `do_not_specialize`
    tuple[float | None, ...],
    tuple[int, ...],  # constants, `tl.constexpr`
]


class Launcher:
    """Calls a kernel, and remembers its compiled forms by all that Triton compiles them for.

    Args:
        kernel: A function of `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # On AMD, Triton looks at sizes, too; its interpreter compiles nothing.
        self._remembers = isinstance(kernel, triton.JITFunction) and not torch.version.hip
        self._aligned = [not each.do_not_specialize_on_alignment for each in kernel.params] if self._remembers else []
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], device: torch.device, arguments: Arguments, *, warps: int, stages: int
    ) -> None:
        """Launch it on a device's current stream.

        Args:
            grid: Programs, in three dimensions.
            device: Of all tensors.
            arguments: Of the kernel.
            warps: Of a program.
            stages: Of its pipelined loops.
        """
        # Triton launches on the current device.
        if _several_devices() and device.index not in (None, torch.cuda.current_device()):
            with torch.cuda.device(device):
                self(grid, device, arguments, warps=warps, stages=stages)
            return
        tensors, strides, numbers, factors, constants = arguments
        given = *tensors, *strides, *numbers, *factors, *constants
        key = None
        if self._remembers:
            form = _form(tensors, strides, numbers, self._aligned)
            key = form and (device.index, warps, stages, constants, tuple(map(type, factors)), *form)
            compiled = self._compiled.get(key) if key else None
            if compiled is not None:
                hooks = knobs.runtime
                if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler's
                    compiled[grid](*given)
                    return
                stream, metadata = driver.active.get_current_stream(device.index), compiled.packed_metadata
                compiled.run(*grid, stream, compiled.function, metadata, None, None, None, *given)
                return
        # Triton 3.10 no longer fuses products and sums by itself, and 3.9 warns of that.
        compiled = self._kernel[grid](*given, num_warps=warps, num_stages=stages, enable_fp_fusion=True)
        if key:
            self._compiled[key] = compiled


def _form(
    tensors: tuple[Any, ...], strides: tuple[int, ...], numbers: tuple[int | None, ...], aligned: list[bool]
) -> tuple[Any, ...] | None:
    """Names the kernel that Triton compiles for these; None unless all are aligned, and numbers below 2 ** 31."""
    kinds = *map(type, tensors), *map(type, numbers)
    if tuple in kinds:
        strides = *strides, *[stride for each in tensors if type(each) is tuple for stride in each[1:]]
        tensors = (*[each[0] if type(each) is tuple else each for each in tensors],)
    starts = [each.data_ptr() for each in compress(tensors, aligned) if each is not None]
    if gcd(*starts, *strides) % _ALIGNMENT or max(*strides, *filter(None, numbers)) >> 31:
        return None
    return *kinds, *[each.dtype for each in tensors if each is not None]


@cache
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1
