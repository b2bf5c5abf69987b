"""Launches Triton kernels without Triton's front end where the compiled kernel is known. Imports Triton.

At each call the front end looks at every argument and at the environment to find the compiled kernel, calls hooks, and
asks the driver what each address is: together several times as long as a launch takes. `dot`, which kernels share,
multiplies two tiles exactly, also under Triton's interpreter.
"""

from functools import cache
from itertools import chain, compress
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver

_ALIGNMENT = 16  # Triton compiles another kernel for addresses, in bytes, and strides that are no multiples of it
# The arguments of a kernel, in the order of its parameters; None for those that a call does not use.
LaunchArguments = tuple[
    tuple[Any, ...],  # tensors, or (tensor, *strides) each
    tuple[int, ...],  # strides, for which Triton specializes the kernel
    tuple[int | None, ...],  # numbers, `do_not_specialize`
    tuple[float | None, ...],
    tuple[int | str | None, ...],  # constants, `tl.constexpr`
]
# In Triton's interpreter a product of bfloat16 is silently wrong, and int8 becomes NaN as bfloat16:
# https://github.com/triton-lang/triton/issues/11584. There, products are of float32.
INTERPRET = tl.constexpr(knobs.runtime.interpret)


class Launcher:
    """Launches a kernel, and keeps its compiled forms by all properties of the arguments that Triton compiles for.

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
        self, grid: tuple[int, int, int], device: torch.device, arguments: LaunchArguments, *, warps: int, stages: int
    ) -> None:
        """Launch the kernel on the current stream of a device.

        Args:
            grid: Programs, in three dimensions.
            device: The device of all tensors.
            arguments: The arguments of the kernel.
            warps: The warps of a program.
            stages: The stages of its pipelined loops.
        """
        # Triton launches on the current device.
        if _several_devices() and device.index not in (None, torch.cuda.current_device()):
            with torch.cuda.device(device):
                self(grid, device, arguments, warps=warps, stages=stages)
            return
        form, given = self._form(arguments) if self._remembers else (None, ())
        key = form and (warps, stages, *form)
        compiled = self._compiled.get(key) if key else None
        if compiled is None:
            # Triton 3.10 no longer fuses products and sums by itself, and 3.9 warns of that.
            options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
            compiled = self._kernel[grid](*chain.from_iterable(arguments), **options)
            if key:
                self._compiled[key] = compiled
            return
        hooks = knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler's
            compiled[grid](*given)
            return
        stream = driver.active.get_current_stream(device.index)
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)

    def _form(self, arguments: LaunchArguments) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]]:
        """Return the key of the compiled kernel, and its arguments with addresses in place of tensors.

        With addresses, the driver need not be asked for them. There is no key where addresses or strides are not
        aligned, or where numbers take 64 bits.
        """
        tensors, strides, numbers, factors, constants = arguments
        kinds = *map(type, tensors), *map(type, numbers), *map(type, factors)
        alone = tensors
        if tuple in kinds:
            alone = tuple([each[0] if type(each) is tuple else each for each in tensors])
            strides = *strides, *[stride for each in tensors if type(each) is tuple for stride in each[1:]]
        addresses = [None if each is None else each.data_ptr() for each in alone]
        looked_at = filter(None, compress(addresses, self._aligned))
        if gcd(*looked_at, *strides) % _ALIGNMENT or max(0, *strides, *filter(None, numbers)) >> 31:
            return None, ()
        if tuple in kinds:
            pairs = zip(tensors, addresses, strict=True)
            addresses = [(at, *each[1:]) if type(each) is tuple else at for each, at in pairs]
        given = *addresses, *arguments[1], *numbers, *factors, *constants
        # With devices, so that Triton sees, and refuses, what is not on a GPU.
        return (constants, *kinds, *[(each.dtype, each.device) for each in alone if each is not None]), given


@cache
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


@triton.jit
def dot(a, b, onto=None):
    """Compute a @ b + onto in float32, without rounding the operands."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, onto, input_precision="ieee")
