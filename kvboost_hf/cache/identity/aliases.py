"""Detects writes to weights through `weight.data`, which PyTorch's version counters miss.

`data` is a tensor in the memory of the parameter with a version counter of its own, so that a write through it does
not change the parameter's counter. The first prompt therefore makes `nn.Parameter.data` a property. It hashes the
memory of a weight that a cache depends on before it returns the tensor. From then on each prompt hashes that memory
again, until the model alone refers to it.
"""

import ctypes
import logging
import sys
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from kvboost_hf import forks
from kvboost_hf.checksum import checksum

_log = logging.getLogger("kvboost_hf")

_MANY_BYTES = 2**26  # of weights that somebody else holds, too: to read them takes a while
_READ_IN_PLACE = "cpu"  # device whose memory is read without PyTorch, which may be tracing or counting
_DATA: Any = torch.Tensor.data
_uses: Any = torch._C._storage_Use_Count  # 0 when the memory is gone
_lock = forks.rlock()  # between handing memory out and finding that nobody holds it


class Memory:
    """The memory of one or more weights, referred to weakly.

    Args:
        storage: Of a weight.
    """

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
    """The memories of a list of tensors.

    Args:
        tensors: The tensors; no reference to them is kept.
    """

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
        if elsewhere > _MANY_BYTES:
            _log.warning(
                "%d MiB of weights are read before each prompt, to see whether they have changed, for somebody else "
                "holds them, too: a state_dict(), or `weight.data`.",
                elsewhere >> 20,
            )

    def writes(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """How many writes were found so far.

        Args:
            tensors: Those of the constructor, in the same memory.
        """
        if self._shared or self._noted != _noted:
            self._noted = _noted
            for number in [n for n, memory in enumerate(self._memories) if memory.is_shared]:
                self._memories[number].look(tensors[self._at[number]], self._known[number])
            self._shared = [n for n, memory in enumerate(self._memories) if memory.is_shared]
            self._writes = sum([memory.writes for memory in self._memories])
        return self._writes


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
    """How many tensors hold the memory of `weight`."""
    return holders(weight.untyped_storage())


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors hold a memory, arrays of NumPy and other libraries over it included."""
    uses: int = _uses(storage._cdata)
    return uses - _uses_by_python()


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
