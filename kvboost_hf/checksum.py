"""A checksum over all values of many tensors, computed where they are: on a device, in host memory or in a file."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ROW = 1 << 16  # words that share one list of coefficients
_ROWS_AT_ONCE = 256  # on a device; bounds the temporary product to 128 MiB
_ROWS_OF_A_THREAD = 64  # on a CPU, at the least: 16 MiB
_DIGEST_BYTES = 20


@dataclass(frozen=True, slots=True)
class Content:
    """What `checksum` needs of a tensor that it does not read, such as one in a file."""

    shape: tuple[int, ...]  # the shape of the tensor
    dtype: torch.dtype  # the dtype of the tensor
    digest: bytes  # a hash of the sums over its values, see `contents`


def checksum(tensors: Iterable[torch.Tensor | Content], used_on: Mapping[int, torch.device] | None = None) -> bytes:
    """Changes with every single bit of `tensors`, their order, shapes, dtypes and devices.

    Args:
        tensors: To be read, or read before.
        used_on: By the id of a tensor or content, the device it is used on if it is kept elsewhere; that device
            counts. It must have one for each content.
    """
    given, places = list(tensors), used_on or {}
    read = iter(contents([each for each in given if isinstance(each, torch.Tensor)]))
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for each in given:
        device = places[id(each)] if isinstance(each, Content) else places.get(id(each), each.device)
        found = each if isinstance(each, Content) else next(read)
        digest.update(f"{found.shape} {found.dtype} {device};".encode() + found.digest)
    return digest.digest()


def contents(tensors: Iterable[torch.Tensor]) -> list[Content]:
    """The contents of tensors, which are the same on all devices.

    Each row of 65,536 32-bit words is multiplied by fixed random 64-bit coefficients and summed, modulo 2^64: two
    contents that differ share a sum once in 2^32 at the most, wherever the difference is. Only sums leave the device.
    """
    given = list(tensors)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    counts: list[tuple[torch.device, int]] = []  # of each tensor: its device, and how many sums it has
    with torch.no_grad():
        for tensor in given:
            words = _words(tensor.detach())
            found = list(_row_sums(words))
            sums.setdefault(words.device, []).extend(found)
            counts.append((words.device, sum(part.numel() for part in found)))
        read = {
            device: torch.cat(parts).cpu() if parts else torch.empty(0, device="cpu") for device, parts in sums.items()
        }
        digests = []
        for device, count in counts:  # in their order, wherever they are
            digests.append(blake2b(read[device][:count].numpy().tobytes(), digest_size=_DIGEST_BYTES).digest())
            read[device] = read[device][count:]
    return [Content(tuple(tensor.shape), tensor.dtype, digest) for tensor, digest in zip(given, digests, strict=True)]


def _row_sums(words: torch.Tensor) -> Iterator[torch.Tensor]:
    coefficients = _coefficients(words.device)
    whole = words.numel() // _ROW * _ROW
    if words.device.type == "cpu":
        yield torch.from_numpy(_sums_on_cpu(words, whole // _ROW, coefficients))
    else:
        for start in range(0, whole, _ROW * _ROWS_AT_ONCE):
            rows = words[start : min(start + _ROW * _ROWS_AT_ONCE, whole)].view(-1, _ROW)
            yield (rows * coefficients).sum(dim=1)
    if whole < words.numel():
        rest = words[whole:]
        yield (rest * coefficients[: rest.numel()]).sum(dim=0, keepdim=True)


def _sums_on_cpu(words: torch.Tensor, rows: int, coefficients: torch.Tensor) -> NDArray[np.int64]:
    """The sums of the first rows: NumPy has vector code for them, and takes a tenth of the time of PyTorch."""
    sums, by = np.empty(rows, dtype=np.int64), coefficients.numpy()
    # Read at their address: a tensor that was handed to NumPy could not be resized any more, as FSDP does.
    memory: Any = (ctypes.c_char * (rows * _ROW * 4)).from_address(words.data_ptr())
    read = np.frombuffer(memory, dtype=np.int32)

    def fill(start: int, stop: int) -> None:
        product = np.empty(_ROW, dtype=np.int64)
        for row in range(start, stop):
            np.multiply(read[row * _ROW : (row + 1) * _ROW], by, out=product)
            sums[row] = product.sum()

    threads = min(torch.get_num_threads(), rows // _ROWS_OF_A_THREAD)
    if threads < 2:
        fill(0, rows)
    else:
        ends = [rows * number // threads for number in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, ends[:-1], ends[1:]))
    return sums


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` as 32-bit integers, padded with zeros."""
    octets = tensor.reshape(-1).view(torch.uint8)
    if octets.numel() % 4:
        octets = torch.nn.functional.pad(octets, (0, 4 - octets.numel() % 4))
    elif octets.storage_offset() % 4:
        octets = octets.clone()
    return octets.view(torch.int32)


@cache
def _coefficients(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    with torch.inference_mode(False):
        drawn = torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator, dtype=torch.int64, device="cpu")
        return drawn.to(device)
