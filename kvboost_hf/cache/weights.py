"""Noticing that weights have changed, without reading them all and without keeping any of them in memory."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_SAMPLES_PER_TENSOR = 32
_READ_WHOLE = 128  # tensors of up to this many values
_GOLDEN = 0.6180339887
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_MAX_DEPTH = 3

Window = tuple[int, tuple[int, ...], tuple[int, ...]]  # storage offset, size and stride of the values that are read
Mark = tuple[int, int, torch.Size, tuple[int, ...]]  # address, version, shape and stride


class WeightsWatch:
    """Follows a list of tensors; `epoch()` changes when one of them seems to have changed.

    PyTorch's own bookkeeping (address, version, shape) tells of most changes, a sample of the values of many others.
    Storages are held weakly, so that an address that was freed and given out again is not taken for the old one, and
    memory that a user frees is free.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._marks: list[Mark] = []
        self._storages: list[StorageWeakRef] = []
        self._windows: list[
            list[tuple[int, Window]]
        ] = []  # by device and dtype: index of a tensor, what is read of it
        self.sample = b""

    def epoch(self, tensors: list[torch.Tensor]) -> int:
        """How often the tensors have changed."""
        with torch.inference_mode():  # views cost less in it
            marks = [(t.data_ptr(), _version(t), t.shape, t.stride()) for t in tensors]
            same = marks == self._marks and not any(storage.expired() for storage in self._storages)  # type: ignore[no-untyped-call]
            if not same:
                self._marks, self._windows = marks, _windows(tensors)
                self._storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]  # type: ignore[no-untyped-call]
            sample = _read(tensors, self._windows)
        if not same or sample != self.sample:
            self._epoch += 1
            self.sample = sample
        return self._epoch


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


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _windows(tensors: list[torch.Tensor]) -> list[list[tuple[int, Window]]]:
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Window]]] = {}
    for idx, tensor in enumerate(tensors):
        if tensor.numel():
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
        return offset, (count,), (1,)
    step = count // _SAMPLES_PER_TENSOR
    columns = tensor.shape[-1]
    if tensor.ndim > 1 and 8 < columns <= step:  # walk through the columns, too, rather than down the same one
        step = step // columns * columns - round(columns * (1 - _GOLDEN))
    return offset, (-(-count // step),), (step,)


def _read(tensors: list[torch.Tensor], groups: list[list[tuple[int, Window]]]) -> bytes:
    digest = blake2b(digest_size=20)
    for group in groups:
        views = [tensors[idx].as_strided(size, stride, offset) for idx, (offset, size, stride) in group]
        sample = torch.cat([view if view.ndim == 1 else view.reshape(-1) for view in views])
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()
