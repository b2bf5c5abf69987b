"""Kernels in Triton compiled for GPUs that are not here, and what ptxas says of them.

In a process of its own, since Triton's interpreter, which runs the kernels in other tests, leaves no compiler.
"""

import atexit
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
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
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_DONE = "compiled: "
_MMA = r"mma\.sync|wgmma\.mma_async|tcgen05\.mma"
_LOAD = r"ld\.global[\w.:]*"


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as it is called.

    Args:
        kernel: The name of the kernel, as `"module:name"`.
        arguments: The kernel's, by name: numbers, None, tuples, and for tensors their types as `pointer` gives them.
        capability: 80 for sm_80, and so on.
        warps: The warps of a program.
        stages: The stages of its pipelined loops.
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
    loops: list[dict[str, int]]  # instructions of each loop in SASS, with those of loops inside it, as they end
    flushes: bool  # whether sums or products take numbers that are not normal for zero
    registers: int  # of a thread
    stack_bytes: int  # of a thread: where registers are spilled to
    shared_bytes: int


def pointer(x: Any) -> Any:
    """An argument of a kernel as `Launch` has it."""
    if isinstance(x, tuple):
        return tuple(map(pointer, x))
    return _NAMES[x.dtype] if isinstance(x, torch.Tensor) else x


@cache
def targets() -> frozenset[int]:
    """The GPUs that the programs which come with Triton can write instructions for: 80 for sm_80, and so on."""
    said = subprocess.run([_tool("ptxas"), "--help"], capture_output=True, text=True, check=True).stdout
    return frozenset(int(each) for each in re.findall(r"'sm_(\d+)'", said))


@cache
def _compiler() -> "subprocess.Popen[str]":
    """A process without the interpreter, and without a GPU, that compiles what it is given in a line."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.triton_compile"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    atexit.register(process.communicate)  # which ends it
    return process


def compile_launch(launch: Launch) -> Compiled:
    """Compile a kernel."""
    process = _compiler()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asdict(launch)) + "\n")
    process.stdin.flush()
    said: list[str] = []
    for line in process.stdout:
        if line.startswith(_DONE):
            return Compiled(**json.loads(line.removeprefix(_DONE)))
        said.append(line)
    _compiler.cache_clear()  # it has ended
    raise AssertionError("".join(said))


class Kernels:
    """Kernels that are compiled when they are first asked for.

    Args:
        launches: By any key.
    """

    def __init__(self, launches: Mapping[Any, Launch]) -> None:
        self._launches = dict(launches)
        self._compiled: dict[Any, Compiled] = {}

    def __getitem__(self, key: Any) -> Compiled:
        if key not in self._compiled:
            self._compiled[key] = compile_launch(self._launches[key])
        return self._compiled[key]


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
    code = sass(made.asm["cubin"])
    flushes = re.search(r"(FADD|FMUL|FFMA)2?\.[\w.]*FTZ", code) is not None
    loops = loop_instructions(code)
    return Compiled(mma, loads, loops, flushes, used["REG"], used["STACK"], made.metadata.shared)


def sass(cubin: bytes) -> str:
    """The instructions of the kernel in a cubin, with labels."""
    return _ask("nvdisasm", "-c", cubin)


def loop_instructions(sass: str) -> list[dict[str, int]]:
    """How many instructions each loop has, by their names without modifiers, such as FFMA or LOP3.

    A loop is what lies between a branch and a label before it that it goes to.
    """
    labels: dict[str, int] = {}
    found: list[str] = []
    loops: list[dict[str, int]] = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?\s*(\w+)[^`]*(?:`\((\.L_\w+)\))?", line):
            found.append(instruction[1])
            begin = labels.get(instruction[2], len(found))
            if begin < len(found) - 1:  # not the one that a kernel ends with, which goes to itself
                loops.append(dict(Counter(found[begin:])))
    return loops


def _resources(cubin: bytes) -> dict[str, int]:
    """What the kernel in a cubin takes: REG and STACK, to which registers are spilled, by the names of cuobjdump."""
    said = _ask("cuobjdump", "-res-usage", cubin)
    return {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", said)}


def _ask(tool: str, option: str, cubin: bytes) -> str:
    """What one of the programs that come with Triton says of a cubin."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool(tool), option, file.name], capture_output=True, text=True, check=True).stdout


def _tool(name: str) -> Path:
    import triton.backends.nvidia

    return Path(triton.backends.nvidia.__file__).parent / "bin" / name


if __name__ == "__main__":
    for given in sys.stdin:
        sys.stdout.write(f"{_DONE}{json.dumps(asdict(_compile(Launch(**json.loads(given)))))}\n")
        sys.stdout.flush()
