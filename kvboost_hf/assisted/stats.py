"""What speculation has done."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class SpeculationStats:
    """Counts of rounds: drafts and what the target made of them.

    The last round of an answer is left out, whose outcome is not told.

    Args:
        rounds: How many.
        drafted: Tokens.
        accepted: Of these, how many the target took over.
        committed: Tokens that rounds gave, with those of the target.
        histogram: How many rounds had so many tokens accepted.
        draft_s: Seconds of drafting.
        target_s: Seconds between a draft and the next one: the target's pass, its sampling, and taking back K/V.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    draft_s: float = 0.0
    target_s: float = 0.0

    @property
    def acceptance(self) -> float:
        """Accepted tokens per drafted one; 0.0 if there was none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def committed_per_round(self) -> float:
        """Tokens that a round gave; 0.0 if there was none."""
        return self.committed / self.rounds if self.rounds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.acceptance:.0%} of {self.drafted} drafted tokens accepted, "
            f"{self.committed_per_round:.2f} tokens a round, {self.draft_s:.2f} s drafting, {self.target_s:.2f} s "
            "verifying"
        )
