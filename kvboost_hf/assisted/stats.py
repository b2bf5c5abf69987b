"""What speculation has done."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class SpeculationStats:
    """Counts of rounds: drafts and what the target made of them.

    The last round of an answer is counted when the answer is there, if `generate()` ran on the target that the draft
    was prepared for; else it is left out, for its outcome is not told. A round that ends its answer with a drafted
    token has no token of the target's own.

    Args:
        rounds: How many.
        drafted: Tokens.
        accepted: Of these, how many the target took over.
        committed: Tokens that rounds gave, with those of the target.
        histogram: How many rounds had so many tokens accepted.
        draft_s: Seconds of drafting.
        verify_s: Seconds from a draft to what the target made of it, on the host: its pass, and its sampling.
        rollback_s: Seconds of taking back K/V of refused tokens from the target's cache.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0

    @property
    def target_s(self) -> float:
        """Seconds of verifying and rolling back."""
        return self.verify_s + self.rollback_s

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
            f"{self.committed_per_round:.2f} tokens a round, {self.draft_s:.2f} s drafting, {self.verify_s:.2f} s "
            f"verifying, {self.rollback_s:.2f} s rolling back"
        )
