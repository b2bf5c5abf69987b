"""`EngineLimits`: how many jobs and tokens an engine takes at once, and which jobs it can never run."""

from collections.abc import Collection
from dataclasses import dataclass

from kvboost_hf.server.jobs import Job, TooLongError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of a `ModelEngine`.

    Args:
        max_batch_size: Jobs that run at the same time, those whose prompts are being computed included.
        max_queue_size: Jobs that may wait besides.
        prefill_chunk_size: Tokens of a prompt that are computed in one forward, at most.
        batch_window_ms: How long the first job after a pause waits for others, in milliseconds.
        max_model_len: Tokens of a prompt and its answer, at most; None for the number of positions of the model.
        max_live_tokens: Tokens of all running jobs, with answers at their longest; None for no limit.
        max_client_share: The share of `max_queue_size` and of `max_live_tokens` that one client may take alone. It
            gets more only while what stays free is its part of what it has and what is free: so two clients with a
            share of 3/4 take 3/7 each, and 1/7 is left for others.

    Raises:
        ValueError: A count is not positive, or the share is not above 0 and at most 1.
    """

    max_batch_size: int = 8
    max_queue_size: int = 64
    prefill_chunk_size: int = 256
    batch_window_ms: float = 0
    max_model_len: int | None = None
    max_live_tokens: int | None = None
    max_client_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_queue_size", "prefill_chunk_size", "max_model_len", "max_live_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        if not 0 < self.max_client_share <= 1:
            raise ValueError(f"`max_client_share` must be more than 0 and at most 1, got {self.max_client_share}.")

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
                    max(limit - prompt, 0),
                )

    def has_room(self, job: Job, running: Collection[Job]) -> bool:
        """Whether a job may start beside the running ones. A client without a running job may exceed the batch."""
        own = [other.longest for other in running if other.client == job.client]
        if len(running) >= (self.max_batch_size if own else 2 * self.max_batch_size):
            return False
        if self.max_live_tokens is None:
            return True
        free = self.max_live_tokens - sum(other.longest for other in running) - job.longest
        return free >= 0 and (not own or self._is_share(sum(own) + job.longest, free))

    def has_place(self, own: int, waiting: int) -> bool:
        """Whether a client with `own` waiting jobs may queue another one beside `waiting` jobs of all clients."""
        free = self.max_queue_size - waiting - 1
        return free >= 0 and (not own or self._is_share(own + 1, free))

    def _is_share(self, own: int, free: int) -> bool:
        """Whether one client may have `own` while `free` stays free (the dynamic thresholds of shared buffers)."""
        return own * (1 - self.max_client_share) <= free * self.max_client_share
