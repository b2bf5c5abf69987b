"""Settings, as frozen dataclasses that are checked once, at construction."""

from dataclasses import dataclass
from typing import Literal, get_args

ReuseMode = Literal["exact", "blend"]
Repair = Literal["query", "cacheblend", "first_k", "selective", "selective_before", "none"]
WeightsCheck = Literal["sample", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePolicy:
    """How stored K/V may be used.

    Args:
        mode: `"exact"` uses K/V only where tokens, positions and history are all the same, so that the output is
            that of plain `generate()`. `"blend"` also uses K/V of the same tokens elsewhere: keys are rotated to their
            new positions, and a part of the tokens is computed again. The output may differ; `verify_correctness`
            measures how much.
        repair: With `"blend"`, how the tokens to compute again are chosen. `"query"`: up to `seam_tokens` after each
            seam, and then those that the end of the prompt attends to most. `"cacheblend"`: those whose values differ
            most from the stored ones in an early layer (Yao et al., EuroSys 2025, https://arxiv.org/abs/2405.16444).
            `"first_k"`: those after each seam, as many as `recompute_ratio` allows (Hu et al.,
            https://arxiv.org/abs/2410.15332). `"selective"`: `seam_tokens` after each seam. `"selective_before"`:
            `seam_tokens` before each seam, as KVBoost does. `"none"`: none.
        recompute_ratio: Share of the moved tokens to compute again, from 0 to 1. At 1 everything is, and the output is
            that of plain `generate()`. Not used by the selective repairs and `"none"`.
        max_recompute_ratio: The ratio may be raised up to this one, until the tokens chosen make up `min_coverage` of
            what the repair measures (attention, or deviation). None never raises it.
        min_coverage: See `max_recompute_ratio`; from 0 to 1.
        seam_tokens: For the selective repairs and `"query"`.
        sink_tokens: The first tokens of a prompt are never moved but computed: attention sinks.
        overlap_k: Whatever the repair, the last tokens before each seam are computed again, too.
        min_prefill_saving: Reuse that takes an extra forward (over the rows of a batch that have a shorter stored
            prefix than others), or that moves chunks, is taken up only where it saves at least this many tokens; with
            0, chunks are moved even where that saves nothing.
        weights_check: How changed weights are noticed before each prompt. `"sample"` asks PyTorch and reads about 32
            values of each tensor. `"full"` reads every weight, for code that edits a few values through `.data` or
            numpy; K/V stored under one is not found under the other.
        audit_rate: Share of the reused prompts, from 0 to 1, that are computed a second time, whole, to see whether
            the answer is the same. Where it is not, the plain answer is given, the stored chunks that differ are taken
            out of service, and `stats()`, the report and the log say so. It costs what reuse saves.

    Raises:
        ValueError: for an unknown mode, repair or check, a negative count, a ratio or rate that is none, a maximum
            below its ratio, or audits of blended answers, which differ by design.
    """

    mode: ReuseMode = "exact"
    repair: Repair = "cacheblend"
    recompute_ratio: float = 0.15
    max_recompute_ratio: float | None = None
    min_coverage: float = 0.9
    seam_tokens: int = 16
    sink_tokens: int = 16
    overlap_k: int = 0
    min_prefill_saving: int = 64
    weights_check: WeightsCheck = "sample"
    audit_rate: float = 0.0

    def __post_init__(self) -> None:
        _require_choice("mode", self.mode, get_args(ReuseMode))
        _require_choice("repair", self.repair, get_args(Repair))
        _require_choice("weights_check", self.weights_check, get_args(WeightsCheck))
        for name in ("seam_tokens", "sink_tokens", "overlap_k", "min_prefill_saving"):
            _require_count(name, getattr(self, name))
        for name in ("recompute_ratio", "min_coverage", "audit_rate"):
            _require_share(name, getattr(self, name))
        if self.max_recompute_ratio is not None:
            _require_share("max_recompute_ratio", self.max_recompute_ratio)
            if self.max_recompute_ratio < self.recompute_ratio:
                raise ValueError(
                    f"`max_recompute_ratio` must be at least `recompute_ratio` ({self.recompute_ratio}), got "
                    f"{self.max_recompute_ratio}. Pass None to keep the ratio fixed."
                )
        if self.mode == "blend" and self.audit_rate:
            raise ValueError(
                f"`audit_rate` must be 0 with mode 'blend', whose answers may differ, got {self.audit_rate}. "
                "Measure them with verify_correctness()."
            )


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {choices}, got {value!r}.")


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` must be an int, got {value!r}.")
    if value < 0:
        raise ValueError(f"`{name}` must be 0 or more tokens, got {value}.")


def _require_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"`{name}` must be a number, got {value!r}.")
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be from 0 to 1, got {value}.")
