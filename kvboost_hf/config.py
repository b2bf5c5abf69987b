"""Settings, as frozen dataclasses that are checked once, at construction."""

from dataclasses import dataclass
from typing import Literal, get_args

ReuseMode = Literal["exact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePolicy:
    """How stored K/V may be used.

    Args:
        mode: `"exact"` uses K/V only where tokens, positions and history are all the same, so that the output is
            that of plain `generate()`.
        min_prefill_saving: A batch whose rows have stored prefixes of different lengths is filled up to the longest
            one, at the price of an extra forward over the rows that lack it. That forward is run only where it saves
            at least this many tokens.

    Raises:
        ValueError: for an unknown mode or a negative saving.
    """

    mode: ReuseMode = "exact"
    min_prefill_saving: int = 64

    def __post_init__(self) -> None:
        if self.mode not in get_args(ReuseMode):
            raise ValueError(f"`mode` must be one of {get_args(ReuseMode)}, got {self.mode!r}.")
        if isinstance(self.min_prefill_saving, bool) or not isinstance(self.min_prefill_saving, int):
            raise ValueError(f"`min_prefill_saving` must be an int, got {self.min_prefill_saving!r}.")
        if self.min_prefill_saving < 0:
            raise ValueError(f"`min_prefill_saving` must be 0 or more tokens, got {self.min_prefill_saving}.")
