"""An H100 that is not there: the host's side of `kvboost_fa2` runs as it does on a GPU, and launches are noted.

Tensors are on the CPU and say that they are not. Triton's front end looks at each launch, but nothing is compiled, and
kernels write nothing. In processes of their own, without Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from unittest import mock


def figures_of(*names: str) -> dict[str, Any]:
    """Calls functions of this module in one process, and returns what they return, by name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.pretended_gpu", *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Compiled:
    """What Triton's front end believes to have compiled."""

    function, packed_metadata = 0, ()

    def __init__(self, source: Any, gpu: "PretendedGPU") -> None:
        self.name, self._gpu = source.fn.__name__, gpu
        gpu.compiled.append(self.name)

    def launch_metadata(self, *given: Any) -> None:
        """None is needed."""

    def run(self, *given: Any) -> None:
        """Launch it: after nine arguments of the launcher's own come those of the kernel."""
        self._gpu.launches.append((self, given[9:]))


class PretendedGPU:
    """What has been compiled, and launched; and what Triton asks of its driver."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.launches: list[tuple[Compiled, tuple[Any, ...]]] = []

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> Any:
        """An H100."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def pretended_gpu() -> Iterator[PretendedGPU]:
    """Have tensors, Triton and `kvboost_fa2` believe that there is one."""
    import torch
    from triton.runtime.driver import driver

    from tests.internals.attention import backends, use_tier
    from tests.internals.triton import codes, dense, mixed, pieces, tiling
    from tests.internals.triton import combine_module as combine

    gpu, h100 = PretendedGPU(), tiling.Device(processors=132, shared_bytes=227 * 1024)

    def device_of(device: torch.device) -> tiling.Device:
        return h100

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", gpu))
        stack.enter_context(mock.patch("triton.compiler.compile", lambda source, **given: Compiled(source, gpu)))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", True))
        for module in (codes, dense, mixed, pieces):
            stack.enter_context(mock.patch.object(module, "device_of", device_of))
        for module in (codes, combine, dense, pieces):  # what an earlier one has compiled is forgotten
            module._launch._compiled.clear()
            module._launch._kernel.device_caches.clear()
        stack.enter_context(mock.patch.object(backends, "_lacking", return_value=None))
        stack.enter_context(use_tier("triton"))
        yield gpu


def _tensors(queries: int, columns: int, dim: int = 128) -> tuple[Any, Any, Any]:
    """As layers give them: of 32 heads, and 8 of keys."""
    import torch

    query = torch.zeros(1, queries, 32, dim, dtype=torch.bfloat16).transpose(1, 2)
    return query, *(torch.zeros(1, 8, columns, dim, dtype=torch.bfloat16) for _ in range(2))  # type: ignore[return-value]


def _pieced(columns: int) -> Any:
    """Two pieces of 128 tokens, and columns behind them."""
    import torch

    from tests.internals.top import PiecedKV, PieceTable

    pieces = tuple(torch.zeros(8, 128, 128, dtype=torch.bfloat16) for _ in range(2))
    table = PieceTable(pieces, pieces, torch.tensor([[[0, 0, -1], [1, 128, -1]]]), 256)
    return PiecedKV(table, *_tensors(1, columns)[1:])


def _coded(columns: int, method: str) -> Any:
    """Two blocks of 128 tokens as codes, and columns behind them."""
    import torch

    from tests.internals.cache import make_codec
    from tests.internals.top import CodedKV

    codec = make_codec(method)
    planes = []
    for role in ("keys", "values"):
        encoded = codec.encode(torch.randn(2, 8, 128, 128, dtype=torch.bfloat16), role, [None, None])
        made = codec.code_planes({name: each[None] for name, each in encoded.items()}, role, None, 128, 128)
        assert made is not None
        planes.append(made)
    return CodedKV(*planes, torch.tensor([128, 128], dtype=torch.int32), 256, 0, *_tensors(1, columns)[1:])  # type: ignore[arg-type, call-arg]


def _layer(query: Any, *held: Any, mask: Any = None, softcap: float | None = None) -> Callable[[], Any]:
    """One layer's attention, as transformers calls it, over keys and values, or over what a cache holds."""
    from functools import partial
    from importlib import import_module

    import torch

    from tests.internals.top import KVHandle

    attention = import_module("kvboost_hf.attention.layer").attention
    if len(held) == 1:
        held = tuple(KVHandle(held[0], lambda: torch.empty(0), query, 0) for _ in range(2))
    given = {"scaling": 0.09, "is_causal": True, "position_ids": None, "use_cache": True, "softcap": softcap}
    return partial(attention, None, query, *held, mask, **given)


def python_calls() -> dict[str, int]:
    """Functions of Python that one layer's attention calls, with all launches, for a token or a short prompt."""
    import torch

    query, key, value = _tensors(1, 4096)
    keep = torch.ones(1, 1, 1, 4096, dtype=torch.bool)
    layers = {
        "plain": _layer(query, key, value),
        "softcap": _layer(query, key, value, softcap=30.0),
        "padded": _layer(query, key, value, mask=keep),
        "suffix": _layer(*_tensors(128, 4096)),
        "square": _layer(*_tensors(64, 64)),
        "pieces": _layer(query, _pieced(70)),
        "int4": _layer(query, _coded(70, "int4")),
        "turboquant": _layer(query, _coded(70, "turboquant")),
    }
    found = {}
    with pretended_gpu(), torch.no_grad():
        for name, layer in layers.items():
            layer()
            calls: list[str] = []

            def note(frame: Any, event: str, _: Any, calls: list[str] = calls) -> None:
                if event == "call":
                    calls.append(frame.f_code.co_name)

            sys.setprofile(note)
            layer()
            sys.setprofile(None)
            found[name] = len(calls)
    return found


def token_calls() -> dict[str, int]:
    """Functions, of Python and of C, that a token of a model with 8 layers calls, by attention."""
    import torch
    from transformers import DynamicCache

    from tests.conftest import make_model

    model, ids, found = make_model("deep_llama").to(torch.bfloat16), torch.ones(1, 20, dtype=torch.long), {}
    with pretended_gpu(), torch.no_grad():
        for attention in ("sdpa", "kvboost_fa2"):
            model.set_attn_implementation(attention)
            cache, count = DynamicCache(config=model.config), 0
            model(ids, past_key_values=cache)

            def note(frame: Any, event: str, _: Any) -> None:
                nonlocal count
                count += event in ("call", "c_call")

            for _ in range(2):  # the first one imports
                count = 0
                sys.setprofile(note)
                model(ids[:, :1], past_key_values=cache)
                sys.setprofile(None)
            found[attention] = count
    return found


def launches() -> dict[str, list[str]]:
    """The kernels of one layer's attention as a token is decoded."""
    import torch

    query, key, value = _tensors(1, 4096)
    keep = torch.ones(1, 1, 1, 4096, dtype=torch.bool)
    layers = {
        "plain": _layer(query, key, value),
        "padded": _layer(query, key, value, mask=keep),
        **{name: _layer(query, _coded(70, name)) for name in ("int4", "turboquant")},
        "pieces": _layer(query, _pieced(70)),
    }
    found = {}
    with pretended_gpu() as gpu, torch.no_grad():
        for name, layer in layers.items():
            gpu.launches.clear()
            layer()
            found[name] = [kernel.name for kernel, _ in gpu.launches]
    return found


def _calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of all kinds, over lengths and alignments of all kinds."""
    import torch

    query = _tensors(1, 1)[0]
    for total in range(1000, 1064):
        keep = torch.ones(1, 1, 1, total + 5, dtype=torch.bool)[..., 5:]
        yield "decoding, plain", _layer(*_tensors(1, total))
        yield "decoding", _layer(*_tensors(1, total), softcap=30.0)
        yield "decoding, padded", _layer(*_tensors(1, total), mask=keep)
        room = (each[:, :, :total] for each in _tensors(1, 2048)[1:])
        yield "decoding, room to spare", _layer(query, *room, softcap=30.0)
    for queries in (17, 100, 128, 333, 1000, 1001, 4096):
        yield "suffixes", _layer(*_tensors(queries, queries + 1777))
    for tail in range(1, 65):
        yield "pieces", _layer(query, _pieced(tail))
        yield "int4", _layer(query, _coded(tail, "int4"))
    for tail in (1, 40):
        yield "turboquant", _layer(query, _coded(tail, "turboquant"))
    _, key, value = _tensors(1, 1000)
    odd = torch.zeros(key.numel() + 1).to(key)[1:].view_as(key)
    yield "odd addresses", _layer(query, odd, value, softcap=30.0)
    yield "float32", _layer(query.float(), key.float(), value.float())
    yield "odd strides", _layer(*(each[..., :72].contiguous() for each in (query, key, value)), softcap=30.0)


def compilations() -> dict[str, Any]:
    """How many kernels calls compile, by kind; and launches for which Triton would have taken another one."""
    import torch

    from tests.internals.triton import Launcher

    found: dict[str, int] = {}
    wrong: list[str] = []
    launch = Launcher.__call__

    with pretended_gpu() as gpu, torch.no_grad():

        def compare(self: Launcher, grid: Any, device: Any, arguments: Any, *, warps: int, stages: int) -> None:
            launch(self, grid, device, arguments, warps=warps, stages=stages)
            chosen, _ = gpu.launches[-1]
            self._kernel[grid](
                *chain.from_iterable(arguments), num_warps=warps, num_stages=stages, enable_fp_fusion=True
            )
            if gpu.launches[-1][0] is not chosen:
                wrong.append(chosen.name)

        with mock.patch.object(Launcher, "__call__", compare):
            for kind, call in _calls():
                before = len(gpu.compiled)
                call()
                found[kind] = found.get(kind, 0) + len(gpu.compiled) - before
    return {"compiled": found, "wrong": wrong, "launches": len(gpu.launches) // 2}


def generation() -> dict[str, Any]:
    """Which kernels prompts, suffixes and tokens of models take with a mask of ones, and how often it is looked at."""
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers import DynamicCache

    from tests.conftest import make_model
    from tests.internals.attention import kernel_calls

    class Looks(TorchFunctionMode):
        """Counts what a GPU would be waited for."""

        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu):
                self.count += 1
            return func(*args, **(kwargs or {}))

    found: dict[str, Any] = {}
    for name in ("llama", "mistral", "gemma2"):
        model = make_model(name).to(torch.bfloat16)
        model.set_attn_implementation("kvboost_fa2")
        cache = DynamicCache()
        with pretended_gpu() as gpu, torch.no_grad():
            for step, (start, stop) in {"prompt": (0, 12), "suffix": (12, 19), "token": (19, 20)}.items():
                gpu.launches.clear()
                before, ids = kernel_calls(), torch.ones(1, stop - start, dtype=torch.long)
                with Looks() as looks:
                    model(ids, attention_mask=torch.ones(1, stop, dtype=torch.long), past_key_values=cache)
                masked = sum(kernel.name == "fwd" and given[6] is not None for kernel, given in gpu.launches)
                calls = dict(kernel_calls() - before)
                found[f"{name}, {step}"] = {"calls": calls, "looks": looks.count, "masked": masked}
    return found


def _main(names: Sequence[str]) -> None:
    sys.stdout.write(json.dumps({name: globals()[name]() for name in names}) + "\n")


def awq() -> dict[str, Any]:
    """Kernels and Python's functions of a linear layer on weights of four bits, for one row."""
    import torch

    from tests.internals.offload import AwqLinear, dispatch
    from tests.internals.triton import launch_module as launch

    def runs(kernel: str, device: torch.device) -> bool:
        return True

    def captures() -> bool:
        return False

    linear, x = AwqLinear(1024, 1024, bias=False, group_size=128), torch.zeros(1, 1, 1024, dtype=torch.float16)
    calls = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with (
        pretended_gpu() as gpu,
        torch.no_grad(),
        mock.patch.object(dispatch, "runs_triton", runs),
        mock.patch.object(launch, "_traits", return_value=launch.traits_of(9, 132)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", captures),
    ):
        linear(x)
        gpu.launches.clear()
        sys.setprofile(note)
        linear(x)
        sys.setprofile(None)
        return {"launches": [kernel.name for kernel, _ in gpu.launches], "compiled": gpu.compiled, "calls": calls}


if __name__ == "__main__":
    _main(sys.argv[1:])
