"""The events of a job: parts of its answer, and its end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "timeout", "constraint", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a token, and those of the likeliest ones at its place.

    Args:
        token: The id of the token.
        logprob: Natural logarithm of its probability; None for the first token of a prompt.
        top: The likeliest tokens and theirs, the likeliest first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """The next part of an answer.

    Args:
        text: New text, without parts of a stop text or of a character; may be empty.
        tokens: The number of new tokens.
        logprobs: Of each token, if they were asked for. Those of the prompt come without new tokens.
    """

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a job, and its last event.

    Args:
        reason: `"stop"`: an end of the text, a stop text or the end of a constraint. `"length"`: `max_tokens`.
            `"constraint"`: the constraint could not be followed.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Generated tokens, the one that ends the text included.
        cached_tokens: Tokens of the prompt that were reused.
        moved_tokens: Of the reused tokens, those whose K/V was computed at another place, or behind another text.
        repaired_tokens: Tokens that went through the model again to repair moved K/V.
        computed_tokens: Tokens that went through the model for the prompt, the repaired ones included.
        tiers: Reused tokens by the tier that they came from.
        queue_s: Seconds from `submit` to the first forward.
        ttft_s: Seconds from `submit` to the first token on the host; None without one.
        total_s: Seconds from `submit` to the end.
        error: What went wrong, for `"constraint"` and `"error"`.
        stop: The stop text that has ended it; None for none.
        ids: The generated tokens.
        pinned: Whether all that `Job.keep` asks for is pinned; None if it asks for nothing.
        accepted_prediction: Tokens of the prediction that were checked and are in the answer; None without one.
        rejected_prediction: Those that were checked and are not.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    moved_tokens: int = 0
    repaired_tokens: int = 0
    computed_tokens: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)
    queue_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    error: str | None = None
    stop: str | None = None
    ids: Sequence[int] = ()
    pinned: bool | None = None
    accepted_prediction: int | None = None
    rejected_prediction: int | None = None


Event = Progress | Finished


Listener = Callable[[Event], None]  # called by the thread that runs the model: must not block
