"""Failures of tiers: counted, logged now and then, never raised; what failed is left alone for a while."""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import ParamSpec, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from kvboost_hf import forks

_SILENCE_S = 60.0  # between two warnings of one kind


class Failures:
    """Counts and logs the failures of a tier.

    Args:
        log: Where to.
        place: The tier, for people.
        kinds: The exceptions to be expected.
    """

    def __init__(self, log: logging.Logger, place: str, kinds: tuple[type[Exception], ...]) -> None:
        self.count = 0
        self._log, self._place, self._kinds = log, place, kinds
        self._logged: dict[str, float] = {}

    @contextmanager
    def caught(self, doing: str) -> Iterator[None]:
        """Count what goes wrong inside, and leave the block."""
        try:
            yield
        except self._kinds as error:
            self.note(doing, error)

    def note(self, doing: str, error: Exception) -> None:
        """Count one failure; each kind is logged at once, and then once a minute."""
        self.count += 1
        kind = f"{type(error).__name__} {getattr(error, 'errno', None) or getattr(error, 'sqlite_errorname', '')}"
        now = time.monotonic()
        if now - self._logged.get(kind, -_SILENCE_S) >= _SILENCE_S:
            self._logged[kind] = now
            self._log.warning(
                "%s: failed to %s: %s. This looks like a miss; failures so far: %d.",
                self._place,
                doing,
                error,
                self.count,
            )


P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("kvboost_hf")


class Guard:
    """Calls that may fail, and what they count for while they do.

    One failure is enough to leave the other side alone. Then one call finds out whether it is back, while all others
    go on without it.

    Args:
        place: What is guarded, for the log.
        failures: What counts as a failure. All there is, where a foreign client does not tell what it raises.
        secrets: Words to keep out of the log.
        cooldown_s: Seconds to leave it alone for after a failure, twice as many after each further one.
        max_cooldown_s: No more than these.

    Raises:
        ValueError: for a cool-down that is not positive.
    """

    def __init__(
        self,
        place: str,
        *,
        failures: type[Exception] = Exception,
        secrets: Collection[str] = (),
        cooldown_s: float = 1.0,
        max_cooldown_s: float = 30.0,
    ) -> None:
        if not cooldown_s > 0:
            raise ValueError(f"`cooldown_s` must be more than 0 seconds, got {cooldown_s!r}.")
        self.errors = 0  # failures since the start
        self._place, self._failures, self._secrets = place, failures, sorted(secrets, key=len, reverse=True)
        self._cooldown_s, self._max_cooldown_s = cooldown_s, max(cooldown_s, max_cooldown_s)
        self._pause_s = 0.0  # between the last failure and the next attempt; 0 while all is well
        self._failed_at = self._retry_at = float("-inf")
        self._lock = forks.lock()

    @property
    def state(self) -> str:
        """`"open"` while calls go through, `"down"` since a failure."""
        return "down" if self._pause_s else "open"

    def call(self, otherwise: T, attempt: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `attempt(*args, **kwargs)`, or `otherwise` where it fails, or has failed a moment ago."""
        began = monotonic()
        with self._lock:
            if began < self._retry_at:
                return otherwise
            if self._pause_s:
                self._retry_at = began + self._pause_s
        try:
            result = attempt(*args, **kwargs)
        except self._failures as error:
            self._fail(error, began)
            return otherwise
        with self._lock:
            recovered = bool(self._pause_s) and began >= self._failed_at
            if recovered:
                self._pause_s, self._retry_at = 0.0, float("-inf")
        if recovered:
            _log.info("%s answers again.", self._place)
        return result

    def _fail(self, error: Exception, began: float) -> None:
        with self._lock:
            self.errors += 1
            first = not self._pause_s
            if began >= self._failed_at:  # what had begun before the last failure tells nothing new
                self._pause_s = min(self._pause_s * 2 or self._cooldown_s, self._max_cooldown_s)
                self._failed_at = monotonic()
                self._retry_at = self._failed_at + self._pause_s
        if first:
            text = f"{type(error).__name__}: {error}"
            for secret in self._secrets:
                text = text.replace(secret, "***")
            _log.warning("%s failed, and is left alone for a while (%s).", self._place, text)


def without_secrets(url: str) -> str:
    """An address as people may see it: without user, password and options."""
    return re.sub(r"//([^@]*:.*|[^/]*)@", "//", url).partition("?")[0]


def secrets_in(url: str) -> set[str]:
    """Secrets of an address, which `without_secrets` leaves out."""
    parts = urlsplit(url)
    values = [value for values in parse_qs(parts.query).values() for value in values]
    return {word for word in (parts.password, unquote(parts.password or ""), *values) if word}
