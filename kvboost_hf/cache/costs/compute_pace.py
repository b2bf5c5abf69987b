"""Measures how long a model takes to compute a token, which loading K/V has to beat."""

import time

import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import KeptOnModel, input_device

_SIDE = 512  # of the matrices that are multiplied to see how fast the device is
_TOKENS = 64  # a forward over fewer is not representative
_WEIGHT = 0.2  # of the newest measurement in a running average


class ComputePace(KeptOnModel):
    """Seconds that a token of a prompt takes.

    At first estimated as two operations for each parameter, at the speed of a matrix product on the model's device.
    On a CPU, where the end of a forward is its end, corrected by the forwards that follow.
    """

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._observed = False

    def seconds_per_token(self, model: PreTrainedModel) -> float:
        """Seconds for one token; measured or estimated at the first call."""
        if self._seconds is None:
            operations = 2 * sum(parameter.numel() for parameter in model.parameters())
            self._seconds = operations / _operations_per_second(input_device(model), model.dtype)
        return self._seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """A forward over so many tokens of a prompt, of all rows together, took so long, on a CPU."""
        if tokens < _TOKENS:
            return
        found = seconds / tokens
        if not self._observed or self._seconds is None:
            self._seconds, self._observed = found, True
        else:
            self._seconds += _WEIGHT * (found - self._seconds)


@torch.no_grad()
def _operations_per_second(device: torch.device, dtype: torch.dtype) -> float:
    one = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        (one @ one)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * _SIDE**3 / best
