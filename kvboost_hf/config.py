"""Settings, as frozen dataclasses that are checked once, at construction."""

from dataclasses import dataclass
from typing import Literal, get_args

ReuseMode = Literal["exact"]
WeightsCheck = Literal["sample", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePolicy:
    """How stored K/V may be used.

    Args:
        mode: `"exact"` uses K/V only where tokens, positions and history are all the same, so that the output is
            that of plain `generate()`.
        min_prefill_saving: A batch whose rows have stored prefixes of different lengths is filled up to the longest
            one, at the price of an extra forward over the rows that lack it. That forward is run only where it saves
            at least this many tokens.
        weights_check: How changed weights are noticed before each prompt. `"sample"` asks PyTorch and reads about 32
            values of each tensor. `"full"` reads every weight, for code that edits a few values through `.data` or
            numpy; K/V stored under one is not found under the other.

    Raises:
        ValueError: for an unknown mode or check, or a negative saving.
    """

    mode: ReuseMode = "exact"
    min_prefill_saving: int = 64
    weights_check: WeightsCheck = "sample"

    def __post_init__(self) -> None:
        if self.mode not in get_args(ReuseMode):
            raise ValueError(f"`mode` must be one of {get_args(ReuseMode)}, got {self.mode!r}.")
        if self.weights_check not in get_args(WeightsCheck):
            raise ValueError(f"`weights_check` must be one of {get_args(WeightsCheck)}, got {self.weights_check!r}.")
        if isinstance(self.min_prefill_saving, bool) or not isinstance(self.min_prefill_saving, int):
            raise ValueError(f"`min_prefill_saving` must be an int, got {self.min_prefill_saving!r}.")
        if self.min_prefill_saving < 0:
            raise ValueError(f"`min_prefill_saving` must be 0 or more tokens, got {self.min_prefill_saving}.")
