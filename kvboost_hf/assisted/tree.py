"""A tree of drafted tokens: pure Python and numpy."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROOT = -1  # the parent of a token that follows the text itself


@dataclass(slots=True)
class Tree:
    """Tokens that may continue a text, each behind another one, or behind the text.

    A token comes after its parent. Tokens with the same parent differ.

    Args:
        tokens: Token ids.
        parents: Of each token, the number of the one before it, or `ROOT`.
        chances: Of each token, how likely it is that the text goes on as far as this, at most that of its parent.
        probabilities: Of each token, what the draft says of it, given its parent.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int = ROOT, chance: float = 1.0, probability: float = 1.0) -> int:
        """Append a token; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        self.probabilities.append(probability)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """The numbers of the tokens that lead to `node`, itself included; none to the root."""
        found = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def children(self) -> dict[int, dict[int, int]]:
        """Of each token that has any, and of the root: by token id, the numbers of those behind it."""
        found: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            found.setdefault(parent, {})[token] = node
        return found

    def likeliest(self, count: int, least: float = 0.0) -> list[int]:
        """The numbers of at most `count` tokens with the best chances, of `least` or more, parents first."""
        order = sorted(range(len(self)), key=lambda node: (-self.chances[node], node))  # a parent before its children
        return sorted(node for node in order[:count] if self.chances[node] >= least)

    def part(self, nodes: Sequence[int]) -> "Tree":
        """A tree of `nodes` only, in this order; the parents of all are among them, and before them."""
        number = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
        return Tree(
            [self.tokens[node] for node in nodes],
            [number[self.parents[node]] for node in nodes],
            [self.chances[node] for node in nodes],
            [self.probabilities[node] for node in nodes],
        )


def depths(parents: Sequence[int]) -> NDArray[np.int64]:
    """Of each token, how many are before it on its way from the root."""
    found = np.zeros(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents):
        found[node] = 0 if parent == ROOT else found[parent] + 1
    return found


def lineage(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[tokens, tokens]: whether the second one is the first one, or on its way from the root."""
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
