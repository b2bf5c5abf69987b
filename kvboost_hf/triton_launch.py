"""Launches of Triton kernels that skip Triton's front end where the compiled kernel is known. Imports Triton.

For each call, the front end looks at every argument and at the environment, to find the compiled kernel: several times
as long as the driver then takes to launch it.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton

_ALIGNED = 16  # Triton compiles another kernel for pointers and strides that are no multiples of this


class Arguments(NamedTuple):
    """The arguments of a kernel, in the order of its parameters; what is not asked of it is None."""

    tensors: tuple[Any, ...]  # or (tensor, *strides)
    strides: tuple[int, ...]  # for which Triton specializes the kernel
    numbers: tuple[int | None, ...]  # `do_not_specialize`
    factors: tuple[float | None, ...]
    constants: tuple[int, ...]  # `tl.constexpr`

    def all(self) -> tuple[Any, ...]:
        """One after the other."""
        return (*self.tensors, *self.strides, *self.numbers, *self.factors, *self.constants)


class Launcher:
    """Calls a kernel, and remembers its compiled forms by what Triton compiles them for.

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
        if _several_devices() and device.type == "cuda":  # Triton launches on the current one
            with torch.cuda.device(device):
                self._launch(grid, device, arguments, warps, stages)
        else:
            self._launch(grid, device, arguments, warps, stages)

    def _launch(
        self, grid: tuple[int, int, int], device: torch.device, arguments: Arguments, warps: int, stages: int
    ) -> None:
        key = self._form(arguments, (device.index, warps, stages)) if self._remembers else None
        compiled = self._compiled.get(key) if key is not None else None
        if compiled is not None:
            compiled[grid](*arguments.all())
            return
        # Triton 3.10 no longer fuses products and sums by itself, and 3.9 warns of that.
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        compiled = self._kernel[grid](*arguments.all(), **options)
        if key is not None:
            self._compiled[key] = compiled

    def _form(self, arguments: Arguments, place: tuple[int | None, int, int]) -> tuple[Any, ...] | None:
        """Names the compiled kernel among those of one function; None where there may be several with this name."""
        tensors, strides, numbers, factors, constants = arguments
        aligned, largest = 0, 0
        types: list[torch.dtype | None] = []
        for tensor, is_aligned in zip(tensors, self._aligned, strict=False):
            if tensor is None:
                types.append(None)
                continue
            if type(tensor) is tuple:
                tensor, *own = tensor
                for stride in own:
                    aligned |= stride
                    largest |= stride
            if is_aligned:
                aligned |= tensor.data_ptr()
            types.append(tensor.dtype)
        for stride in strides:
            aligned |= stride
            largest |= stride
        for number in numbers:
            if number is not None:
                largest |= number
        if aligned % _ALIGNED or largest >> 31:
            return None
        return (*place, constants, *types, *[each is None for each in (*numbers, *factors)])


@cache
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1
