"""What the front of the server asks of the thread that runs the model, and what it is told: no tensors, no HTTP."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kvboost_hf.errors import KVBoostError

FinishReason = Literal["stop", "length", "cancelled", "timeout", "constraint", "error"]


class ConstraintError(KVBoostError):
    """A constraint cannot be followed any further: of what was asked, no fault of the model."""


class Constraint(Protocol):
    """Decides which tokens may come next, such as a grammar. Belongs to one job."""

    def allowed(self) -> Any:
        """[vocab_size], bool, a tensor on the host: the tokens that may come next.

        Raises:
            ConstraintError: it cannot be followed.
        """
        ...

    def advance(self, token: int) -> None:
        """`token` has come.

        Raises:
            ConstraintError: it was not allowed, or the constraint cannot be followed.
        """
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may come."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the tokens of one job are chosen.

    Args:
        max_tokens: At most so many; with 0 the prompt is computed, and kept in the store.
        temperature: 0 takes the likeliest.
        top_p: Of the likeliest tokens, those that have this probability together.
        top_k: The so many likeliest tokens; 0 for all.
        min_p: Tokens with at least this share of the probability of the likeliest.
        presence_penalty: Taken off the logit of each token that was generated before.
        frequency_penalty: The same, times how often.
        repetition_penalty: Divides positive logits of tokens in prompt and answer, and multiplies negative ones.
        logit_bias: By token, what is added to its logit.
        seed: Of the draws; None for another one each time.
        logprobs: Tell the log probability of each token, and of so many likeliest ones; None tells none.
        constraint: Or None.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One text to continue.

    Args:
        ids: Of the prompt; one at least.
        options: How to go on.
        stop: Texts that end it, and are left out of it.
        ends: Tokens that end it.
        salt: Separates those who must not see each other's prompts.
        client: Who asks. Clients take turns, whatever their salts are.
        pin_share: Keep the prompt in host memory from then on, and let the client's oldest ones go that are above this
            share of the store's budget; with 1 this one never goes. 0 keeps nothing.
        timeout_s: Seconds from `submit` after which it is ended; None for no limit.
        skip_special_tokens: Leave special tokens out of the text. Some models mark calls of tools with them.
    """

    ids: Sequence[int]
    options: SamplingOptions
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    salt: bytes = b""
    client: bytes = b""
    pin_share: float = 0.0
    timeout_s: float | None = None
    skip_special_tokens: bool = True

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer, at most."""
        return len(self.ids) + self.options.max_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that came, and what else might have.

    Args:
        token: Its id.
        logprob: Natural logarithm of its probability.
        top: The likeliest tokens and theirs, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """More of a text.

    Args:
        text: What is sure to be a part of the answer: no part of a stop text, no half of a character. May be empty.
        tokens: How many tokens came with it.
        logprobs: Of each token, if they were asked for.
    """

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a job; the last that is told of it.

    Args:
        reason: `"stop"`: an end of the text, a stop text or the end of a constraint. `"length"`: `max_tokens`.
            `"constraint"`: the constraint could not be followed.
        prompt_tokens: Of the prompt.
        completion_tokens: That were generated, the end of the text included.
        cached_tokens: Of the prompt, not computed for this job.
        tiers: Of these, how many came from each tier.
        queue_s: Seconds from `submit` to the first forward.
        ttft_s: Seconds from `submit` to the first token on the host; None without one.
        total_s: Seconds from `submit` to the end.
        error: What went wrong, for `"constraint"` and `"error"`.
        stopped: Whether a stop text has ended it.
        pinned: Whether the prompt is kept, see `Job.pin_share`.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)
    queue_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    error: str | None = None
    stopped: bool = False
    pinned: bool = False


Event = Progress | Finished
Listener = Callable[[Event], None]  # called by the thread that runs the model: must not block


class QueueFullError(RuntimeError):
    """No room in the queue.

    Args:
        retry_after_s: When there may be some.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLongError(ValueError):
    """A prompt for which there is no memory, or no positions.

    Args:
        max_prompt_tokens: The longest prompt that there is room for, with as many new tokens.
    """

    def __init__(self, message: str, max_prompt_tokens: int) -> None:
        super().__init__(message)
        self.max_prompt_tokens = max_prompt_tokens


class DrainingError(RuntimeError):
    """The server takes no more jobs: it is about to end."""


class Ticket(Protocol):
    """A job that was taken."""

    def cancel(self) -> None:
        """End it as soon as possible; `Finished("cancelled")` follows. Any thread may call it, any number of times."""
        ...


class Engine(Protocol):
    """What runs jobs."""

    @property
    def vocab_size(self) -> int:
        """Columns of the model's logits."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together, at most: a job with more can never run."""
        ...

    def submit(self, job: Job, listener: Listener) -> Ticket:
        """Queue a job. Any thread may call it.

        Raises:
            QueueFullError: there are as many waiting as may wait.
            TooLongError: it can never run.
            DrainingError: no more are taken.
        """
        ...

    def embed(self, texts: Sequence[Sequence[int]]) -> Future[list[list[float]]]:
        """Queue texts to embed. Any thread may call it.

        Args:
            texts: Token ids of each, one at least.

        Returns:
            Will have an embedding of each text. It may be cancelled.

        Raises:
            QueueFullError: see `submit`, as for the others.
            TooLongError:
            DrainingError:
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Figures as they are now: plain numbers, texts, and dicts of them."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Take no more jobs, and wait for those that were taken. After `timeout_s` those that are left are cancelled.

        Any thread may call it, any number of times.

        Returns:
            Whether all of them ended in time.
        """
        ...
