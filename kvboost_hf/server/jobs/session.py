"""`Session`: figures of the requests that belong together, and `SessionChange`: what to keep of them."""

from dataclasses import dataclass
from typing import Literal

from kvboost_hf.server.jobs.job import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Figures of the requests that belong together: those with a name, or those that begin alike.

    Args:
        id: Its name, or a hash of its first chunk.
        client: Whose it is.
        first_seen: When its first request ran, in seconds since 1970.
        last_used: When its last one ran.
        requests: How many ran.
        tokens: Of the last prompt and its answer.
        prompt_tokens: Of all prompts.
        cached_tokens: Of these, reused ones.
        nbytes: Bytes of its K/V in host memory.
        priority: Of its pins: those with the largest number give way first.
        ttl_s: Seconds for which all of it is pinned after each use, as was asked afterwards; None for no limit, and
            where nothing was asked.
        pinned: Whether any of its K/V is pinned.
        pinned_until: When the last of its pins ends, if it is not used before; None without one, and for no end.
    """

    id: str
    client: bytes
    first_seen: float
    last_used: float
    requests: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    nbytes: int
    priority: int
    ttl_s: float | None
    pinned: bool
    pinned_until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionChange:
    """What to change of a session; None leaves it as it is.

    Args:
        keep: Pin all of its K/V, now and with each later request; False lets go of all its pins.
        priority: Of its pins.
    """

    keep: Keep | Literal[False] | None = None
    priority: int | None = None
