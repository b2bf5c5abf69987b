"""A device with memory of its own, on a machine that has none: tensors that say they are on CUDA, and count.

What is queued is done at once, in host memory. What CUDA would do later is kept as clocks: each stream counts its
operations, and knows how far it has waited for others. An operation that reads what another stream has written, or
writes to what another stream still uses, without having waited for it, is a race.

A `non_blocking` copy of pinned memory is queued. For any other copy between host and device, and for a number that is
read, the host waits.
"""

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.internals.top import device_link
from tests.internals.triton import gather_launch as launch

CUDA = torch.device("cuda", 0)
Clock = dict[str, int]  # of each stream, how many of its operations are done


@dataclass(eq=False)
class DoubleStream:
    """A stream, and what it knows of the others."""

    name: str
    clock: Clock = field(default_factory=lambda: defaultdict(int))

    def wait_event(self, event: "DoubleEvent") -> None:
        _merge(self.clock, event.clock)


@dataclass(eq=False)
class DoubleEvent:
    """A point in a stream."""

    gpu: "DoubleDevice"
    clock: Clock

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _merge(self.gpu.host, self.clock)


@dataclass
class _Use:
    written: tuple[str, int] = ("", 0)
    read: Clock = field(default_factory=dict)


class DoubleTensor(torch.Tensor):
    """A tensor on the device: `inner` is what it holds. PyTorch's own code takes it to be on its "meta" device."""

    inner: torch.Tensor  # type: ignore[assignment]
    gpu: "DoubleDevice"

    @staticmethod
    def __new__(cls, inner: torch.Tensor, gpu: "DoubleDevice") -> "DoubleTensor":
        made: DoubleTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",  # type: ignore[arg-type]
        )
        made.inner, made.gpu = inner, gpu
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DoubleTensor({self.inner!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        gpu = next(leaf.gpu for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DoubleTensor))
        return gpu.do(func, args, kwargs or {})


class DoubleDevice:
    """The device, and the `Link` to it."""

    def __init__(self, *, gathers: bool = False) -> None:
        self._gathers = gathers
        self.kept: list[tuple[Sequence[torch.Tensor], DoubleEvent]] = []
        self.names = {
            "cuda",
            "meta",
        }  # of the device in operators; without the second one, tensors without data remain
        self.blocking: list[str] = []  # what the host has waited for
        self.races: list[str] = []
        self.sent: list[tuple[str, int, int]] = []  # copies to the device: the stream, its clock, and bytes
        self.work: Counter[str] = Counter()  # operations on the device that are no views
        self.host: Clock = defaultdict(int)
        self.pinned_bytes = 0
        self.held_bytes = self.most_bytes = 0  # of memory on the device that tensors have now, and had at the peak
        self._streams = {"compute": DoubleStream("compute")}
        self._using = threading.local()
        self._uses: dict[int, _Use] = {}  # by address of the memory
        self._pinned: set[int] = set()
        self._holders: Counter[int] = Counter()  # tensors, by address of their memory on the device
        self._alive: list[torch.Tensor] = []  # memory that has been used is not given to others
        self._lock = threading.RLock()

    # As a link

    def is_apart(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def stream(self, name: str, device: torch.device) -> DoubleStream:
        return self._streams.setdefault(name, DoubleStream(name))

    def current(self, device: torch.device) -> DoubleStream:
        found: DoubleStream = getattr(self._using, "stream", self._streams["compute"])
        return found

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        before, self._using.stream = self.current(CUDA), stream
        yield
        self._using.stream = before

    def record(self, stream: Any, *, timed: bool = False) -> DoubleEvent:
        return DoubleEvent(self, dict(stream.clock))

    def send(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        with _Dispatch(self):  # in whatever thread
            return host.to(device, non_blocking=True)

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        pass

    def pinned(self, shape: torch.Size, dtype: torch.dtype, *, warns: bool = True) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        self._pinned.add(made.untyped_storage().data_ptr())
        self.pinned_bytes += made.nbytes
        weakref.finalize(made, self._unpin, made.untyped_storage().data_ptr(), made.nbytes)
        return made

    def _unpin(self, memory: int, nbytes: int) -> None:
        self._pinned.discard(memory)
        self.pinned_bytes -= nbytes

    def is_pinned(self, host: torch.Tensor) -> bool:
        return not isinstance(host, DoubleTensor) and _memory(host) in self._pinned

    def gathers(self, device: torch.device) -> bool:
        return self._gathers

    def gather(self, opened: Sequence[Any], table: Any, places: Sequence[tuple[int, int]]) -> None:
        """The kernel, in Triton's interpreter; what it reads of the host is what it writes."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            launch([part.inner for part in opened], table.inner, places)
            self.work["gather"] += 1
            self._queue("gather", reads=[table.inner], writes=[part.inner for part in opened])
            stream = self.current(CUDA)
            nbytes = sum(part.inner.nbytes for part in opened)
            self.sent.append((stream.name, stream.clock[stream.name], nbytes))

    def keep(self, host: Sequence[torch.Tensor], event: Any) -> None:
        self.kept.append((host, event))

    def free_bytes(self, device: torch.device) -> int:
        return 1 << 30

    def sent_by(self, stream: str, until: int | None = None) -> int:
        """Bytes that a stream has copied to the device, up to a point of its clock."""
        return sum(size for name, at, size in self.sent if name == stream and (until is None or at <= until))

    # As a device

    @contextmanager
    def in_place(self) -> Iterator["DoubleDevice"]:
        """Within it `device="cuda:0"` is this device, in this thread."""
        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            patch.setattr(device_link, "link", self)
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            device_link.staging_of.cache_clear()
            stack.callback(device_link.staging_of.cache_clear)
            stack.enter_context(_Functions())
            stack.enter_context(_Dispatch(self))
            yield self

    def do(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator of which some tensors may be on the device."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            return self._do(func, args, dict(kwargs))

    def _do(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = {id(each.inner): each for each in tensors if isinstance(each, DoubleTensor)}
        there = [each for each in tensors if not isinstance(each, DoubleTensor) and each.ndim]
        asked = kwargs.get("device")
        on_device = bool(here) if asked is None else torch.device(asked).type in self.names
        if name == "copy_":
            on_device = isinstance(args[0], DoubleTensor)
        if not here and not on_device:
            return func(*args, **kwargs)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        waits = name == "_local_scalar_dense"
        if name in ("copy_", "_to_copy") and (there or not here or not on_device):
            queued = args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False)
            waits = not (queued and there and _memory(there[0]) in self._pinned)
            if on_device:
                stream = self.current(CUDA)
                self.sent.append((stream.name, stream.clock[stream.name] + 1, tensors[-1].nbytes))
        elif here and there and name.startswith("index"):  # PyTorch copies numbers of the host to the device
            waits = True
        elif here and there:
            raise RuntimeError(f"{name}: tensors are on the host and on the device")
        plain_args, plain_kwargs = tree_map(_inner, (args, kwargs))
        found = func(*plain_args, **plain_kwargs)
        if not func.is_view:
            self.work[name] += 1
            self._note(func, name, here, plain_args, plain_kwargs, found if on_device else None)
        if waits:
            self.blocking.append(name)
            _merge(self.host, self.current(CUDA).clock)
        if name == "copy_":
            return args[0]
        if not on_device or name == "_local_scalar_dense":
            return found

        given = {_memory(leaf) for leaf in tree_leaves((plain_args, plain_kwargs)) if isinstance(leaf, torch.Tensor)}

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in here:
                return here[id(leaf)]
            made = DoubleTensor(leaf, self)
            if _memory(leaf) not in given or self._holders[_memory(leaf)]:
                self._hold(made)
            return made

        return tree_map(wrapped, found)

    def _queue(self, name: str, *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Keep the clocks of the memory that a kernel has used."""
        stream = self.current(CUDA)
        _merge(stream.clock, self.host)
        stream.clock[stream.name] += 1
        now = stream.clock[stream.name]
        for tensor in (*reads, *writes):
            use = self._uses.setdefault(_memory(tensor), _Use())
            by, at = use.written
            if by and stream.clock[by] < at:
                self.races.append(f"{name} on {stream.name} does not wait for what {by} has written")
            use.read[stream.name] = now
        for tensor in writes:
            late = [other for other, when in self._uses[_memory(tensor)].read.items() if stream.clock[other] < when]
            self.races += [f"{name} on {stream.name} writes to what {other} still reads" for other in late]
            self._uses[_memory(tensor)] = _Use((stream.name, now))

    def _hold(self, tensor: DoubleTensor) -> None:
        """Count the memory of a tensor for as long as it, or another tensor of that memory, lives."""
        memory, nbytes = _memory(tensor.inner), tensor.inner.untyped_storage().nbytes()
        if not self._holders[memory]:
            self.held_bytes += nbytes
            self.most_bytes = max(self.most_bytes, self.held_bytes)
        self._holders[memory] += 1
        weakref.finalize(tensor, self._let_go, memory, nbytes)

    def _let_go(self, memory: int, nbytes: int) -> None:
        with self._lock:
            self._holders[memory] -= 1
            if not self._holders[memory]:
                self.held_bytes -= nbytes

    def _note(self, func: Any, name: str, here: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Keep the clocks of the memory that an operator has used; `found` is what it has written on the device."""
        stream = self.current(CUDA)
        _merge(stream.clock, self.host)
        stream.clock[stream.name] += 1
        now = stream.clock[stream.name]
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        written = set(map(_memory, made))
        for given, told in zip((*args, *kwargs.values()), _told(func, args, kwargs), strict=True):
            for leaf in tree_leaves(given):
                if id(leaf) not in here:
                    continue
                use = self._uses.setdefault(_memory(leaf), _Use())
                by, at = use.written
                if by and stream.clock[by] < at:
                    self.races.append(f"{name} on {stream.name} does not wait for what {by} has written")
                if told is not None and told.is_write:
                    late = [other for other, when in use.read.items() if stream.clock[other] < when]
                    self.races += [f"{name} on {stream.name} writes to what {other} still reads" for other in late]
                    written.add(_memory(leaf))
                use.read[stream.name] = now
        for memory in written:
            self._uses[memory] = _Use((stream.name, now))
        self._alive += made


def _told(func: Any, args: Sequence[Any], kwargs: Any) -> list[Any]:
    """Of each argument, whether it is written to."""
    by_name = {each.name: each.alias_info for each in func._schema.arguments}
    return [each.alias_info for each in func._schema.arguments[: len(args)]] + [by_name[name] for name in kwargs]


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, DoubleTensor) else leaf


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _merge(clock: Clock, other: Clock) -> None:
    for name, at in other.items():
        clock[name] = max(clock.get(name, 0), at)


class _Dispatch(TorchDispatchMode):
    """Operators without a tensor on the device that ask for one there."""

    def __init__(self, gpu: DoubleDevice) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.do(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that make tensors below the operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == "cuda":
            return func(*args, **{**kwargs, "device": None}).to(device)
        if func is torch.Tensor.tolist and isinstance(args[0], DoubleTensor):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)
