"""Lloyd-Max codebooks: the 2 ** bits values that N(0, 1) is rounded to with the least mean squared error.

Lloyd, "Least squares quantization in PCM" (1982); Max, "Quantizing for minimum distortion" (1960).
"""

from functools import lru_cache

import torch

# The positive ones; each is the mean of N(0, 1) between the midpoints to its neighbours.
_CENTROIDS = {
    1: (0.7978846,),
    2: (0.45278, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.128395, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
# `round_to` looks codes up in a table of this reach and so many steps to one: a border is off by 1 / 512 at most,
# which adds less than a 10,000th to the error.
_REACH, _STEPS = 4, 256


@lru_cache(maxsize=64)
def centroids(bits: int, device: torch.device) -> torch.Tensor:
    """The codebook [2 ** bits], ascending, float32; not to be written to."""
    positive = torch.tensor(_CENTROIDS[bits])
    return torch.cat([-positive.flip(0), positive]).to(device)


@lru_cache(maxsize=64)
def _table(bits: int, device: torch.device) -> torch.Tensor:
    middles = (torch.arange(-_REACH * _STEPS, _REACH * _STEPS) + 0.5) / _STEPS
    values = centroids(bits, torch.device("cpu"))
    return torch.bucketize(middles, (values[1:] + values[:-1]) / 2).to(torch.uint8).to(device)


def round_to(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes, uint8, of the centroids next to `x`, float32; for NaN, that of the least."""
    table = _table(bits, x.device)
    # As whole numbers, so that nothing, not even NaN, is out of the table.
    cells = (x * _STEPS).add_(_REACH * _STEPS).to(torch.int32).clamp_(0, len(table) - 1)
    return table.index_select(0, cells.view(-1)).view(x.shape)


def look_up(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The centroids, float32, of `codes`, uint8."""
    return centroids(bits, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)
