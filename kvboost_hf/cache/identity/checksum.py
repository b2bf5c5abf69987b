"""A checksum over all values of many tensors, computed on their devices."""

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import blake2b

import torch

_ROW = 1 << 16  # words that share one list of coefficients
_ROWS_AT_ONCE = {"cpu": 16}  # bounds the temporary product: 8 MiB on a CPU, where it should fit into a cache
_DEFAULT_ROWS_AT_ONCE = 256  # 128 MiB


def checksum(tensors: Iterable[torch.Tensor], used_on: Mapping[int, torch.device] | None = None) -> bytes:
    """Changes with every single bit of `tensors`, their order, shapes, dtypes and devices.

    Each row of 65,536 32-bit words is multiplied by fixed random 64-bit coefficients and summed, modulo 2^64: two
    contents that differ share a sum once in 2^32 at the most, wherever the difference is. Only sums leave the device.

    Args:
        tensors: To be read.
        used_on: By tensor id, the device a tensor is used on if it is kept on another; that device counts.
    """
    digest = blake2b(digest_size=20)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places: list[tuple[torch.device, int]] = []  # of each tensor, and how many sums it has
    with torch.no_grad():
        for tensor in tensors:
            device = (used_on or {}).get(id(tensor), tensor.device)
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype} {device};".encode())
            words = _words(tensor.detach())
            found = list(_row_sums(words))
            sums.setdefault(words.device, []).extend(found)
            places.append((words.device, sum(part.numel() for part in found)))
        read = {device: torch.cat(parts).cpu() if parts else torch.empty(0) for device, parts in sums.items()}
        for device, count in places:  # in their order, wherever they are
            digest.update(read[device][:count].numpy().tobytes())
            read[device] = read[device][count:]
    return digest.digest()


def _row_sums(words: torch.Tensor) -> Iterable[torch.Tensor]:
    coefficients = _coefficients(words.device)
    whole = words.numel() // _ROW * _ROW
    at_once = _ROW * _ROWS_AT_ONCE.get(words.device.type, _DEFAULT_ROWS_AT_ONCE)
    for start in range(0, whole, at_once):
        rows = words[start : min(start + at_once, whole)].view(-1, _ROW)
        yield (rows * coefficients).sum(dim=1)
    if whole < words.numel():
        rest = words[whole:]
        yield (rest * coefficients[: rest.numel()]).sum(dim=0, keepdim=True)


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
        drawn = torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator, dtype=torch.int64)
        return drawn.to(device)
