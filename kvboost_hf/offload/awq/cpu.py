"""Multiplies by AWQ weights with PyTorch's own operators, on any device.

Each byte holds two nibbles. The lower nibbles are one half of the columns, the upper ones the other. Each half is
unpacked by a single operator, and the columns of the result, which is much smaller, are reordered at the end.
"""

from collections.abc import Iterator

import torch

from kvboost_hf.offload.awq.triton.tiling import SCRATCH_BYTES

_TILE = 1 << 21  # weights that a CPU unpacks at a time, at least one group of rows: 8 MiB as float32
_UNPACKED_BYTES = 5  # of a weight: as uint8 and as float32
_FEW = 8  # tokens; for fewer it is cheaper to scale the products of each group than its weights


def awq_matmul_torch(
    x: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply by 4-bit weights.

    Products and sums are float32 whatever the dtype of `x`. The order of sums depends on the shapes alone.

    Args:
        x: [tokens, in_features], of any float dtype.
        qweight: int32 [in_features, out_features / 8], in the layout `gemm`.
        qzeros: int32 [groups, out_features / 8].
        scales: float16 [groups, out_features].

    Returns:
        [tokens, out_features], in the dtype of `x`.
    """
    with torch.autocast(x.device.type, enabled=False):
        steps = _halves(scales.float())
        rows = len(qweight) // len(scales)
        grouped = x.float().contiguous().view(len(x), len(scales), rows).transpose(0, 1)
        sums = -(grouped.sum(2).T @ (_nibbles(qzeros).float() * steps))
        for tile, levels in _tiles(qweight, len(scales)):
            if len(x) < _FEW:
                sums += (grouped[tile] @ levels).mul_(steps[:, tile, None]).sum(1)
            else:
                weights = levels.mul_(steps[:, tile, None]).flatten(1, 2)
                sums.baddbmm_(grouped[tile].transpose(0, 1).flatten(1).expand(2, -1, -1), weights)
        return _whole(sums).to(x.dtype)


def awq_matmul_transposed_torch(
    grad: torch.Tensor, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply by the transposed weights: [tokens, out_features] to [tokens, in_features], in the dtype of `grad`."""
    with torch.autocast(grad.device.type, enabled=False):
        steps, halves = _halves(scales.float()), _halves(grad.float())
        zeros = (_nibbles(qzeros).float() * steps).transpose(1, 2)
        sums = -(halves @ zeros).sum(0)[..., None].repeat(1, 1, len(qweight) // len(scales))  # tokens, groups, rows
        for tile, levels in _tiles(qweight, len(scales)):
            weights = levels.mul_(steps[:, tile, None]).flatten(1, 2).transpose(1, 2)
            sums[:, tile] += (halves @ weights).sum(0).view_as(sums[:, tile])
        return sums.flatten(1).to(grad.dtype)


def tile_weights(device: torch.device) -> int:
    """Weights that are unpacked at a time: few for the caches of a CPU, and on a GPU, for few launches, many."""
    return _TILE if device.type == "cpu" else SCRATCH_BYTES // _UNPACKED_BYTES


def scratch_bytes(tokens: int, in_features: int, out_features: int, group_size: int) -> int:
    """Bytes that `awq_matmul_torch` takes on a GPU at its peak, beside its result.

    These are a tile of unpacked weights, its inputs or its products, zeros and scales, all inputs and all sums.
    """
    tile = min(max(SCRATCH_BYTES // _UNPACKED_BYTES, group_size * out_features), in_features * out_features)
    of_tile = tile // group_size if tokens < _FEW else tile // out_features  # numbers of each token
    numbers = tokens * (in_features + 2 * out_features + of_tile) + 5 * (in_features // group_size) * out_features
    return _UNPACKED_BYTES * tile + torch.float32.itemsize * numbers


def _tiles(qweight: torch.Tensor, groups: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Groups of rows, and their unpacked levels, float32 [2, groups, rows, out / 2], valid until the next ones."""
    octets = qweight.view(torch.uint8).view(groups, -1, 4 * qweight.shape[1])
    count = min(groups, max(1, tile_weights(qweight.device) // (2 * octets[0].numel())))
    nibbles = torch.empty(2 * octets[:count].numel(), dtype=torch.uint8, device=qweight.device)
    levels = torch.empty_like(nibbles, dtype=torch.float32)
    for start in range(0, groups, count):
        part = octets[start : start + count]
        unpacked = _nibbles(part, out=nibbles[: 2 * part.numel()].view(2, *part.shape))
        yield slice(start, start + len(part)), levels[: unpacked.numel()].view(unpacked.shape).copy_(unpacked)


def _nibbles(words: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The lower and the upper nibble of each byte, uint8 [2, ...]."""
    octets = words.view(torch.uint8)
    out = octets.new_empty((2, *octets.shape)) if out is None else out
    torch.bitwise_and(octets, 15, out=out[0])
    torch.bitwise_right_shift(octets, 4, out=out[1])
    return out


def _halves(columns: torch.Tensor) -> torch.Tensor:
    """Reorder columns [rows, out] as nibbles are, [2, rows, out / 2].

    Column `4 a + 2 h + b` of a word is in half `h`, in byte `2 b + a`.
    """
    return columns.reshape(len(columns), columns.shape[1] // 8, 2, 2, 2).permute(3, 0, 1, 4, 2).flatten(2)


def _whole(halves: torch.Tensor) -> torch.Tensor:
    """Undo `_halves`."""
    return halves.view(2, halves.shape[1], halves.shape[2] // 4, 2, 2).permute(1, 2, 4, 0, 3).flatten(1)
