"""Audits of reused prompts: when the next one is due, and how many there were."""

from kvboost_hf import forks


class Audits:
    """Spreads audits evenly over reused prompts, and counts them. Safe for threads."""

    def __init__(self) -> None:
        self.count = self.divergences = 0
        self._lock = forks.lock()
        self._debt = 0.0

    def is_due(self, rate: float) -> bool:
        """Whether one more reused prompt brings the share of audited ones up to `rate`."""
        with self._lock:
            self._debt += rate
            due = self._debt >= 1 - 1e-9
            self._debt -= due
        return due

    def record(self, *, diverged: bool) -> None:
        """Count an audit."""
        with self._lock:
            self.count += 1
            self.divergences += diverged
