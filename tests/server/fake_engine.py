"""An engine without a model: it says what it is told to say, and remembers what it was asked."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tests.internals.server import (
    DrainingError,
    Finished,
    FinishReason,
    Job,
    Listener,
    ModelCard,
    Progress,
    Session,
    SessionChange,
    TokenLogprob,
)


@dataclass
class FakeTicket:
    """A job that was taken, and the thread that answers it."""

    job: Job
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """See `Ticket`."""
        self.cancelled.set()


class FakeEngine:
    """Says the same pieces to everybody, each in a thread of its own.

    Attributes:
        says: The pieces.
        reason: Why the answers end.
        stop: The stop text that has brought it.
        error: To be raised by `submit`.
        failure: The error of `Finished`, with the reason `"error"` in place of `"stop"`.
        before: Called with the ticket and the number of each piece before it is said.
        tickets: The tickets of all jobs that were taken.
    """

    vocab_size = 1472  # of the embedded model

    def __init__(self, *says: str) -> None:
        self.says: Sequence[str] = says
        self.reason: FinishReason = "stop"
        self.error: Exception | None = None
        self.failure: str | None = None
        self.before: Callable[[FakeTicket, int], object] = lambda ticket, piece: None
        self.tickets: list[FakeTicket] = []
        self.stop: str | None = None
        self.drained: float | None = None
        self.max_model_len = 2**31

    model_card = ModelCard(family="fake", parameters=1_500_000, num_bytes=6_000_000, quantization="F32")

    @property
    def job(self) -> Job:
        """The last one."""
        return self.tickets[-1].job

    def submit(self, job: Job, listener: Listener) -> FakeTicket:
        """See `Engine`."""
        if self.drained is not None:
            raise DrainingError("about to end")
        if self.error is not None:
            raise self.error
        ticket = FakeTicket(job)
        self.tickets.append(ticket)
        threading.Thread(target=self._answer, args=(ticket, listener), daemon=True).start()
        return ticket

    def _answer(self, ticket: FakeTicket, listener: Listener) -> None:
        job, said, reason = ticket.job, 0, self.reason
        for piece, text in enumerate(self.says[: job.options.max_tokens]):
            self.before(ticket, piece)
            if ticket.cancelled.is_set():
                reason = "cancelled"
                break
            said += 1
            listener(Progress(text, 1, self._logprobs(job, piece)))
        listener(
            Finished(
                reason="error" if self.failure and reason == "stop" else reason,
                prompt_tokens=len(job.ids),
                completion_tokens=said,
                cached_tokens=len(job.ids) // 2,
                moved_tokens=3,
                repaired_tokens=1,
                computed_tokens=len(job.ids) - len(job.ids) // 2 + 1,
                tiers={"ram": len(job.ids) // 2},
                ttft_s=0.25,
                total_s=0.5,
                error=self.failure,
                stop=self.stop,
                ids=tuple(range(40, 40 + said)),
            )
        )
        ticket.ended.set()

    def _logprobs(self, job: Job, piece: int) -> tuple[TokenLogprob, ...]:
        if job.options.logprobs is None:
            return ()
        top = tuple((token, -0.5 - token) for token in range(job.options.logprobs))
        return (TokenLogprob(piece + 40, -0.25, top),)

    def embed(self, texts: Sequence[Sequence[int]], client: bytes = b"") -> Future[list[list[float]]]:
        """See `Engine`; without a model there are none."""
        raise NotImplementedError

    def known_tokens(self, prompts: Sequence[Sequence[int]], salt: bytes) -> list[int]:
        """See `Engine`; without K/V nothing is known."""
        return [0] * len(prompts)

    def sessions(self, client: bytes | None, id: str | None = None) -> list[Session]:
        """See `Engine`; without K/V there are none."""
        return []

    def change_session(self, client: bytes, id: str, change: SessionChange) -> Session | None:
        """See `Engine`."""
        return None

    def drop_session(self, client: bytes, id: str, salt: bytes) -> dict[str, int] | None:
        """See `Engine`."""
        return None

    def load(self) -> dict[str, int]:
        """See `Engine`."""
        return {"waiting": 0, "running": len(self.tickets)}

    def stats(self) -> dict[str, Any]:
        """See `Engine`."""
        return {**self.load(), "store": {"tiers": {"ram": {"bytes": 7}}}, "name": "fake"}

    def drain(self, timeout_s: float) -> bool:
        """See `Engine`."""
        self.drained = timeout_s
        return True


def require_cancelled(engine: FakeEngine, jobs: int) -> None:
    """All jobs that an engine has taken, so many, end because they are cancelled."""
    assert len(engine.tickets) == jobs
    for ticket in engine.tickets:
        assert ticket.ended.wait(20)
        assert ticket.cancelled.is_set()
