"""Matching texts: the end of one against the inside of another, and what two begin with."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

_FIRST = 16  # tokens, looked at first
MAX_NGRAM = 8  # tokens: what is the same before a place for so long tells no more by being longer


def longest_match(
    text: NDArray[Any], places: NDArray[Any], ids: NDArray[Any], max_ngram: int
) -> tuple[NDArray[Any], int]:
    """Find the places in a text before which it ends like another one, for as many tokens as possible.

    Args:
        text: [tokens].
        places: [places], those to choose from.
        ids: [tokens], the other text.
        max_ngram: Compare so many tokens before a place at most.

    Returns:
        The places that agree in most tokens, in the order given, and in how many; none if not even one does.
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
    """How many first tokens are the same."""
    low, high = 0, min(len(one), len(other))
    if high > _FIRST and one[:_FIRST] != other[:_FIRST]:  # as of most texts
        high = _FIRST - 1
    while low < high:  # slices compare faster than tokens one by one
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
