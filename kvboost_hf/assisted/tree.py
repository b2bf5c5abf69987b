"""A tree of drafted tokens: how far it grows, and which of its tokens are verified."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.assisted.learner import FADE_TOKEN, Calibration, Mean, RoundTimes
from kvboost_hf.config import DraftTreeConfig

ROOT = -1  # the parent of a token that follows the text itself
_LAG = 32  # tokens that a pass carries, at most
_SHARE = 1 / 64  # of a pass, that a token takes at least
FIRST_LEVELS = 5  # levels, before anything is known


@dataclass(slots=True)
class Tree:
    """Tokens that may continue a text. Each follows its parent in the lists; siblings differ."""

    tokens: list[int] = field(default_factory=list)  # token ids
    parents: list[int] = field(default_factory=list)  # the index of each token's parent, or `ROOT`
    # The chance of each token that it and all before it are accepted, at most that of its parent.
    chances: list[float] = field(default_factory=list)
    # The probability that the draft gave each token, given its parent.
    probabilities: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int = ROOT, chance: float = 1.0, probability: float = 1.0) -> int:
        """Append a token; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        self.probabilities.append(probability)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """The indices of the tokens from the root to `node`, itself included."""
        found = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def children(self) -> dict[int, dict[int, int]]:
        """By index of each token with children, or `ROOT`: the indices of its children by token id."""
        found: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            found.setdefault(parent, {})[token] = node
        return found

    def likeliest(self, count: int, least: float = 0.0) -> list[int]:
        """The indices of at most `count` tokens with the best chances, of `least` or more, parents first."""
        order = sorted(range(len(self)), key=lambda node: (-self.chances[node], node))  # a parent before its children
        return sorted(node for node in order[:count] if self.chances[node] >= least)

    def part(self, nodes: Sequence[int]) -> "Tree":
        """The tree of `nodes` only, in this order; each parent must come before its children."""
        number = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
        return Tree(
            [self.tokens[node] for node in nodes],
            [number[self.parents[node]] for node in nodes],
            [self.chances[node] for node in nodes],
            [self.probabilities[node] for node in nodes],
        )


def depths(parents: Sequence[int]) -> NDArray[np.int64]:
    """The depth of each token: its number of ancestors."""
    found = np.zeros(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents):
        found[node] = 0 if parent == ROOT else found[parent] + 1
    return found


def lineage(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[tokens, tokens]: whether the second is the first or an ancestor of it."""
    found = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            found[node] |= found[parent]
    return found


def as_bits(seen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Rows of up to 64 flags, the first one in the lowest bit."""
    padded = np.zeros((len(seen), 64), dtype=np.uint8)
    padded[:, : seen.shape[1]] = seen
    return np.packbits(padded, axis=1, bitorder="little").view("<i8")[:, 0].astype(np.int64)


class Growth:
    """Grows a tree as long as another level saves time, and selects the tokens that are worth verifying.

    A level is worth a pass of the draft if the tokens it is expected to add would take longer than that at the speed
    so far. A token is worth verifying by the same rule, with the time that each token adds to a pass of the target.

    Args:
        config: The policy, and the largest tree.
    """

    def __init__(self, config: DraftTreeConfig) -> None:
        self.calibration, self._times = Calibration(), RoundTimes()
        self._config = config
        # The share of accepted tokens whose next token was among their children: the likeliest child, or any.
        self._right = {any_of: Mean(FADE_TOKEN) for any_of in (False, True)}

    def goes_on(self, chances: Sequence[float], level: int, *, chain: bool = False) -> bool:
        """Whether to run the draft for another level.

        Args:
            chances: For each token that it would continue, the chance that it is accepted.
            level: Levels so far.
            chain: Whether each token gets only one child.
        """
        if not chances or level >= self._config.depth:
            return False
        if self._config.policy == "tree":
            return True
        if not self._times.known:
            return level < FIRST_LEVELS
        right = self._right[not chain and self._config.policy != "chain"]
        gain = sum(chances) * (right.value if right.weight else 1.0)
        return gain * self._seconds_per_token > self._times.draft_s.value / max(self._times.passes.value, 1.0)

    @property
    def longest_lag(self) -> float:
        """Tokens that a pass with drafts may carry in front of them, where states have gone back.

        A pass without drafts takes the states to the end. With `lag` tokens from one such pass to the next, each pass
        carries half as many on average, and one token in so many comes without its share of drafts: the sum of both
        costs is least at the root of the formula.
        """
        if self._config.policy == "tree" or not self._times.known:
            return _LAG
        accepted = max(self._times.committed.value - 1.0, 0.0)
        target_s = self._times.target_s.value
        per_token = max(self._times.per_column.value / target_s if target_s else 0.0, _SHARE)
        return min(math.sqrt(2 * accepted / per_token), _LAG)

    def chosen(self, tree: Tree) -> list[int]:
        """The indices of the tokens to verify: one at least, or nothing more would be learned."""
        least = 0.0
        if self._config.policy != "tree" and self._times.known:
            per_token = self._seconds_per_token
            least = self._times.per_column.value / per_token if per_token else 0.0
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
        carried: int = 0,
    ) -> None:
        """Learn from a round.

        Args:
            tree: The tree that was verified.
            children: As `Tree.children` returns them.
            path: Indices of the accepted tokens.
            committed: Tokens by which the text grew.
            passes: Forwards of the draft.
            draft_s: Seconds that they took.
            target_s: Seconds of the target's pass.
            first: Whether that pass included the prompt. Its time counts until there are others.
            carried: Tokens of the text that the pass computed again.
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
        columns = len(tree) + 1 + carried
        self._times.learn(
            committed=committed, passes=passes, draft_s=draft_s, target_s=target_s, columns=columns, first=first
        )

    def compare(self, tree: Tree, tokens: Sequence[int]) -> None:
        """Learn how good drafts are, checked or not, from the tokens that came in their place."""
        children, at = tree.children(), ROOT
        for token in tokens:
            behind = children.get(at, {})
            for drafted, child in behind.items():
                self.calibration.learn(tree.probabilities[child], hit=drafted == token)
            if token not in behind:
                return
            at = behind[token]

    @property
    def _seconds_per_token(self) -> float:
        """At the speed so far, or without drafts if that is faster."""
        draft_s, target_s = self._times.draft_s.value, self._times.target_s.value
        return min((draft_s + target_s) / max(self._times.committed.value, 1.0), target_s)
