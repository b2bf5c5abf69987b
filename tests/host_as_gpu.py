"""The host, taken for a GPU that does everything at once: what code asks of `torch.cuda` is answered, and counted.

Tensors that are to be on CUDA are on the CPU. So whatever runs on a GPU alone, such as events, graphs, pinned copies
and figures of memory, runs where there is none, with right results; only that it comes too early is never seen. For
that, see `device_double.py` and `offload/simulated_cuda.py`.

    python -m tests.host_as_gpu SCRIPT [ARGUMENT ...]

runs a script so, and prints the counts as JSON in its last line. Launches of Triton kernels are noted, and write
nothing: see `pretended_gpu.py`.
"""

import importlib
import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.pretended_gpu import pretended_gpu

counts: Counter[str] = Counter()  # of what was asked for
_allocated: list[torch.Tensor] = []


class Event:
    """A point in time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._timed, self._at = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        counts["events"] += 1
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, end: "Event") -> float:
        assert self._timed
        assert end._timed
        assert end._at >= self._at > 0
        return 1000 * (end._at - self._at)


class Stream:
    """One of those that do everything at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        counts["streams"] += 1

    def wait_event(self, event: Event) -> None:
        counts["waits of streams"] += 1

    def wait_stream(self, stream: "Stream") -> None:
        counts["waits of streams"] += 1

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        counts["waits of the host"] += 1


class Graph:
    """Counts what is replayed; what was captured has run."""

    def replay(self) -> None:
        counts["replays"] += 1


class Runtime:
    """Of `torch.cuda.cudart()`."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        counts["registered bytes"] += nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


_current = Stream()


def _counting(name: str, value: Any = None) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        counts[name] += 1
        return value

    return call


def _sleep(cycles: int) -> None:
    counts["sleeps"] += 1
    assert cycles > 0


def _memory(*_: Any) -> int:
    counts["figures of memory"] += 1
    return 1_000_000


CUDA: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "CUDAGraph": Graph,
    "graph": lambda graph, **_: nullcontext(counts.update({"captures": 1})),
    "stream": lambda stream: nullcontext(),
    "device": lambda device: nullcontext(),
    "current_stream": lambda device=None: _current,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "get_device_name": lambda device=None: "the host, as a GPU",
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=4, major=9, minor=0),
    "cudart": Runtime,
    "mem_get_info": lambda device=None: (1 << 34, 1 << 35),
    "memory_allocated": _memory,
    "max_memory_allocated": _memory,
    "max_memory_reserved": _memory,
    "synchronize": _counting("waits of the host"),
    "reset_peak_memory_stats": _counting("figures of memory"),
    "empty_cache": _counting("emptied caches"),
    "_sleep": _sleep,
}


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )


class _OnHost(TorchFunctionMode):
    """What is to be on CUDA, or in pinned memory, is in host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: torch.device("cpu") if _is_cuda(value) else value for key, value in (kwargs or {}).items()}
        name = getattr(func, "__name__", "")
        if kwargs.pop("pin_memory", False):
            counts["pinned tensors"] += 1
        if name == "is_pinned":
            return True
        if name in ("pin_memory", "cuda"):
            return args[0]
        if name == "copy_" and (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            counts["queued copies"] += 1
        if name not in ("__get__", "device"):  # torch.device("cuda") is what it is
            args = tuple(torch.device("cpu") if _is_cuda(each) else each for each in args)
        return func(*args, **kwargs)


@contextmanager
def host_as_gpu() -> Iterator[None]:
    """Within it the host is the device "cuda", in this thread."""
    with ExitStack() as stack:
        for name, value in CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", _counting("recorded streams")))
        stack.enter_context(_OnHost())
        yield


def main() -> None:
    """Run a script, its folder first on the path, as Python does."""
    from tests.internals.offload import dispatch
    from tests.internals.triton import launch_module as launch

    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # other threads would know of no GPU
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    patches = {
        (launch, "_traits"): lambda device: launch.Traits(4, 64, False),
        (dispatch, "runs_triton"): lambda kernel, device: True,
        (importlib.import_module("clock"), "MOST_INPUTS"): 2,
    }
    with host_as_gpu(), pretended_gpu() as gpu, ExitStack() as stack:
        for (module, name), value in patches.items():
            stack.enter_context(mock.patch.object(module, name, value))
        runpy.run_path(script, run_name="__main__")
    counts["launches"] = len(gpu.launches)
    sys.stdout.write("\n" + json.dumps(counts) + "\n")
    sys.stdout.flush()
    os._exit(0)  # host memory that is unregistered later would find no GPU


if __name__ == "__main__":
    main()
