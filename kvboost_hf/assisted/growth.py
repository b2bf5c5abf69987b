"""How far a tree of drafts grows, and what of it is worth checking: pure Python, no tensors."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from kvboost_hf.assisted.tree import ROOT, Tree
from kvboost_hf.config import DraftTreeConfig

_FADE = 0.95  # what a round still counts after the next one
_FADE_TOKEN = 0.99  # what a comparison of a token still counts after the next one in its bin
_PRIOR = 4.0  # comparisons that the draft's own probability counts as
_EDGES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)  # of the bins of probabilities
_FIRST = 5  # levels, before anything is known


class Calibration:
    """How often the target says what the draft gives some probability, by that probability."""

    def __init__(self) -> None:
        self._counts = [0.0] * (len(_EDGES) + 1)
        self._hits = [0.0] * (len(_EDGES) + 1)

    def rate(self, probability: float) -> float:
        """The share of tokens of about this probability that the target says, too."""
        at = bisect_right(_EDGES, probability)
        return (self._hits[at] + _PRIOR * probability) / (self._counts[at] + _PRIOR)

    def learn(self, probability: float, *, hit: bool) -> None:
        """Note whether a token of this probability was the one."""
        at = bisect_right(_EDGES, probability)
        self._counts[at] = _FADE_TOKEN * self._counts[at] + 1
        self._hits[at] = _FADE_TOKEN * self._hits[at] + hit


class Growth:
    """Grows trees as far as the next level is worth a pass of the draft, and checks what is worth its place.

    A level is worth its pass if the tokens that it is expected to give take longer, at the speed so far, than the pass
    does. In the same way a token is worth the time by which a pass of the target grows with each token.

    Args:
        config: The largest tree, and whether any of this is done.
    """

    def __init__(self, config: DraftTreeConfig) -> None:
        self.calibration = Calibration()
        self._config = config
        self._right = {
            any_of: _Mean(_FADE_TOKEN) for any_of in (False, True)
        }  # of tokens behind one that was reached: the first one, or any
        self._rough = True
        self._forget_times()

    def goes_on(self, chances: Sequence[float], level: int, *, chain: bool = False) -> bool:
        """Whether to run the draft once more, on tokens that are reached with these chances.

        Args:
            chances: Of the tokens.
            level: How many levels there are.
            chain: Whether there will be one token only behind each.
        """
        if not chances or level >= self._config.depth:
            return False
        if self._config.policy == "tree":
            return True
        if not self._rounds.weight:
            return level < _FIRST
        right = self._right[not chain and self._config.policy != "chain"]
        gain = sum(chances) * (right.value if right.weight else 1.0)
        return gain * self._seconds_per_token > self._draft_s.value / max(self._passes.value, 1.0)

    def chosen(self, tree: Tree) -> list[int]:
        """The tokens to check: one at least, or nothing more would be learned."""
        least = 0.0
        if self._config.policy != "tree" and self._rounds.weight:
            least = self._slope.value / self._seconds_per_token if self._seconds_per_token else 0.0
        return tree.likeliest(self._config.max_nodes, least) or tree.likeliest(1)

    def learn(
        self,
        tree: Tree,
        children: Mapping[int, Mapping[int, int]],
        path: Sequence[int],
        *,
        committed: int,
        passes: int,
        draft_s: float,
        target_s: float,
        first: bool,
    ) -> None:
        """What came of a round.

        Args:
            tree: That was checked.
            children: Of it.
            path: The tokens of the tree that were taken.
            committed: Tokens that were taken, with that of the target.
            passes: Of the draft.
            draft_s: Seconds that they took.
            target_s: Seconds of the target's pass.
            first: Whether that pass took the prompt in, too. Its time counts until there are others.
        """
        for node, taken in zip((ROOT, *path), (*path, None), strict=True):
            behind = children.get(node)
            if behind is None:
                continue
            self._right[False].learn(taken == next(iter(behind.values())))
            if len(behind) > 1:
                self._right[True].learn(taken is not None)
            for child in behind.values():
                self.calibration.learn(tree.probabilities[child], hit=child == taken)
        if first and not self._rough:
            return
        if self._rough and not first:
            self._rough = False
            self._forget_times()
        for mean, new in (
            (self._rounds, 1.0),
            (self._committed, committed),
            (self._passes, passes),
            (self._draft_s, draft_s),
            (self._target_s, target_s),
        ):
            mean.learn(new)
        if not first:
            self._slope.learn(len(tree) + 1, target_s)

    def _forget_times(self) -> None:
        self._rounds, self._slope = _Mean(), _Slope()
        self._committed, self._draft_s, self._passes, self._target_s = _Mean(), _Mean(), _Mean(), _Mean()

    @property
    def _seconds_per_token(self) -> float:
        """At the speed so far, or without drafts, if that is faster."""
        drafted = (self._draft_s.value + self._target_s.value) / max(self._committed.value, 1.0)
        return min(drafted, self._target_s.value)


class _Mean:
    """A mean in which earlier numbers fade."""

    def __init__(self, fade: float = _FADE) -> None:
        self.weight, self._sum, self._fade = 0.0, 0.0, fade

    def learn(self, new: float) -> None:
        self.weight = self._fade * self.weight + 1
        self._sum = self._fade * self._sum + new

    @property
    def value(self) -> float:
        return self._sum / self.weight if self.weight else 0.0


class _Slope:
    """By how much y grows with x: of a line through points that fade, and never below zero."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, x: float, y: float) -> None:
        self._n = _FADE * self._n + 1
        self._x = _FADE * self._x + x
        self._y = _FADE * self._y + y
        self._xx = _FADE * self._xx + x * x
        self._xy = _FADE * self._xy + x * y

    @property
    def value(self) -> float:
        spread = self._n * self._xx - self._x**2
        return max((self._n * self._xy - self._x * self._y) / spread, 0.0) if spread > 1e-9 * self._n**2 else 0.0
