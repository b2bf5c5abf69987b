"""Detects changed weights without reading all of them, and without keeping any of them in memory.

`weight.data` is a tensor in the memory of a parameter with a version counter of its own, so that a write through it
does not change the parameter's counter. The first prompt therefore makes `nn.Parameter.data` a property. It hashes the
memory of a weight that a cache depends on before it returns the tensor. From then on each prompt hashes that memory
again, until the model alone refers to it.
"""

import ctypes
import logging
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from math import gcd
from operator import attrgetter, methodcaller
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from kvboost_hf import forks
from kvboost_hf.checksum import checksum
from kvboost_hf.compat import own_hook

_SAMPLES_PER_TENSOR = 32
_READ_WHOLE = 128  # tensors of up to this many values
_GOLDEN = 0.6180339887
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_MAX_DEPTH = 3
_HOST = "cpu"

# Storage offset, size and stride of the values that are read; None for all of a short vector.
Window = tuple[int, tuple[int, ...], tuple[int, ...]] | None
# Versions, implementations, and of tensors that are not read at their addresses, these and their memories.
Marks = tuple[list[int], list[int], list[tuple[int, int, int]]]
Forms = tuple[list[torch.Size], list[bool], list[tuple[int, ...]]]  # shapes, which are contiguous, strides of others


class WeightsWatch:
    """Follows a list of tensors; `epoch()` changes when one of them seems to have changed.

    PyTorch's own bookkeeping (address, version, shape) shows most changes. Fused optimizers do not count their writes:
    a hook on the steps of all optimizers does. Writes through `weight.data` are found by
    hashing memory that was handed out (`Memories`), and many other changes by a sample of the values. Memory is
    referred to weakly: a reused address is not taken for the old memory, and memory that a user frees is free. Weights
    whose memory was taken from them, until hooks of others bring it back, are taken for changed each time.

    Some forwards write to weights and leave them as they are, such as those of PEFT's `target_parameters` and of
    embeddings with a `max_norm`. Weights with a new version and the same sample are hashed, from the second time on to
    see whether anything has changed. A hook may undo at one token what it has written at another.
    """

    def __init__(self) -> None:
        _follow_optimizers()
        self.last_epoch = -1
        self._marks: Marks | None = None
        self._forms: Forms | None = None
        self._memories = Memories([])
        self._writes: int | None = None
        self.without_memory = False  # some weight had none when last asked: nobody can see what it will hold
        self._in_place = _SampleInPlace([])
        # Of other tensors, by device and dtype: their indices, and which of their values are read.
        self._windows: list[list[tuple[int, Window]]] = []
        self._read_on_host = b""
        self._samples: list[torch.Tensor] = []  # by device, and word or dtype
        self._contents: dict[int, Hashable] = {}  # hashes of those whose version has changed, by their memory
        self._said_what_is_read = False

    def epoch(self, tensors: list[torch.Tensor], hooked: bool = False) -> int:
        """How often the tensors have changed. Where others have `hooked` the model, each write counts as a change."""
        with torch.inference_mode():  # views cost less in it
            marks = _marks(tensors, self._in_place.elsewhere)
            same = marks == self._marks or (not hooked and self._are_rewritten(tensors, marks))
            same = same and _forms(tensors) == self._forms and self._memories.writes(tensors) == self._writes
            in_place = self._in_place.read(tensors) if same else None
            if in_place is None:
                self.without_memory = lack_memory(tensors)
                self._memories = Memories(tensors)
                self._writes = self._memories.writes(tensors)
                self._in_place, self._windows = _SampleInPlace(tensors), _windows(tensors)
                self._marks, self._forms = _marks(tensors, self._in_place.elsewhere), _forms(tensors)
                same, in_place = False, self._in_place.read(tensors)
            if in_place is None:  # another thread has given a weight other memory just now
                self._marks = None
                return self.epoch(tensors, hooked)
            on_host, samples = in_place
            samples += _read(tensors, self._windows)
            same = same and on_host == self._read_on_host and all(map(torch.equal, samples, self._samples))
            if not same or self.without_memory:
                self.last_epoch += 1
                self._read_on_host, self._samples = on_host, samples
        return self.last_epoch

    def _are_rewritten(self, tensors: list[torch.Tensor], marks: Marks) -> bool:
        """Whether only versions differ, and the content of these tensors is what it was at their last new version."""
        before, known, self._contents = self._marks, self._contents, {}
        if before is None or marks[1:] != before[1:] or _forms(tensors) != self._forms or lack_memory(tensors):
            return False
        written = [at for at, (now, then) in enumerate(zip(marks[0], before[0], strict=True)) if now != then]
        if not {*written}.isdisjoint(self._in_place.elsewhere):
            return False
        in_place = self._in_place.read(tensors)
        if in_place is None or in_place[0] != self._read_on_host:
            return False
        if not all(map(torch.equal, in_place[1] + _read(tensors, self._windows), self._samples)):
            return False
        memories = {tensors[at].untyped_storage()._cdata: tensors[at] for at in written}
        found = {memory: _content(tensor) for memory, tensor in memories.items()}
        self._contents = known | found
        if found.items() - known.items():
            return False
        if not self._said_what_is_read:
            self._said_what_is_read = True
            nbytes = sum([tensor.untyped_storage().nbytes() for tensor in memories.values()])
            _say_what_is_read(nbytes, "forwards of the model write to them")
        self._marks = marks
        return True

    @property
    def sample(self) -> bytes:
        """A hash of the values that were read last."""
        digest = blake2b(self._read_on_host, digest_size=20)
        for sample in self._samples:
            digest.update(sample.cpu().numpy().tobytes())
        return digest.digest()


@cache
def _follow_optimizers() -> None:
    """Have the steps of optimizers seen from now on: before, for they may raise half way; and after."""
    own_hook(register_optimizer_step_pre_hook, _note_step)
    own_hook(register_optimizer_step_post_hook, _note_step)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # what is compiled counts its writes
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for tensor in plain_tensors(parameter):
                note_write(tensor)


def plain_tensors(tensor: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors that hold the data of `tensor`, which may be a quantized weight made of several."""
    kind = type(tensor)
    if isinstance(tensor, torch.Tensor):
        if kind not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                yield from plain_tensors(getattr(tensor, name), depth + 1)
            return
        if not tensor.is_meta and tensor.layout is torch.strided:
            yield tensor
        if kind in _PLAIN:
            return
    if depth < _MAX_DEPTH:
        for value in getattr(tensor, "__dict__", {}).values():  # scales and the like, kept beside the data
            if isinstance(value, torch.Tensor) or type(value).__name__ == "QuantState":
                yield from plain_tensors(value, depth + 1)


_ADDRESS, _CONTIGUOUS, _STORAGE = map(methodcaller, ("data_ptr", "is_contiguous", "untyped_storage"))
_MEMORY, _SHAPE, _VERSION = map(attrgetter, ("_cdata", "shape", "_version"))
_IMPLEMENTATION = _MEMORY  # of a tensor, which `torch.utils.swap_tensors` exchanges


def _marks(tensors: list[torch.Tensor], elsewhere: Sequence[int]) -> Marks:
    try:
        versions = list(map(_VERSION, tensors))
    except RuntimeError:  # those made in inference mode have none
        versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
    rest = [(at, tensors[at].data_ptr(), tensors[at].untyped_storage()._cdata) for at in elsewhere]
    return versions, list(map(_IMPLEMENTATION, tensors)), rest


def _forms(tensors: Sequence[torch.Tensor]) -> Forms:
    contiguous = list(map(_CONTIGUOUS, tensors))
    strides = [tensor.stride() for tensor, is_one in zip(tensors, contiguous, strict=True) if not is_one]
    return list(map(_SHAPE, tensors)), contiguous, strides


class _SampleInPlace:
    """Values of tensors that are read at their addresses: a view of each would take PyTorch longer than all together.

    `elsewhere` has the numbers of those that are not read so.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._at = [at for at, tensor in enumerate(tensors) if _is_sampled_in_place(tensor)]
        self.elsewhere = sorted(set(range(len(tensors))).difference(self._at))
        self._memories = [tensors[at].untyped_storage()._cdata for at in self._at]
        self._addresses = addresses = [tensors[at].data_ptr() for at in self._at]
        found: dict[tuple[torch.device, int], list[NDArray[np.int64]]] = {}  # addresses of words, by their size
        for at, address in zip(self._at, addresses, strict=True):
            tensor = tensors[at]
            word = gcd(tensor.element_size(), address, 8)
            inside = np.arange(0, tensor.element_size(), word)
            values = address + tensor.element_size() * _places(tensor)
            found.setdefault((tensor.device, word), []).append((values[:, None] + inside).ravel())
        # Memory as words, and which of them.
        self._on_host: list[tuple[NDArray[Any], NDArray[np.int64]]] = []
        self._on_devices: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (device, word), groups in found.items():
            places = np.concatenate(groups)
            first, last = int(places.min()), int(places.max())
            words, count = (places - first) // word, (last - first) // word + 1
            if device.type == _HOST:
                memory: Any = (ctypes.c_char * (count * word)).from_address(first)
                self._on_host.append((np.frombuffer(memory, dtype=f"u{word}"), words))
            else:
                self._on_devices.append(
                    (_device_words(device, first, count, word), torch.from_numpy(words).to(device))
                )

    def read(self, tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[torch.Tensor]] | None:
        """The values in host memory, and those on devices, by device and word.

        None if the tensors, those of the constructor, have other memory now.
        """
        own = [tensors[at] for at in self._at] if self.elsewhere else tensors
        storages = list(map(_STORAGE, own))  # hold the memory while it is read
        if list(map(_MEMORY, storages)) != self._memories or list(map(_ADDRESS, own)) != self._addresses:
            return None
        on_host = b"".join([memory.take(places).tobytes() for memory, places in self._on_host])
        return on_host, [memory.take(places).view(torch.uint8) for memory, places in self._on_devices]


class _DeviceWords:
    """Memory of a CUDA device, as other libraries hand it to PyTorch, which does not own it then."""

    def __init__(self, address: int, count: int, word: int) -> None:
        kind = f"<i{word}" if word > 1 else "|u1"
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (count,), "typestr": kind, "version": 2}


def _device_words(device: torch.device, address: int, count: int, word: int) -> torch.Tensor:
    """All memory of a device from an address on, as words; only those that belong to tensors may be read."""
    return torch.as_tensor(_DeviceWords(address, count, word), device=device)  # with another one, it would be copied


@cache
def _reads_addresses(device: torch.device) -> bool:
    """Whether memory of a device can be read at its addresses, as seen with a tensor whose values are known."""
    if device.type == _HOST:
        return True
    if device.type != "cuda":
        return False
    known = torch.arange(64, dtype=torch.int32, device=device)
    try:
        words = _device_words(device, known.data_ptr(), 64, 4)
        return words.device == known.device and torch.equal(words.take(known.long()), known)
    except (RuntimeError, TypeError, ValueError):
        return False


def _is_sampled_in_place(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read at its address."""
    return (
        type(tensor) in _PLAIN and _reads_addresses(tensor.device) and tensor.data_ptr() != 0 and _is_in_memory(tensor)
    )


def _is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values, and memory for them, which FSDP takes from its weights between their forwards."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.numel()) and tensor.untyped_storage().nbytes() >= end


def lack_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the memory of some tensor was taken from it, until its next forward."""
    return any(map(_lacks_memory, tensors))


def _lacks_memory(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.numel() > 0 and not _is_in_memory(tensor)


def _places(tensor: torch.Tensor) -> NDArray[np.int64]:
    """Which values of a tensor are read, counted in its memory from its first one on."""
    window = _window(tensor)
    sizes, strides = window[1:] if window is not None else (tuple(tensor.shape), tensor.stride())
    at = np.zeros(1, dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        at = (at[:, None] + stride * np.arange(size)).ravel()
    return at


def _windows(tensors: list[torch.Tensor]) -> list[list[tuple[int, Window]]]:
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Window]]] = {}
    for idx, tensor in enumerate(tensors):
        if tensor.numel() and not _is_sampled_in_place(tensor) and not _lacks_memory(tensor):
            groups.setdefault((tensor.device, tensor.dtype), []).append((idx, _window(tensor)))
    return list(groups.values())


def _window(tensor: torch.Tensor) -> Window:
    offset = int(tensor.storage_offset())
    if not tensor.is_contiguous():
        per_dim = max(2, round(_SAMPLES_PER_TENSOR ** (1 / max(tensor.ndim, 1))))
        steps = [max(1, size // per_dim) for size in tensor.shape]
        sizes = tuple(-(-size // step) for size, step in zip(tensor.shape, steps, strict=True))
        return offset, sizes, tuple(stride * step for stride, step in zip(tensor.stride(), steps, strict=True))
    count = tensor.numel()
    if count <= _READ_WHOLE:
        return (offset, (count,), (1,)) if tensor.ndim != 1 else None
    step = count // _SAMPLES_PER_TENSOR
    columns = tensor.shape[-1]
    if tensor.ndim > 1 and 8 < columns <= step:  # walk through the columns, too, rather than down the same one
        step = step // columns * columns - round(columns * (1 - _GOLDEN))
    return offset, (-(-count // step),), (step,)


def _read(tensors: list[torch.Tensor], groups: list[list[tuple[int, Window]]]) -> list[torch.Tensor]:
    """The values in the windows, of each group in one tensor of bytes."""
    samples: list[torch.Tensor] = []
    for group in groups:
        views = [
            tensors[idx].as_strided(window[1], window[2], window[0]) if window is not None else tensors[idx]
            for idx, window in group
        ]
        sample = torch.cat([view if view.ndim == 1 else view.reshape(-1) for view in views])
        samples.append(sample.view(torch.uint8))
    return samples


_log = logging.getLogger("kvboost_hf")

_MANY_BYTES = 2**26  # of weights that somebody else holds, too: to read them takes a while
_READ_IN_PLACE = "cpu"  # device whose memory is read without PyTorch, which may be tracing or counting
_DATA: Any = torch.Tensor.data
_uses: Any = torch._C._storage_Use_Count  # 0 when the memory is gone
_lock = forks.rlock()  # between handing memory out and finding that nobody holds it


class Memory:
    """The memory of one or more weights, referred to weakly."""

    __slots__ = ("__weakref__", "_content", "_storage", "address", "writes")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # no other gets its address
        self.address: int = storage._cdata
        self.writes = 0  # how often its content was found changed
        self._content: Hashable = None  # a hash of it when last read; None while nobody else can write to it

    @property
    def is_shared(self) -> bool:
        """Whether somebody else may write to it."""
        return self._content is not None

    def share(self, weight: torch.Tensor) -> None:
        """Note that somebody else holds it, or is about to."""
        if self._content is None:
            self._content = _content(weight)
            _note()

    def count_write(self) -> None:
        """Count a write."""
        self.writes += 1
        _note()

    def look(self, weight: torch.Tensor, known: int) -> None:
        """Count a write if the content has changed, and check whether more than `known` tensors still refer to it."""
        with _lock:
            shared = _holders(weight) > known
            now = _content(weight)
            if now != self._content:
                self.count_write()
            self._content = now if shared else None


class Memories:
    """The memories of a list of tensors, to which no reference is kept."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        _make_property()
        self._noted = -1  # how much had been noted of all memory when it was last looked at
        self._shared: list[int] = []  # numbers of those that somebody else may write to
        self._writes = 0
        indices: dict[int, list[int]] = {}  # of tensors, by address
        elsewhere = 0
        with _lock:
            self._memories = []
            for index, tensor in enumerate(tensors):
                memory = _memory(tensor)
                if memory.address not in indices:
                    self._memories.append(memory)
                indices.setdefault(memory.address, []).append(index)
            self._at = [first for first, *_ in indices.values()]
            self._known = [len({id(tensors[index]) for index in group}) for group in indices.values()]
            for memory, group, known in zip(self._memories, indices.values(), self._known, strict=True):
                weight = tensors[group[0]]
                are_weights = all(isinstance(tensors[index], nn.Parameter) for index in group)
                if are_weights and _holders(weight) > known:  # through a `data` that was taken before, maybe
                    memory.share(weight)
                    elsewhere += weight.untyped_storage().nbytes()
        _say_what_is_read(elsewhere, "somebody else holds them, too: a state_dict(), or `weight.data`")

    def writes(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """How many writes were found so far to the tensors of the constructor, in the same memory."""
        if self._shared or self._noted != _noted:
            self._noted = _noted
            for number in [n for n, memory in enumerate(self._memories) if memory.is_shared]:
                self._memories[number].look(tensors[self._at[number]], self._known[number])
            self._shared = [n for n, memory in enumerate(self._memories) if memory.is_shared]
            self._writes = sum([memory.writes for memory in self._memories])
        return self._writes


def _say_what_is_read(nbytes: int, why: str) -> None:
    if nbytes > _MANY_BYTES:
        told = "%d MiB of weights are read before each prompt, to see whether they have changed, for %s."
        _log.warning(told, nbytes >> 20, why)


_all: WeakValueDictionary[int, Memory] = WeakValueDictionary()  # by address
_noted = 0  # how often any memory was written to or handed out


def note_write(tensor: torch.Tensor) -> None:
    """Count a write to the memory of a tensor, if that of a weight."""
    with _lock:
        if (memory := _all.get(tensor.untyped_storage()._cdata)) is not None:
            memory.count_write()


def _note() -> None:
    global _noted
    _noted += 1


def _memory(weight: torch.Tensor) -> Memory:
    storage = weight.untyped_storage()
    memory = _all.get(storage._cdata)
    if memory is None:
        memory = _all[storage._cdata] = Memory(storage)
    return memory


def _make_property() -> None:
    if "data" not in nn.Parameter.__dict__:
        nn.Parameter.data = property(_get_data, _set_data, doc=_DATA.__doc__)  # type: ignore[assignment]


def _get_data(weight: nn.Parameter) -> torch.Tensor:
    with _lock:
        with torch._C.DisableTorchFunctionSubclass():  # parameters without memory refuse to be asked for it
            memory = _all.get(weight.untyped_storage()._cdata)
        if memory is not None:
            memory.share(weight)
        data: torch.Tensor = _DATA.__get__(weight)
    return data


def _set_data(weight: nn.Parameter, data: torch.Tensor) -> None:
    _DATA.__set__(weight, data)  # whoever holds `data` is noticed when the weight is found elsewhere


def _holders(weight: torch.Tensor) -> int:
    """How many tensors hold the memory of `weight`, arrays of NumPy and other libraries over it included."""
    storage = weight.untyped_storage()
    uses: int = _uses(storage._cdata)
    return uses - _uses_by_python()


def are_held_by_more(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether more tensors, or arrays over them, hold the memory of one of these than are listed."""
    storages = list(map(_STORAGE, tensors))
    memories, own = list(map(_MEMORY, storages)), _uses_by_python()
    if len(listed := set(memories)) == len(memories):
        return max(map(_uses, listed), default=0) - own > 1
    return any([_uses(memory) - own > count for memory, count in Counter(memories).items()])


@cache
def _uses_by_python() -> int:
    """How many uses a storage has besides its tensors, once Python refers to it."""
    alone = torch.empty(1, device="cpu")
    alone.untyped_storage()
    storage = alone.untyped_storage()
    return int(_uses(storage._cdata)) - 1


def references(objects: list[Any]) -> list[int]:
    """How many references each of `objects` has besides that of the list."""
    return [sys.getrefcount(each) - _references_in_a_list() for each in objects]


@cache
def _references_in_a_list() -> int:
    """What Python counts of an object to which nothing but a list refers."""
    return next(sys.getrefcount(each) for each in [object()])


def _content(weight: torch.Tensor) -> Hashable:
    """Changes with every bit of the memory of `weight`."""
    storage = weight.untyped_storage()
    if storage.device.type == _READ_IN_PLACE:
        return xxhash.xxh3_64_intdigest((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
    if storage.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return object()  # it cannot be read now: taken for changed later
    with _disable_current_modes(), torch.no_grad():
        return checksum([torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)])
