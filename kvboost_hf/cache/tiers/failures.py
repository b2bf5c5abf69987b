"""Failures of a tier: counted, logged now and then, and never raised."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
