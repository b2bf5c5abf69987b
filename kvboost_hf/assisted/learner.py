"""Learns how much of drafts is accepted, and how long rounds take, for chains and for trees; earlier rounds fade."""

from bisect import bisect_right

FADE_ROUND = 0.95  # weight of earlier rounds after each round
FADE_TOKEN = 0.99  # weight of earlier comparisons of a bin after each one
_PRIOR = 4.0  # comparisons that the draft's own probability counts as
_EDGES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)  # of the bins of probabilities


class Mean:
    """An exponentially weighted mean.

    Args:
        fade: The weight of earlier values after each one.
        weight: That of a value assumed before any.
        value: That value.
    """

    def __init__(self, fade: float = FADE_ROUND, weight: float = 0.0, value: float = 0.0) -> None:
        self.weight, self._sum, self._fade = weight, weight * value, fade

    def learn(self, new: float) -> None:
        self.weight = self._fade * self.weight + 1
        self._sum = self._fade * self._sum + new

    @property
    def value(self) -> float:
        return self._sum / self.weight if self.weight else 0.0


class LineFit:
    """The slope of an exponentially weighted line fit, at least zero."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, x: float, y: float) -> None:
        self._n = FADE_ROUND * self._n + 1
        self._x = FADE_ROUND * self._x + x
        self._y = FADE_ROUND * self._y + y
        self._xx = FADE_ROUND * self._xx + x * x
        self._xy = FADE_ROUND * self._xy + x * y

    @property
    def value(self) -> float:
        spread = self._n * self._xx - self._x**2
        return max((self._n * self._xy - self._x * self._y) / spread, 0.0) if spread > 1e-9 * self._n**2 else 0.0


class Calibration:
    """Estimates how often the target accepts a token, by the probability that the draft gave it.

    The probability itself counts as `_PRIOR` comparisons, which fade like others.
    """

    def __init__(self) -> None:
        self._counts = [0.0] * (len(_EDGES) + 1)
        self._hits = [0.0] * (len(_EDGES) + 1)
        self._priors = [_PRIOR] * (len(_EDGES) + 1)

    def rate(self, probability: float) -> float:
        """The share of tokens of about this probability that the target accepts."""
        at = bisect_right(_EDGES, probability)
        return (self._hits[at] + self._priors[at] * probability) / (self._counts[at] + self._priors[at])

    def learn(self, probability: float, *, hit: bool) -> None:
        """Learn whether a token of this probability was accepted."""
        at = bisect_right(_EDGES, probability)
        self._counts[at] = FADE_TOKEN * self._counts[at] + 1
        self._hits[at] = FADE_TOKEN * self._hits[at] + hit
        self._priors[at] *= FADE_TOKEN


class RoundTimes:
    """What rounds take and give, in the mean. Those with passes over prompts count until there are others.

    Args:
        fade: The weight of earlier rounds after each round.

    Attributes:
        committed: Tokens by which the text grew.
        passes: Forwards of the draft.
        draft_s: Seconds that they took.
        target_s: Seconds of the target's pass.
        per_column: How many more seconds that pass takes for each further column.
    """

    def __init__(self, fade: float = FADE_ROUND) -> None:
        self._fade, self._rough = fade, True
        self._forget()

    @property
    def known(self) -> bool:
        """Whether there was a round."""
        return self.target_s.weight > 0

    def learn(
        self, *, committed: int, passes: int, draft_s: float, target_s: float, columns: int, first: bool = False
    ) -> None:
        """Learn from a round, whose target's pass computed so many columns; `first` if passes included the prompt."""
        if first and not self._rough:
            return
        if self._rough and not first:
            self._rough = False
            self._forget()
        self.committed.learn(committed)
        self.passes.learn(passes)
        self.draft_s.learn(draft_s)
        self.target_s.learn(target_s)
        if not first:
            self.per_column.learn(columns, target_s)

    @property
    def draft_s_per_pass(self) -> float:
        """Seconds of a forward of the draft."""
        return self.draft_s.value / (self.passes.value or 1.0)

    def _forget(self) -> None:
        self.committed, self.passes = Mean(self._fade), Mean(self._fade)
        self.draft_s, self.target_s, self.per_column = Mean(self._fade), Mean(self._fade), LineFit()
