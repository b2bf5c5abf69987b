"""Counts of speculative decoding."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class SpeculationStats:
    """Counts and times of rounds: a draft, and the target's pass that verifies it.

    The last round of an answer is counted when the answer is complete, if `generate()` ran on the target that the
    draft was prepared for; otherwise its outcome is unknown and it is left out. A round that ends its answer with a
    drafted token has no token of the target's own.

    Args:
        rounds: Number of rounds.
        drafted: Tokens drafted.
        accepted: Drafted tokens that the target accepted.
        committed: Tokens appended to answers, those of the target included.
        histogram: By number of accepted tokens, the number of rounds.
        draft_s: Seconds of drafting.
        verify_s: Seconds of verifying on the host: the target's pass and its sampling.
        rollback_s: Seconds of removing K/V of rejected tokens from the target's cache.
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
        """Committed tokens per round; 0.0 if there was none."""
        return self.committed / self.rounds if self.rounds else 0.0

    def add_round(self, drafted: int, accepted: int, committed: int, seconds: tuple[float, float, float]) -> None:
        """Count a round, with its `seconds` of drafting, verifying and rolling back."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.committed += committed
        self.histogram[accepted] += 1
        self.draft_s += seconds[0]
        self.verify_s += seconds[1]
        self.rollback_s += seconds[2]

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.acceptance:.0%} of {self.drafted} drafted tokens accepted, "
            f"{self.committed_per_round:.2f} tokens a round, {self.draft_s:.2f} s drafting, {self.verify_s:.2f} s "
            f"verifying, {self.rollback_s:.2f} s rolling back"
        )
