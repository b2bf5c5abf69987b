"""What the answers of all routes have in common: pieces of text and calls, why they end, and their tokens."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from fastapi.responses import JSONResponse

from kvboost_hf.server.jobs import Finished, TokenLogprob
from kvboost_hf.server.request_jobs import RequestJobs
from kvboost_hf.server.tools import Parsed, ToolCall, ToolCallStream


@dataclass(frozen=True, slots=True)
class Piece:
    """More of one answer.

    Args:
        choice: Of which.
        text: May be empty.
        reasoning: Before the answer, where the model marks it.
        calls: Of tools.
        logprobs: Of its tokens, if they were asked for.
        reason: Why the answer ends with it, as clients are told; None if it does not.
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class CallReaders:
    """Tell calls of tools from text.

    Args:
        streams: One for each choice; none where no tools were offered.
        one_call: Whether all calls but the first of an answer are left out.
    """

    streams: Sequence[ToolCallStream] = ()
    one_call: bool = False


async def pieces(jobs: RequestJobs, readers: CallReaders) -> AsyncIterator[Piece]:
    """Deltas of the answers to a request, as its jobs make progress.

    Raises:
        ApiError: see `RequestJobs.events`.
    """
    called: set[int] = set()
    async for choice, event in jobs.events():
        stream = readers.streams[choice] if readers.streams else None
        reason: str | None = None
        logprobs: tuple[TokenLogprob, ...] = ()
        if isinstance(event, Finished):
            reason = str(event.reason)
            cut = event.reason == "length" or event.stopped
            read = stream.finish(cut=cut) if stream is not None else Parsed()
        else:
            logprobs = event.logprobs
            read = stream.push(event.text) if stream is not None else Parsed(event.text)
        calls = read.calls
        if readers.one_call:
            calls = () if choice in called else calls[:1]
        if calls:
            called.add(choice)
        if reason == "stop" and choice in called:
            reason = "tool_calls"
        yield Piece(choice, read.content, read.reasoning, calls, logprobs, reason)


@dataclass(slots=True)
class Answer:
    """A whole answer: the pieces of one choice, joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None


async def large(build: Callable[[], dict[str, Any]]) -> JSONResponse:
    """A response whose body may be large: it is built and written by a thread, so that nobody waits for it."""
    return await anyio.to_thread.run_sync(lambda: JSONResponse(build()))


async def whole(found: AsyncIterator[Piece], choices: int) -> list[Answer]:
    """All pieces of all choices, joined."""
    answers = [Answer() for _ in range(choices)]
    async for piece in found:
        answer = answers[piece.choice]
        answer.text += piece.text
        answer.reasoning += piece.reasoning
        answer.calls += piece.calls
        answer.logprobs += piece.logprobs
        answer.reason = piece.reason or answer.reason
    return answers


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Args:
        prompt: Of its prompts; choices of the same prompt count once.
        cached: Of these, not computed.
        tiers: Of these, how many came from each tier.
        completion: Of all its answers.
    """

    prompt: int
    cached: int
    tiers: Mapping[str, int]
    completion: int

    @classmethod
    def of(cls, finished: Mapping[int, Finished], n: int) -> "Usage":
        """Of jobs in which each prompt has `n` choices, one after the other."""
        firsts = [event for choice, event in finished.items() if choice % n == 0]
        return cls(
            sum(event.prompt_tokens for event in firsts),
            sum(event.cached_tokens for event in firsts),
            sum((Counter(event.tiers) for event in firsts), Counter[str]()),
            sum(event.completion_tokens for event in finished.values()),
        )

    @property
    def body(self) -> dict[str, Any]:
        """As completions tell it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "cached_tokens_by_tier": self.tiers},
        }
