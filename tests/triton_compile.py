"""Kernels in Triton compiled for GPUs that are not here, and what ptxas says of them.

In processes of their own, since Triton's interpreter, which runs the kernels in other tests, leaves no compiler.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

_NAMES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_MMA = r"mma\.sync|wgmma\.mma_async|tcgen05\.mma"
_LOAD = r"ld\.global[\w.:]*"


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as it is called.

    Args:
        kernel: Its name, as `"module:name"`.
        arguments: Of the kernel, by name: numbers, None, for tensors their types, as `pointer` gives them, and tuples.
        capability: 80 for sm_80, and so on.
        warps: Of a program.
        stages: Of its pipelined loops.
    """

    kernel: str
    arguments: dict[str, Any]
    capability: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a kernel became."""

    mma: list[str]  # instructions for tensor cores: "mma.sync", "wgmma.mma_async", "tcgen05.mma"
    loads: list[str]  # instructions for global memory: "ld.global.v4.b32" reads 16 bytes
    registers: int  # of a thread
    stack_bytes: int  # of a thread: where registers are spilled to
    shared_bytes: int


def pointer(x: Any) -> Any:
    """An argument of a kernel as `Launch` has it."""
    if isinstance(x, tuple):
        return tuple(map(pointer, x))
    return _NAMES[x.dtype] if isinstance(x, torch.Tensor) else x


def compile_launches(launches: Sequence[Launch]) -> list[Compiled]:
    """Compile kernels in one process without the interpreter, and without a GPU."""
    given = json.dumps([asdict(launch) for launch in launches])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.triton_compile"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, check=False)
    assert not done.returncode, done.stderr
    return [Compiled(**each) for each in json.loads(done.stdout)]


def _compile(launch: Launch) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = launch.kernel.split(":")
    kernel = getattr(import_module(module), name)
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def type_of(value: Any, at: tuple[int, ...], constant: bool, specialized: bool, aligned: bool) -> Any:
        if isinstance(value, list) and not constant:
            return tuple(type_of(each, (*at, i), constant, specialized, aligned) for i, each in enumerate(value))
        special = isinstance(value, int) and specialized
        if constant or value is None or (special and value == 1):
            constants[at] = value
            return "constexpr"
        pointed = isinstance(value, str)
        if (pointed and aligned) or (special and value % 16 == 0):
            attributes[at] = [["tt.divisibility", 16]]
        return value if pointed else "i32" if isinstance(value, int) else "fp32"

    signature = {}
    for each in kernel.params:
        looked_at = not each.do_not_specialize, not each.do_not_specialize_on_alignment
        signature[each.name] = type_of(launch.arguments[each.name], (each.num,), each.is_constexpr, *looked_at)
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", launch.capability, 32)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    made = triton.compile(source, target=target, options=options)
    used = _resources(made.asm["cubin"])
    mma, loads = (sorted(set(re.findall(each, made.asm["ptx"]))) for each in (_MMA, _LOAD))
    return Compiled(mma, loads, used["REG"], used["STACK"], made.metadata.shared)


def _resources(cubin: bytes) -> dict[str, int]:
    """What the kernel in a cubin takes: REG and STACK, to which registers are spilled, by the names of cuobjdump."""
    import triton.backends.nvidia

    cuobjdump = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", said)}


if __name__ == "__main__":
    found = [_compile(Launch(**each)) for each in json.load(sys.stdin)]
    sys.stdout.write(json.dumps([asdict(each) for each in found]))
