"""`Engine`: the protocol of what runs jobs, and the errors with which it refuses them."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from kvboost_hf.server.jobs.events import Listener
from kvboost_hf.server.jobs.job import Job
from kvboost_hf.server.jobs.model_card import ModelCard
from kvboost_hf.server.jobs.session import Session, SessionChange


class QueueFullError(RuntimeError):
    """The queue is full.

    Args:
        retry_after_s: Seconds after which there may be room.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLongError(ValueError):
    """A prompt exceeds the memory or the positions of the model.

    Args:
        max_prompt_tokens: The longest prompt that there is room for, with as many new tokens.
        max_new_tokens: The longest answer that there is room for, with this prompt.
    """

    def __init__(self, message: str, max_prompt_tokens: int, max_new_tokens: int = 0) -> None:
        super().__init__(message)
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens


class DrainingError(RuntimeError):
    """The server takes no more jobs: it is about to end."""


class Ticket(Protocol):
    """A job that an engine has taken."""

    def cancel(self) -> None:
        """End the job as soon as possible; `Finished("cancelled")` follows. Any thread may call it, repeatedly."""
        ...


class Engine(Protocol):
    """Runs jobs."""

    @property
    def vocab_size(self) -> int:
        """Columns of the model's logits."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together, at most: a job with more can never run."""
        ...

    @property
    def model_card(self) -> ModelCard:
        """What the model is."""
        ...

    def submit(self, job: Job, listener: Listener) -> Ticket:
        """Queue a job. Any thread may call it.

        Raises:
            QueueFullError: The queue is full.
            TooLongError: The job can never run.
            DrainingError: The engine takes no more jobs.
        """
        ...

    def embed(self, texts: Sequence[Sequence[int]], client: bytes = b"") -> Future[list[list[float]]]:
        """Queue texts to embed. Any thread may call it.

        Args:
            texts: Token ids of each text, at least one.
            client: Who asks; see `Job.client`.

        Returns:
            A future with an embedding of each text. It may be cancelled.

        Raises:
            QueueFullError: The queue is full.
            TooLongError: A text is longer than the model's context.
            DrainingError: The engine takes no more jobs.
        """
        ...

    def sessions(self, client: bytes | None, id: str | None = None) -> list[Session]:
        """The sessions of a client, of all clients for None, or one of them; those used last come first.

        This and the two methods below may be called by any thread. They wait for the model's thread, and for tiers.

        Raises:
            DrainingError: The engine has ended.
        """
        ...

    def change_session(self, client: bytes, id: str, change: SessionChange) -> Session | None:
        """Change what is kept of a session; None if there is none. `Session.pinned` says what has become of it."""
        ...

    def drop_session(self, client: bytes, id: str, salt: bytes) -> dict[str, int] | None:
        """Remove a session and its K/V from all tiers. Its requests under way go on, and keep nothing.

        K/V that other sessions of the client begin with stays.

        Args:
            client: Whose it is.
            id: Its name or hash.
            salt: Of the jobs with this name; their K/V is removed even where the session is not known any more.

        Returns:
            By tier, the bytes that were removed; None if there is no such session, and no such K/V.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Current figures, as numbers, strings, and dicts of them."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Take no more jobs, and wait for those that were taken. After `timeout_s` those that are left are cancelled.

        Any thread may call it, any number of times.

        Returns:
            Whether all of them ended in time.
        """
        ...
