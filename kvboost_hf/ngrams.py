"""Matches token sequences: the longest n-gram that ends one inside another, how text goes on, and common prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FIRST = 16  # tokens that are compared first
MAX_NGRAM = 8  # tokens: longer matches predict the next token no better
_MOST_WALKED = 1_024  # places whose text is followed at once, the latest ones


@dataclass(frozen=True, slots=True)
class Continued:
    """How a text may go on, by what followed the n-gram that ends it elsewhere.

    Args:
        tokens: Token ids.
        shares: For each, the share of the places, among those where all tokens before it followed, where it does.
        agreeing: The length of the n-gram; 0 if there is none.
    """

    tokens: list[int]
    shares: list[float]
    agreeing: int

    @classmethod
    def nothing(cls) -> "Continued":
        """No tokens."""
        return cls([], [], 0)


def longest_match(
    text: NDArray[Any], places: NDArray[Any], ids: NDArray[Any], max_ngram: int
) -> tuple[NDArray[Any], int]:
    """Find the places in a text that follow the longest n-gram that ends `ids`.

    Args:
        text: [tokens].
        places: [places], candidate indices in `text`.
        ids: [tokens], the other text.
        max_ngram: The longest n-gram to compare.

    Returns:
        The places, in the order given, and the length of the n-gram; no places and 0 if no token matches.
    """
    agreeing = 0
    for n in range(1, min(max_ngram, len(ids)) + 1):
        within = places[places >= n]
        longer = within[text[within - n] == ids[-n]]
        if not longer.size:
            break
        places, agreeing = longer, n
    return (places, agreeing) if agreeing else (places[:0], 0)


def most_frequent(
    text: NDArray[Any], places: NDArray[Any], length: int, *, repeating: bool = False
) -> tuple[list[int], list[float]]:
    """Follow the most frequent of several texts, token by token, as down a suffix tree.

    A suffix tree of the text has a node for each n-gram, which knows where it ends; here these are `places`. Each
    token narrows them to those that go on with it (SuffixDecoding, Oliaro et al., 2024,
    https://arxiv.org/abs/2411.04975).

    Args:
        text: [tokens]. Negative ones end it.
        places: [places], indices in `text` of the tokens that may come next, the oldest first. One at least.
        length: The most tokens to follow.
        repeating: Behind its end the text goes on with what followed the place, again; else it ends there.

    Returns:
        The tokens, those of the latest text where two are equally frequent; and for each its share of the places that
        are left.
    """
    places, steps = places[-_MOST_WALKED:, None], np.arange(length)
    behind = len(text) - places
    runs = text[places + steps % behind] if repeating else text[np.minimum(places + steps, len(text) - 1)]
    if not repeating:
        runs = np.where(steps < behind, runs, -1)
    tokens, shares = list[int](), list[float]()
    while len(tokens) < length:
        runs = runs[runs[:, len(tokens)] >= 0]
        if not len(runs):
            break
        ahead = runs[:, len(tokens) :]
        alike = ((ahead == ahead[-1]) & (ahead >= 0)).all(axis=0)
        same = len(alike) if alike.all() else int(alike.argmin())
        tokens += ahead[-1, :same].tolist()
        shares += [1.0] * same
        if len(tokens) < length:
            column = runs[:, len(tokens)]
            column = column[column >= 0]
            if not len(column):
                break
            _, which, counts = np.unique(column, return_inverse=True, return_counts=True)
            chosen = int(column[np.flatnonzero(counts[which] == counts.max())[-1]])
            runs = runs[runs[:, len(tokens)] == chosen]
            tokens.append(chosen)
            shares.append(len(runs) / len(column))
    return tokens, shares


def check_ngrams(max_ngram: int, min_ngram: int = 2) -> None:
    """Raise a ValueError unless `2 <= min_ngram <= max_ngram <= MAX_NGRAM`."""
    if not 2 <= min_ngram <= max_ngram <= MAX_NGRAM:
        raise ValueError(
            f"`max_ngram` must be at most {MAX_NGRAM} tokens, and `min_ngram` from 2 to `max_ngram`, got {max_ngram} "
            f"and {min_ngram}."
        )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of leading tokens that two sequences share."""
    low, high = 0, min(len(one), len(other))
    if high > _FIRST and one[:_FIRST] != other[:_FIRST]:  # the most frequent case
        high = _FIRST - 1
    while low < high:  # slices compare faster than tokens one by one
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
