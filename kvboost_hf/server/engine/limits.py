"""`EngineLimits`: how many jobs and tokens there is room for, and which running job gives way to a long answer."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvboost_hf.fields import check_bounds, same, setting
from kvboost_hf.server.fair_share import may_hold
from kvboost_hf.server.jobs import Job
from kvboost_hf.server.protocol import TooLongError
from kvboost_hf.server.settings import ServerSettings


class Claim(Protocol):
    """A job that takes memory, or is about to."""

    @property
    def client(self) -> bytes:
        """Who asks."""
        ...

    @property
    def reserved(self) -> int:
        """Tokens of prompt and answer that memory is kept for."""
        ...


Claimed = TypeVar("Claimed", bound=Claim)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of a `ModelEngine`.

    Args:
        max_batch_size, max_queue_size, prefill_chunk_size, batch_window_ms, max_model_len: As `ServerSettings` has
            them, of jobs.
        max_live_tokens: Tokens of all running jobs; None for no limit. Of an answer, `FIRST_TOKENS` count from its
            start, and more when it gets longer. Where there is no room for more, a job is set aside until there is.
        max_client_share: The share of `max_queue_size` and of `max_live_tokens` that one client may take alone, as
            `may_hold` has it.

    Raises:
        ValueError: A limit is out of its range.
    """

    max_batch_size: int = same(ServerSettings, "max_batch_size")
    max_queue_size: int = same(ServerSettings, "max_queue_size")
    prefill_chunk_size: int = same(ServerSettings, "prefill_chunk_size")
    batch_window_ms: float = same(ServerSettings, "batch_window_ms")
    max_model_len: int | None = same(ServerSettings, "max_model_len")
    max_live_tokens: int | None = same(ServerSettings, "max_live_tokens")
    max_client_share: float = setting(1.0, above=0, most=1)

    def __post_init__(self) -> None:
        check_bounds(self)

    def require_fit(self, job: Job, context: int) -> None:
        """Raise for a job that can never run.

        Args:
            job: The job.
            context: Tokens of a prompt and its answer, at most.

        Raises:
            ValueError: The prompt is empty.
            TooLongError: Prompt and answer do not fit into the context, or into `max_live_tokens`.
        """
        prompt, new = len(job.ids), job.options.max_tokens
        if not prompt:
            raise ValueError("The prompt must have at least one token, got none.")
        for limit, what in ((context, "the context window"), (self.max_live_tokens, "the memory of this server")):
            if limit is not None and job.longest > limit:
                most = max(limit - new, 0)
                raise TooLongError(
                    f"A prompt of {prompt} tokens with {new} new ones takes {job.longest}, which exceeds {what} of "
                    f"{limit}. Shorten it to {most} tokens, or ask for fewer new ones.",
                    most,
                    tokens=prompt,
                    limit=limit,
                )

    def has_room(self, job: Claim, running: Collection[Claim]) -> bool:
        """Whether a job may start beside the running ones. A client without a running job may exceed the batch."""
        own = [other.reserved for other in running if other.client == job.client]
        if len(running) >= (self.max_batch_size if own else 2 * self.max_batch_size):
            return False
        if self.max_live_tokens is None:
            return True
        free = self.max_live_tokens - sum(other.reserved for other in running) - job.reserved
        return may_hold(sum(own), job.reserved, free, self.max_client_share)

    def in_the_way(self, job: Claimed, more: int, running: Sequence[Claimed]) -> Claimed | None:
        """Which of the running jobs has to wait so that one of them may take more memory; None where there is room.

        It is the last one of the same client; where that has no other one, the last one of the client that has most.
        The first of all goes on, so that all of them end.

        Args:
            job: The job with the long answer.
            more: How many tokens more.
            running: All running jobs, in the order in which they were admitted.
        """
        if self.max_live_tokens is None or len(running) < 2:
            return None
        held = Counter[bytes]()
        for other in running:
            held[other.client] += other.reserved
        alone = sum(other.client == job.client for other in running) == 1
        free = self.max_live_tokens - held.total() - more
        if may_hold(0 if alone else held[job.client], more, free, self.max_client_share):
            return None
        client = held.most_common(1)[0][0] if alone else job.client
        return next((other for other in reversed(running[1:]) if other.client == client), running[-1])

    def has_place(self, own: int, waiting: int) -> bool:
        """Whether a client with `own` waiting jobs may queue another one beside `waiting` jobs of all clients."""
        return may_hold(own, 1, self.max_queue_size - waiting - 1, self.max_client_share)
