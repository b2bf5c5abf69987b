"""Answers of all routes: deltas of text and tool calls, the reason they end with, and the usage of tokens."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from fastapi.responses import JSONResponse

from kvboost_hf.server.apis.request_jobs import RequestJobs
from kvboost_hf.server.chats.calls import ToolCall
from kvboost_hf.server.chats.reasoning import AnswerReader
from kvboost_hf.server.chats.tools import Parsed, joined_calls
from kvboost_hf.server.jobs import Finished, JobEvent, TokenLogprob


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of one answer.

    Args:
        choice: The index of the answer.
        text: New text; may be empty.
        reasoning: New text of the reasoning before the answer, where the model marks it.
        calls: New pieces of tool calls; those of one call are in a row.
        logprobs: Log probabilities of the new tokens, if they were asked for.
        reason: The finish reason of the answer, if it ends here; else None.
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class CallReaders:
    """Find tool calls and reasoning in the text of answers.

    Args:
        streams: One for each choice; empty where an answer is text alone.
        one_call: Whether all calls but the first of an answer are left out.
        shows_reasoning: Whether reasoning is in the deltas.
        thought: Counts the tokens of reasoning, by choice.
    """

    streams: Sequence[AnswerReader] = ()
    one_call: bool = False
    shows_reasoning: bool = True
    thought: Counter[int] = field(default_factory=Counter)

    def read(self, choice: int, event: JobEvent) -> Parsed:
        """The part of an answer that an event adds."""
        if not self.streams:
            return Parsed("" if isinstance(event, Finished) else event.text)
        stream = self.streams[choice]
        if isinstance(event, Finished):
            return stream.finish(cut=event.reason == "length" or event.stop is not None)
        thinking = stream.thinking
        read = stream.push(event.text)
        if thinking or stream.thinking or read.reasoning:
            self.thought[choice] += event.tokens
        return read


async def deltas(jobs: RequestJobs, readers: CallReaders) -> AsyncIterator[Delta]:
    """Deltas of the answers to a request, as its jobs make progress.

    Raises:
        ApiError: A job was given up, or has failed.
    """
    called: dict[int, ToolCall] = {}  # the last piece of each answer's calls
    async for choice, event in jobs.events():
        reason = str(event.reason) if isinstance(event, Finished) else None
        logprobs = () if isinstance(event, Finished) else event.logprobs
        read = readers.read(choice, event)
        calls, last = read.calls, called.get(choice)
        if readers.one_call:
            first = next(iter(calls), None) if last is None else last
            calls = tuple(call for call in calls if first is not None and call.id == first.id)
        if calls:
            called[choice] = last = calls[-1]
        if reason == "stop" and last is not None:
            reason = "length" if last.cut else "tool_calls"
        reasoning = read.reasoning if readers.shows_reasoning else ""
        yield Delta(choice, read.content, reasoning, calls, logprobs, reason)


@dataclass(slots=True)
class Answer:
    """A whole answer: the deltas of one choice, joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None


async def large(build: Callable[[], dict[str, Any]]) -> JSONResponse:
    """Build a response with a large body in a thread, so that the event loop is free meanwhile."""
    return await anyio.to_thread.run_sync(lambda: JSONResponse(build()))


async def whole(found: AsyncIterator[Delta], choices: int) -> list[Answer]:
    """Join the deltas of each choice."""
    answers = [Answer() for _ in range(choices)]
    async for delta in found:
        answer = answers[delta.choice]
        answer.text += delta.text
        answer.reasoning += delta.reasoning
        answer.calls += delta.calls
        answer.logprobs += delta.logprobs
        answer.reason = delta.reason or answer.reason
    for answer in answers:
        answer.calls = list(joined_calls(answer.calls))
    return answers


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Args:
        prompt: Tokens of its prompts; several choices of a prompt count it once.
        cached: Those of them that were reused.
        tiers: Reused tokens by the tier that they came from.
        completion: Tokens of all its answers.
        accepted_prediction: Tokens of a prediction that are in the answers; None without a prediction.
        rejected_prediction: Those that were checked and are not.
        moved: Those of the reused ones whose K/V was computed elsewhere.
        repaired: Tokens that went through the model again, of all jobs, to repair moved K/V.
        computed: Tokens of prompts that went through the model, of all jobs, the repaired ones included.
        pinned: Whether all that was to be pinned is; None where nothing was.
        reasoning: Tokens of the answers that are reasoning; None where the model marks none.
    """

    prompt: int
    cached: int
    tiers: Mapping[str, int]
    completion: int
    accepted_prediction: int | None = None
    rejected_prediction: int | None = None
    moved: int = 0
    repaired: int = 0
    computed: int = 0
    pinned: bool | None = None
    reasoning: int | None = None

    @classmethod
    def of(cls, finished: Mapping[int, Finished], n: int, readers: CallReaders | None = None) -> "Usage":
        """The usage of jobs of which `n` in a row have the same prompt; `readers` have read their answers."""
        firsts = [event for choice, event in finished.items() if choice % n == 0]
        return cls(
            sum(event.prompt_tokens for event in firsts),
            sum(event.cached_tokens for event in firsts),
            sum((Counter(event.tiers) for event in firsts), Counter[str]()),
            sum(event.completion_tokens for event in finished.values()),
            _sum(event.accepted_prediction for event in finished.values()),
            _sum(event.rejected_prediction for event in finished.values()),
            sum(event.moved_tokens for event in firsts),
            sum(event.repaired_tokens for event in finished.values()),
            sum(event.computed_tokens for event in finished.values()),
            all(event.pinned is not False for event in firsts) if any(e.pinned is not None for e in firsts) else None,
            readers.thought.total() if readers is not None and readers.streams else None,
        )

    @property
    def details(self) -> dict[str, Any]:
        """What became of the tokens of the prompts, as `usage` has it."""
        found = {
            "cached_tokens": self.cached,
            "cached_tokens_by_tier": self.tiers,
            "moved_tokens": self.moved,
            "repaired_tokens": self.repaired,
            "computed_tokens": self.computed,
        }
        return found if self.pinned is None else found | {"pinned": self.pinned}

    @property
    def body(self) -> dict[str, Any]:
        """The `usage` object of completions."""
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": self.details,
        }
        details = {
            "reasoning_tokens": self.reasoning,
            "accepted_prediction_tokens": self.accepted_prediction,
            "rejected_prediction_tokens": self.rejected_prediction,
        }
        if known := {name: tokens for name, tokens in details.items() if tokens is not None}:
            found["completion_tokens_details"] = known
        return found


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum of what was counted; None if nothing was."""
    found = [count for count in counts if count is not None]
    return sum(found) if found else None
