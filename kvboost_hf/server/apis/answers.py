"""The jobs of a request and its answers: deltas of text and tool calls, why they end, and the usage of tokens.

`EventStream` sends the objects that an API makes of them.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import anyio
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvboost_hf.server.chats.calls import ToolCall
from kvboost_hf.server.chats.reasoning import AnswerReader
from kvboost_hf.server.chats.tools import Parsed, joined_calls
from kvboost_hf.server.http.errors import ApiError, api_error
from kvboost_hf.server.http.metrics import Meter
from kvboost_hf.server.jobs import Finished, Job, JobEvent, TokenLogprob
from kvboost_hf.server.protocol import Engine, Ticket

T = TypeVar("T")
_log = logging.getLogger("kvboost_hf.server")
_KNOWN_S = 0.2  # that the beginning of a stream waits for what is known of its prompt


class RequestJobs:
    """The jobs of one request, submitted together.

    Either all of them are submitted or none. `figures` receives the counts of the meter, and the times of the first
    answer, for the request's line in the log.

    Attributes:
        first: The first job.
        finished: By the index of the job, how it has ended.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job], meter: Meter, figures: dict[str, Any]) -> None:
        self._loop, self._meter = asyncio.get_running_loop(), meter
        self._events: asyncio.Queue[tuple[int, JobEvent]] = asyncio.Queue()
        self._known: asyncio.Future[int] = self._loop.create_future()
        self._tickets: list[Ticket] = []
        self._last: dict[int, float] = {}  # by job, when tokens came
        self.first, self.finished = jobs[0], dict[int, Finished]()
        self._jobs = jobs
        self._figures = figures
        # Of several answers to one prompt the first one says how much of it was reused.
        firsts = {id(job.ids): n for n, job in reversed(list(enumerate(jobs)))}
        self._firsts = set(firsts.values())
        try:
            for n, job in enumerate(jobs):
                placed = replace(job, places=0 if n else len(jobs))
                self._tickets.append(engine.submit(placed, self._listener(n)))
        except Exception as error:
            self.cancel()
            meter.refused(error)
            raise

    def _listener(self, n: int) -> Callable[[JobEvent], None]:
        def listen(event: JobEvent) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it whoever would have listened
                self._loop.call_soon_threadsafe(self._put, n, event)

        return listen

    def _put(self, n: int, event: JobEvent) -> None:
        # Counted here and not in `events`, which nobody may read any more.
        known = None if isinstance(event, Finished) else event.known
        if not n and not self._known.done():  # an engine that goes on without telling it will not tell it any more
            self._known.set_result(known or 0)
        if known is not None:
            return
        if isinstance(event, Finished):
            self._meter.finished(event)
            self._figures["prompt_tokens"] += event.prompt_tokens
            self._figures["cached_tokens"] += event.cached_tokens
            self._figures["completion_tokens"] += event.completion_tokens
            self._figures["moved_tokens"] += event.moved_tokens
            self._figures["computed_tokens"] += event.computed_tokens
            self._figures[event.reason] += 1
            for name, seconds in (("queue_s", event.queue_s), ("ttft_s", event.ttft_s)):
                if seconds is not None:  # of several answers, the first one's
                    self._figures[name] = round(min(seconds, self._figures.get(name, seconds)), 6)
        elif event.tokens:
            now, before = self._loop.time(), self._last.get(n)
            if before is not None:
                self._meter.gap((now - before) / event.tokens, event.tokens)
            self._last[n] = now
        self._events.put_nowait((n, event))

    async def known(self) -> int:
        """How many first tokens of the first prompt were stored; 0 if the engine does not tell it at once.

        The jobs must have `Job.tells_known`.
        """
        await asyncio.wait({self._known}, timeout=_KNOWN_S)
        return self._known.result() if self._known.done() else 0

    async def events(self) -> AsyncIterator[tuple[int, JobEvent]]:
        """Events with the index of their job, until all have ended; `ApiError` if one was given up, or failed."""
        while len(self.finished) < len(self._tickets):
            n, event = await self._events.get()
            if isinstance(event, Finished):
                self.finished[n] = event
                _require_answer(event)
            yield n, event

    @property
    def reuse(self) -> str:
        """How many tokens of the prompts were reused and computed, for a header."""
        ended = self.finished
        firsts = [event for n, event in ended.items() if n in self._firsts]
        first_s = min((event.ttft_s for event in ended.values() if event.ttft_s is not None), default=0.0)
        return (
            f"cached={sum(event.cached_tokens for event in firsts)}, "
            f"moved={sum(event.moved_tokens for event in firsts)}, "
            f"computed={sum(event.computed_tokens for event in ended.values())}, ttft_ms={1000 * first_s:.1f}"
        )

    def prompt(self, n: int) -> Sequence[int]:
        """The tokens of the prompt of job `n`, without what was cut off."""
        return self._jobs[n].ids

    def limit(self, n: int, reason: str | None) -> dict[str, Any]:
        """What the end of answer `n` says besides its reason, where a limit of the server's own has ended it."""
        job = self._jobs[n]
        # A call that a stop text has cut has the reason "length", too.
        if reason != "length" or self.finished[n].reason != "length" or job.limited_by in ("request", "context"):
            return {}
        return {"length_limit": {"max_tokens": job.options.max_tokens, "limited_by": job.limited_by}}

    def cancel(self) -> None:
        """Cancel the jobs that have not ended. It may be called any number of times."""
        for ticket in self._tickets:
            ticket.cancel()


def _require_answer(event: Finished) -> None:
    match event.reason:
        case "timeout":
            raise ApiError(504, f"The request was given up after {event.total_s:.1f} s.", code="timeout")
        case "cancelled":
            raise ApiError(
                503,
                "The request was cancelled, since the server is about to end. Send it again.",
                code="cancelled",
                headers={"Retry-After": "5"},
            )
        case "constraint":
            raise ApiError(400, event.error or "The grammar cannot be followed.", code="invalid_grammar")
        case "error":
            raise ApiError(500, event.error or "The model failed.", code="model_error")


class _Cancellable(Protocol):
    """`RequestJobs`, or a future."""

    def cancel(self) -> object: ...


async def unless_gone(request: Request, jobs: _Cancellable | None, answer: Coroutine[Any, Any, T]) -> T:
    """Await an answer, or raise `ApiError` if the client disconnects first. The jobs are cancelled in the end.

    Where the jobs of the request have ended, the response tells in a header what they have reused: see `Guard`.
    """
    work, gone = asyncio.create_task(answer), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(499, "The client went away.", code="cancelled")
        if isinstance(jobs, RequestJobs) and jobs.finished:
            request.scope["reuse"] = jobs.reuse
        return work.result()
    finally:
        if jobs is not None:
            jobs.cancel()
        work.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of one answer, or all of it."""

    choice: int  # the index of the answer
    text: str = ""  # new text; may be empty
    reasoning: str = ""  # new text of the reasoning before the answer, where the model marks it
    calls: tuple[ToolCall, ...] = ()  # new pieces of tool calls; those of one call are in a row
    logprobs: tuple[TokenLogprob, ...] = ()  # log probabilities of the new tokens, if they were asked for
    reason: str | None = None  # the finish reason of the answer, if it ends here; else None


@dataclass(frozen=True, slots=True)
class CallReaders:
    """Find tool calls and reasoning in the text of answers."""

    streams: Sequence[AnswerReader] = ()  # one for each choice; empty where an answer is text alone
    one_call: bool = False  # whether all calls but the first of an answer are left out
    shows_reasoning: bool = True  # whether reasoning is in the deltas
    thought: Counter[int] = field(default_factory=Counter)  # counts the tokens of reasoning, by choice

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
    """Deltas of the answers to a request, as its jobs make progress."""
    called: dict[int, ToolCall] = {}  # the last piece of each answer's calls
    async for choice, event in jobs.events():
        reason = str(event.reason) if isinstance(event, Finished) else None
        logprobs = () if isinstance(event, Finished) else event.logprobs
        read, calls = readers.read(choice, event), list[ToolCall]()
        for call in read.calls:
            last = called.get(choice)
            if last is not None and readers.one_call and call.id != last.id:
                continue
            begins = last is None or last.ended
            call = call._replace(begins=begins, number=0 if last is None else last.number + begins)
            called[choice] = call
            calls.append(call)
        if reason == "stop" and choice in called:
            reason = "length" if called[choice].cut else "tool_calls"
        reasoning = read.reasoning if readers.shows_reasoning else ""
        yield Delta(choice, read.content, reasoning, tuple(calls), logprobs, reason)


async def large(build: Callable[[], dict[str, Any]]) -> JSONResponse:
    """Build a response with a large body in a thread, so that the event loop is free meanwhile."""
    return await anyio.to_thread.run_sync(lambda: JSONResponse(build()))


async def whole(found: AsyncIterator[Delta], choices: int) -> list[Delta]:
    """Whole answers: the deltas of each choice, joined."""
    parts: list[list[Delta]] = [[] for _ in range(choices)]
    async for delta in found:
        parts[delta.choice].append(delta)
    return [
        Delta(
            choice,
            "".join(part.text for part in own),
            "".join(part.reasoning for part in own),
            joined_calls(calls) if (calls := [call for part in own for call in part.calls]) else (),
            tuple(logprob for part in own for logprob in part.logprobs),
            next((part.reason for part in reversed(own) if part.reason), None),
        )
        for choice, own in enumerate(parts)
    ]


def usage(finished: Mapping[int, Finished], n: int, readers: CallReaders | None = None) -> dict[str, Any]:
    """The `usage` object of jobs of which `n` in a row have the same prompt, which counts once."""
    events, firsts = finished.values(), [event for choice, event in finished.items() if choice % n == 0]
    details: dict[str, Any] = {
        "cached_tokens": sum(event.cached_tokens for event in firsts),
        "cached_tokens_by_tier": sum((Counter(event.tiers) for event in firsts), Counter[str]()),
        "moved_tokens": sum(event.moved_tokens for event in firsts),
        "repaired_tokens": sum(event.repaired_tokens for event in events),
        "computed_tokens": sum(event.computed_tokens for event in events),
    }
    for event in reversed(firsts):
        details |= event.reasons
    if any(event.pinned is not None for event in firsts):
        details["pinned"] = all(event.pinned is not False for event in firsts)
    prompt, completion = (
        sum(event.prompt_tokens for event in firsts),
        sum(event.completion_tokens for event in events),
    )
    told = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    counts = {
        "reasoning_tokens": readers.thought.total() if readers is not None and readers.streams else None,
        "accepted_prediction_tokens": _sum(event.accepted_prediction for event in events),
        "rejected_prediction_tokens": _sum(event.rejected_prediction for event in events),
    }
    known = {name: tokens for name, tokens in counts.items() if tokens is not None}
    return told | {"prompt_tokens_details": details} | ({"completion_tokens_details": known} if known else {})


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum of what was counted; None if nothing was."""
    found = [count for count in counts if count is not None]
    return sum(found) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamForm:
    """How a stream is written."""

    media_type: str  # the content type of the response
    line: Callable[[dict[str, Any]], str]  # writes an object
    ping: str  # sent when nothing else comes; clients skip it
    # What the object has besides the error that ends a stream which fails.
    failed: Mapping[str, Any] = field(default_factory=dict)
    end: str = ""  # sent behind the last object


def _event(told: dict[str, Any]) -> str:
    """A server-sent event. Objects with a `"type"` have that as the name of their event."""
    name = f"event: {told['type']}\n" if "type" in told else ""
    # In ASCII: some clients take U+2028 and its like for the end of a line.
    return f"{name}data: {json.dumps(told)}\n\n"


EVENTS = StreamForm(
    media_type="text/event-stream",
    line=_event,
    ping=": still running\n\n",
    end="data: [DONE]\n\n",
)
NAMED_EVENTS = replace(EVENTS, failed={"type": "error"}, end="")
PINGED_EVENTS = replace(NAMED_EVENTS, ping=_event({"type": "ping"}))
JSON_LINES = StreamForm(
    media_type="application/x-ndjson",
    line=lambda told: f"{json.dumps(told)}\n",
    ping=" ",  # before an object, space means nothing; an empty line would be no JSON
)


class EventStream(StreamingResponse):
    """Sends objects as they come, and cancels their jobs when the client disconnects.

    After `ping_s` silent seconds a ping is sent.
    """

    def __init__(
        self, events: AsyncIterator[dict[str, Any]], jobs: RequestJobs, ping_s: float, *, form: StreamForm = EVENTS
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), headers=headers, media_type=form.media_type)
        self._jobs, self._events, self._ping_s, self._form = jobs, events, ping_s, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body_iterator = _lines(self._events, self._ping_s, self._form, scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._jobs.cancel()


async def _lines(
    events: AsyncIterator[dict[str, Any]], ping_s: float, form: StreamForm, scope: Scope
) -> AsyncIterator[str]:
    task: asyncio.Task[dict[str, Any] | None] | None = None
    try:
        while True:
            task = task or asyncio.create_task(_next(events))
            if not (await asyncio.wait({task}, timeout=ping_s))[0]:
                yield form.ping
                continue
            event, task = task.result(), None
            if event is None:
                break
            yield form.line(event)
    except Exception as error:
        # The status was sent long ago: the error takes the place of what would have come.
        if not isinstance(error, ApiError):
            _log.exception("a stream failed")
        yield form.line({**api_error(error).told(scope), **form.failed})
        return
    finally:
        if task is not None:
            task.cancel()
    if form.end:
        yield form.end


async def _next(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(events, None)
