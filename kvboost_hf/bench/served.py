"""Answers prompts, and measures it: one prompt by one server, or by several servers in turn."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from kvboost_hf.bench.models import ForwardCount
from kvboost_hf.verify.measure import timed_generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The measurements of one answer."""

    ids: list[int]  # tokens of the answer
    ttft_ms: float  # from the call to the first token on the host
    total_ms: float  # from the call to its return
    prefilled: int  # tokens that went through the model before the first one was there
    forwarded: int  # tokens that went through the model, all in all
    reused: int | None = None  # tokens of the prompt that were not computed, by its own report; None without one
    moved: int | None = None  # those of them that were used at another position, or behind another text, likewise
    recomputed: int | None = None  # moved tokens of which a part was computed again, likewise
    store_bytes: int | None = None  # bytes that are kept for later prompts; None if unknown
    bypassed: str | None = None  # why nothing of the prompt could be reused, by its own report
    # The logits from which tokens were chosen, [new tokens, vocab], float32, on the CPU; None if they were not
    # kept.
    logits: torch.Tensor | None = None


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
    *,
    keep_logits: bool = False,
) -> Served:
    """Greedy generate(), timed, its forwards counted; what is reused and kept is left out.

    Args:
        model: The model.
        count: Counts the model's forwards.
        ids: The prompt.
        max_new_tokens: Length of the answer.
        make: Makes arguments for generate(), which is part of the time to the first token.
        keep_logits: Whether to return logits, too.
    """
    start, first = count.tokens, count.tokens

    def at_first() -> None:
        nonlocal first
        first = count.tokens

    begin = time.perf_counter()
    kwargs = make()
    made_ms = 1000 * (time.perf_counter() - begin)
    call = timed_generate(model, ids, max_new_tokens, at_first, keep_logits=keep_logits, **kwargs)
    return Served(
        ids=call.ids,
        ttft_ms=made_ms + call.ttft_ms,
        total_ms=made_ms + call.total_ms,
        prefilled=first - start,
        forwarded=count.tokens - start,
        logits=call.kept,
    )


class ServerTurns:
    """Servers, each on its own: one that fails takes part no longer. A context manager that closes them.

    Args:
        needed: One that all others are compared with: if it fails, so does everything.

    Attributes:
        failed: By name, why.
    """

    def __init__(self, needed: str) -> None:
        self._needed = needed
        self._servers: dict[str, Server] = {}
        self.failed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._servers)

    def __enter__(self) -> "ServerTurns":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, server in list(self._servers.items()):
            try:
                server.close()
            except Exception as error:
                self._servers.pop(name)
                self._fail(name, error)

    def open(self, name: str, make: Callable[[], Server]) -> None:
        """Let one more take part."""
        try:
            self._servers[name] = make()
        except Exception as error:  # of whatever kind: the others go on
            self._fail(name, error)

    def answer(self, ids: Sequence[int], max_new_tokens: int, first: int) -> dict[str, Served]:
        """The answers of all servers to one prompt, by name.

        Args:
            ids: The prompt.
            max_new_tokens: Length of an answer.
            first: Index of the server that begins, in the order in which they were opened, modulo their number.
        """
        names = list(self._servers)
        found: dict[str, Served] = {}
        for n in range(len(names)):
            name = names[(first + n) % len(names)]
            try:
                found[name] = self._servers[name].answer(ids, max_new_tokens)
            except Exception as error:
                self._fail(name, error)
        return {name: found[name] for name in names if name in found}

    def _fail(self, name: str, error: Exception) -> None:
        if name == self._needed:
            raise error
        self.failed[name] = reason(error)
        if (server := self._servers.pop(name, None)) is not None:
            with suppress(Exception):
                server.close()
