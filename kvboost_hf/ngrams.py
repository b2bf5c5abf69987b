"""Matches token sequences: the longest n-gram that ends one inside another, and common prefixes."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

_FIRST = 16  # tokens that are compared first
MAX_NGRAM = 8  # tokens: longer matches predict the next token no better


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
