"""A tree of drafted tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROOT = -1  # the parent of a token that follows the text itself


@dataclass(slots=True)
class Tree:
    """Tokens that may continue a text. Each follows its parent in the lists; siblings differ.

    Args:
        tokens: Token ids.
        parents: The index of each token's parent, or `ROOT`.
        chances: The chance of each token that it and all before it are accepted, at most that of its parent.
        probabilities: The probability that the draft gave each token, given its parent.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
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
