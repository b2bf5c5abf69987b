"""`Job`, its salt, the events of its answer, and sessions: what HTTP routes and the model's thread exchange."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol

from kvboost_hf.config import Repair
from kvboost_hf.errors import KVBoostError

Reuse = Literal["exact"] | Repair  # "exact", or how moved K/V is repaired
FinishReason = Literal["stop", "length", "cancelled", "timeout", "constraint", "error"]
LimitedBy = Literal["request", "context", "server", "logprobs"]
FIRST_TOKENS = 1024  # of an answer, that memory is kept for when it starts


class ConstraintError(KVBoostError):
    """A constraint cannot be followed any further, because of the request and not of the model."""


class Constraint(Protocol):
    """Decides which tokens may come next, such as a grammar. Belongs to one job."""

    def allowed(self) -> Any:
        """[vocab_size], bool, a tensor on the host: the tokens that may come next.

        Raises:
            ConstraintError: The constraint cannot be followed.
        """
        ...

    def advance(self, token: int) -> None:
        """Follow the constraint by one token.

        Raises:
            ConstraintError: The token was not allowed, or the constraint cannot be followed.
        """
        ...

    @property
    def finished(self) -> bool:
        """Whether the answer must end here."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the tokens of one job are chosen."""

    max_tokens: int  # tokens of the answer, at most; with 0 the prompt is computed and kept in the store
    min_tokens: int = 0  # tokens of the answer before any token, or text, may end it
    temperature: float = 0.0  # divides the logits; 0 takes the likeliest token
    top_p: float = 1.0  # sample from the likeliest tokens whose probabilities sum up to this
    top_k: int = 0  # sample from this many of the likeliest tokens; 0 for all
    min_p: float = 0.0  # sample from tokens with at least this share of the probability of the likeliest
    presence_penalty: float = 0.0  # subtracted from the logit of each token that was generated before
    frequency_penalty: float = 0.0  # subtracted from the logit of a token for each time that it was generated before
    # Divides positive logits of tokens in prompt and answer, and multiplies negative ones.
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token, added to its logit
    seed: int | None = None  # the seed of sampling; None for a different one each time
    # Report the log probability of each token, and of this many likeliest ones; None reports none.
    logprobs: int | None = None
    prompt_logprobs: bool = False  # report those of the prompt's tokens, too. All of it is computed then
    constraint: Constraint | None = None  # restricts the tokens that may come; None for no constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The first tokens of a prompt, to be pinned in host memory once they are computed."""

    # Seconds after the last use of these tokens after which they may be evicted; None for never.
    ttl_s: float | None = None
    tokens: int | None = None  # how many first tokens; None for all. More than the prompt has are all
    # Share of the store's budget that the pins of one client may take together. Where they would take more, others of
    # this client give way: those with the largest `Job.priority` first, of them those that were not used for longest.
    # None is for the operator: such a pin counts for no share, and stays.
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of fields that a request leaves out. These are those of OpenAI's API; models may bring others."""

    temperature: float = 1.0  # divides the logits
    top_p: float = 1.0  # sample from the likeliest tokens whose probabilities sum up to this
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, generation_config: Any) -> "SamplingDefaults":
        """What a model's generation config sets, and OpenAI's defaults for all else; None for those alone."""
        given = {field.name: getattr(generation_config, field.name, None) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def body(self) -> dict[str, float]:
        """By the name of the field of requests."""
        return asdict(self)


class ReasoningSpan(NamedTuple):
    """The reasoning at the beginning of an answer."""

    open: str  # the text before it
    close: str  # the text behind it
    opened: bool  # whether the prompt ends with `open`


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One text to continue."""

    ids: Sequence[int]  # token ids of the prompt; at least one
    options: SamplingOptions  # how the tokens of the answer are chosen
    stop: tuple[str, ...] = ()  # texts that end the answer
    ends: frozenset[int] = frozenset()  # tokens that end the answer
    include_stop: bool = False  # leave the stop text, or the token, that ends the answer in it
    # The reasoning of the answer, which stop texts do not end; None where the model marks none.
    reasoning: ReasoningSpan | None = None
    salt: bytes = b""  # jobs share K/V only with jobs of the same salt
    client: bytes = b""  # the client. Clients take turns, whatever their salts are
    # The client's waiting jobs with the smallest number run first. It does not count between clients.
    priority: int = 0
    # Names the conversation that the job belongs to, for `Engine.sessions`; None for a name that is made of the first
    # chunk of the prompt.
    session: str | None = None
    # How K/V of the prompt's text that stands elsewhere may be used, in place of the engine's policy; None for that
    # policy. A job without an answer is always computed exactly.
    reuse: Reuse | None = None
    keep: tuple[Keep, ...] = ()  # beginnings of the prompt to pin in host memory
    timeout_s: float | None = None  # seconds from `submit` after which the job ends; None for no limit
    skip_special_tokens: bool = True  # leave special tokens out of the text. Some models mark calls of tools with them
    # Token ids of a text that the answer may have parts of, which then come with fewer forwards.
    prediction: Sequence[int] = ()
    limited_by: LimitedBy = "request"  # what `SamplingOptions.max_tokens` comes from
    # Whether `Progress.known` tells, before the prompt is computed, how much of it is stored.
    tells_known: bool = False
    # Places that must be free in the queue: those of all answers of the request for its first job, 0 for the others.
    places: int = 1
    # Keys of the pieces of the request's text, by which the front of a cluster knows the prompt.
    text_keys: Sequence[bytes] = ()

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer, at most."""
        return len(self.ids) + self.options.max_tokens

    @property
    def reserved(self) -> int:
        """Tokens of prompt and answer that memory is kept for when the job starts; long answers get more later."""
        return len(self.ids) + min(self.options.max_tokens, FIRST_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Figures of the requests that belong together: those with a name, or those that begin alike."""

    id: str  # the name of the session, or a hash of its first chunk
    client: bytes  # whose it is
    first_seen: float  # when its first request ran, in seconds since 1970
    last_used: float  # when its last one ran
    requests: int  # how many ran
    tokens: int  # the number of tokens of the last prompt and its answer
    prompt_tokens: int  # the number of tokens of all prompts
    cached_tokens: int  # the number of prompt tokens that were reused
    nbytes: int  # bytes of its K/V in host memory
    priority: int  # the priority of the session's pins: those with the largest number give way first
    # Seconds for which all of it is pinned after each use, as was asked afterwards; None for no limit, and where
    # nothing was asked.
    ttl_s: float | None
    pinned: bool  # whether any of its K/V is pinned
    # When the last of its pins ends, if it is not used before; None without one, and for no end.
    pinned_until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionChange:
    """What to change of a session; None leaves it as it is."""

    # Pin all of its K/V, now and with each later request; False lets go of all its pins.
    keep: Keep | Literal[False] | None = None
    priority: int | None = None  # the new priority of the session's pins


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a token, and those of the likeliest ones at its place."""

    token: int  # the id of the token
    logprob: float | None  # natural logarithm of its probability; None for the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and theirs, the likeliest first


@dataclass(frozen=True, slots=True)
class Progress:
    """The next part of an answer."""

    text: str  # new text, without parts of a stop text or of a character; may be empty
    tokens: int  # the number of new tokens
    # The log probability of each token, if asked for. Those of the prompt come without new tokens.
    logprobs: tuple[TokenLogprob, ...] = ()
    # How many first tokens of the prompt are stored. Comes once, alone and first, where `Job.tells_known` asks for it;
    # None in all other events.
    known: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a job, and its last event."""

    # `"stop"`: an end of the text, a stop text or the end of a constraint. `"length"`: `max_tokens`. `"constraint"`:
    # the constraint could not be followed.
    reason: FinishReason
    prompt_tokens: int  # tokens of the prompt
    completion_tokens: int = 0  # generated tokens, the one that ends the text included
    cached_tokens: int = 0  # tokens of the prompt that were reused
    moved_tokens: int = 0  # reused tokens whose K/V was computed at another place, or behind another text
    repaired_tokens: int = 0  # tokens that went through the model again to repair moved K/V
    computed_tokens: int = 0  # tokens that went through the model for the prompt, the repaired ones included
    tiers: Mapping[str, int] = field(default_factory=dict)  # reused tokens by the tier that they came from
    queue_s: float = 0.0  # seconds from `submit` to the first forward
    ttft_s: float | None = None  # seconds from `submit` to the first token on the host; None without one
    total_s: float = 0.0  # seconds from `submit` to the end
    error: str | None = None  # what went wrong, for `"constraint"` and `"error"`
    stop: str | None = None  # the stop text that has ended it; None for none
    ids: Sequence[int] = ()  # the generated tokens
    pinned: bool | None = None  # whether all that `Job.keep` asks for is pinned; None if it asks for nothing
    # Tokens of the prediction that were checked and are in the answer; None without one.
    accepted_prediction: int | None = None
    rejected_prediction: int | None = None  # those that were checked and are not
    # Why nothing of the prompt was moved (`"moved_reason"`), and why moved tokens were not repaired along with new
    # ones (`"riding_reason"`), where moving was allowed.
    reasons: Mapping[str, str] = field(default_factory=dict)


JobEvent = Progress | Finished
Listener = Callable[[JobEvent], None]  # called by the thread that runs the model: must not block


def prompt_salt(salt: str, api_key: str | None, cache_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """The salt that separates the K/V of clients who must not find each other's prompts.

    Args:
        salt: The salt of the server, or of the prompts that are warmed for it.
        api_key: Who asks; None where nobody needs a key.
        cache_key: A request's `prompt_cache_key`, which was a part of salts in earlier releases.
        cache_salt: A request's `cache_salt`.

    Returns:
        For caches and stores; that of a `ChunkStore` without one if there is nothing to tell apart.
    """
    if api_key is None and cache_key is None and cache_salt is None:
        return salt.encode()
    told: tuple[str | None, ...] = (api_key, cache_key, salt) if salt else (api_key, cache_key)
    if cache_salt is not None:
        told = (*told, "cache_salt", cache_salt)  # K/V that was stored without one stays found
    return hashlib.sha256(repr(told).encode()).digest()
