"""A check: figures, their limits, and the figures of codecs that are broken on purpose."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was measured.

    Args:
        name: What.
        found: The figures of the check.
        allowed: The least and the most that some of them may be; empty where nothing is claimed.
        controls: The figures with a codec that is broken on purpose, by what was done to it.
        claim: What is known of it, for people.
    """

    name: str
    found: Figures
    allowed: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    controls: Mapping[str, Figures] = field(default_factory=dict)
    claim: str = ""

    @property
    def holds(self) -> bool:
        """Whether all figures are as they may be."""
        return self._within(self.found)

    @property
    def undetected(self) -> tuple[str, ...]:
        """The controls that hold, too: then the check tells nothing."""
        return tuple(name for name, found in self.controls.items() if self.allowed and self._within(found))

    @property
    def passed(self) -> bool:
        """It holds, and no control does."""
        return self.holds and not self.undetected

    def _within(self, found: Figures) -> bool:
        return all(low <= found[name] <= high for name, (low, high) in self.allowed.items())

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "name": self.name,
            "passed": self.passed,
            "claim": self.claim,
            "found": dict(self.found),
            "allowed": {name: list(limits) for name, limits in self.allowed.items()},
            "controls": {name: dict(found) for name, found in self.controls.items()},
        }
