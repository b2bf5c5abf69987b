"""Answers one prompt, and measures it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedModel

from kvboost_hf.bench.count import ForwardCount
from kvboost_hf.demo.timing import timed_generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The measurements of one answer.

    Args:
        ids: Tokens of the answer.
        ttft_ms: From the call to the first token on the host.
        total_ms: From the call to its return.
        prefilled: Tokens that went through the model before the first one was there.
        forwarded: Tokens that went through the model, all in all.
        reused: Tokens of the prompt that were not computed, by its own report; None without one.
        store_bytes: Bytes that are kept for later prompts; None if unknown.
        bypassed: Why nothing of the prompt could be reused, by its own report.
    """

    ids: list[int]
    ttft_ms: float
    total_ms: float
    prefilled: int
    forwarded: int
    reused: int | None = None
    store_bytes: int | None = None
    bypassed: str | None = None


class Server(Protocol):
    """A way of serving prompts, with what it keeps of earlier ones."""

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:
        """Answer a prompt greedily."""
        ...

    def close(self) -> None:
        """Finish what is under way, and forget everything."""
        ...


def reason(error: Exception) -> str:
    """The type and the text of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def served(
    model: PreTrainedModel,
    count: ForwardCount,
    ids: Sequence[int],
    max_new_tokens: int,
    make: Callable[[], dict[str, Any]] = dict,
) -> Served:
    """Greedy generate(), timed, its forwards counted; what is reused and kept is left out.

    Args:
        model: The model.
        count: Of its forwards.
        ids: The prompt.
        max_new_tokens: Length of the answer.
        make: Makes arguments for generate(), which is part of the time to the first token.
    """
    start, first = count.tokens, count.tokens

    def at_first() -> None:
        nonlocal first
        first = count.tokens

    begin = time.perf_counter()
    kwargs = make()
    made_ms = 1000 * (time.perf_counter() - begin)
    call = timed_generate(model, ids, max_new_tokens, at_first, **kwargs)
    return Served(
        ids=call.ids,
        ttft_ms=made_ms + call.ttft_ms,
        total_ms=made_ms + call.total_ms,
        prefilled=first - start,
        forwarded=count.tokens - start,
    )
