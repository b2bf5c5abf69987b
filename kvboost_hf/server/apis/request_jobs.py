"""Submits the jobs of one request to the engine, and passes their events on to the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from kvboost_hf.server.http.errors import ApiError
from kvboost_hf.server.http.metrics import Meter
from kvboost_hf.server.jobs import Finished, Job, JobEvent
from kvboost_hf.server.protocol import Engine, Ticket

T = TypeVar("T")


class RequestJobs:
    """The jobs of one request, submitted together.

    Args:
        engine: The engine that runs the jobs.
        jobs: The jobs; either all of them are submitted or none.
        meter: Counts tokens and ends for `/metrics`.
        figures: A `Counter` that receives the same counts, and the times of the first answer, for the request's line
            in the log.

    Attributes:
        first: The first job.
        finished: By the index of the job, how it has ended.

    Raises:
        QueueFullError: The queue has no room for one of the jobs.
        TooLongError: One of the jobs can never run.
        DrainingError: The engine takes no more jobs.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job], meter: Meter, figures: dict[str, Any]) -> None:
        self._loop, self._meter = asyncio.get_running_loop(), meter
        self._events: asyncio.Queue[tuple[int, JobEvent]] = asyncio.Queue()
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
                self._tickets.append(engine.submit(job, self._listener(n)))
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

    async def events(self) -> AsyncIterator[tuple[int, JobEvent]]:
        """Events with the index of their job, until all jobs have finished.

        Raises:
            ApiError: A job was given up, or has failed.
        """
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
    """Await an answer, and cancel it if the client disconnects first.

    Where the jobs of the request have ended, the response tells in a header what they have reused: see `Guard`.

    Args:
        request: The client's request.
        jobs: Cancelled at the end, whether the client is there or not; None for nothing.
        answer: The coroutine to await.

    Raises:
        ApiError: The client has disconnected.
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
