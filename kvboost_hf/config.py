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
        audit_rate: Share of the reused prompts, from 0 to 1, that are computed a second time, whole, to see whether
            the answer is the same. Where it is not, the plain answer is given, the stored chunks that differ are taken
            out of service, and `stats()`, the report and the log say so. It costs what reuse saves.

    Raises:
        ValueError: for an unknown mode or check, a negative saving, or a rate that is none.
    """

    mode: ReuseMode = "exact"
    min_prefill_saving: int = 64
    weights_check: WeightsCheck = "sample"
    audit_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(ReuseMode):
            raise ValueError(f"`mode` must be one of {get_args(ReuseMode)}, got {self.mode!r}.")
        if self.weights_check not in get_args(WeightsCheck):
            raise ValueError(f"`weights_check` must be one of {get_args(WeightsCheck)}, got {self.weights_check!r}.")
        if isinstance(self.min_prefill_saving, bool) or not isinstance(self.min_prefill_saving, int):
            raise ValueError(f"`min_prefill_saving` must be an int, got {self.min_prefill_saving!r}.")
        if self.min_prefill_saving < 0:
            raise ValueError(f"`min_prefill_saving` must be 0 or more tokens, got {self.min_prefill_saving}.")
        if isinstance(self.audit_rate, bool) or not isinstance(self.audit_rate, int | float):
            raise ValueError(f"`audit_rate` must be a number, got {self.audit_rate!r}.")
        if not 0 <= self.audit_rate <= 1:
            raise ValueError(f"`audit_rate` must be from 0 to 1, got {self.audit_rate}.")
