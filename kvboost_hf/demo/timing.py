"""Times generate() calls, and takes medians over repetitions.

The time to the first token is that from the call of generate() to the token's arrival on the host (a streamer takes it
there), planning, copying and storing included.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvboost_hf.compat import input_device

RowT = TypeVar("RowT", bound=Any)  # a dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """One generate() call."""

    ids: list[int]  # of the answer
    ttft_ms: float
    total_ms: float
    logits: torch.Tensor | None = None  # from which they were chosen, [new tokens, vocab], float32, on the CPU


class _FirstToken(BaseStreamer):
    """Notes when the first new token is on the host."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.seen_prompt = False
        self.at: float | None = None
        self._on_first = on_first

    def put(self, value: torch.Tensor) -> None:
        if self.seen_prompt and self.at is None:
            self.at = time.perf_counter()
            self._on_first()
        self.seen_prompt = True

    def end(self) -> None:
        pass


def timed_generate(
    model: PreTrainedModel,
    ids: Sequence[int],
    max_new_tokens: int,
    on_first: Callable[[], None] = lambda: None,
    *,
    keep_logits: bool = False,
    **kwargs: Any,
) -> Call:
    """Greedy generate() under a clock that starts at the call.

    Args:
        model: The model.
        ids: The prompt.
        max_new_tokens: Length of the answer.
        on_first: Called when the first token is there.
        keep_logits: Whether to return logits, too.
        kwargs: For generate().
    """
    prompt = torch.tensor([list(ids)], device=input_device(model))
    streamer = _FirstToken(on_first)
    generate: Any = model.generate
    start = time.perf_counter()
    out = generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        **({"output_logits": True, "return_dict_in_generate": True} if keep_logits else {}),
        **kwargs,
    )
    answer = (out.sequences if keep_logits else out)[0, len(ids) :].tolist()
    end = time.perf_counter()
    first = streamer.at if streamer.at is not None else end
    logits = torch.stack([step[0].float().cpu() for step in out.logits]) if keep_logits else None
    return Call(answer, 1000 * (first - start), 1000 * (end - start), logits)


def medians(runs: Sequence[Sequence[RowT]]) -> list[RowT]:
    """One row for each prompt from the rows of several runs.

    Fields in milliseconds become their median, what is true or false is true if it always was, and all else is that of
    the first run.
    """
    return [_median(rows) for rows in zip(*runs, strict=True)]


def _median(rows: Sequence[RowT]) -> RowT:
    found: dict[str, Any] = {}
    for field in fields(rows[0]):
        values = [getattr(row, field.name) for row in rows]
        if field.name.endswith("_ms"):
            found[field.name] = float(statistics.median(values))
        elif isinstance(values[0], bool):
            found[field.name] = all(values)
    first: RowT = rows[0]
    return replace(first, **found)
