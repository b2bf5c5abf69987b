"""`plan_batches`: orders the rows of texts to score, so that what two of them begin with is computed once."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvboost_hf.cache.planning.chunks import Tokens, common_length

_WINDOW = 16  # batches whose rows may change places


@dataclass(slots=True)
class Row:
    """Tokens that go through the model in one row.

    Args:
        ids: A text without its last token.
        first: The first token whose logits are wanted.
        texts: Those that it answers, by number.
    """

    ids: Tokens
    first: int
    texts: list[int]

    @property
    def logits(self) -> int:
        """How many of its last tokens must be computed."""
        return len(self.ids) - self.first


def plan_batches(
    texts: Sequence[tuple[Tokens, int]], batch_size: int, kind: Callable[[int], Hashable] = lambda length: None
) -> list[list[Row]]:
    """Rows in the order in which to compute them.

    Rows that begin alike are close together, and where they are, those with most new tokens come first: a few-shot
    head, then what opens each question, then the other answers to it. A batch computes as many columns of each row as
    of the one with most, so that no row of it has less than half of that.

    Args:
        texts: Ids of a prefix and its continuation [n], and where the continuation starts: in [1, n).
        batch_size: Rows of a batch, at most.
        kind: The class of lengths that the row is in; rows of a batch are of one kind.

    Returns:
        Batches of rows.
    """
    rows = _rows(texts)
    shared = [0, *(common_length(before.ids, row.ids) for before, row in pairwise(rows))]
    new = [max(len(row.ids) - shared[number], row.logits) for number, row in enumerate(rows)]
    batches: list[list[Row]] = []
    for start in range(0, len(rows), _WINDOW * batch_size):
        window = range(start, min(start + _WINDOW * batch_size, len(rows)))
        leader = -1
        for number in sorted(window, key=lambda number: -new[number]):
            row = rows[number]
            fits = leader >= 0 and len(batches[-1]) < batch_size and 2 * new[number] >= new[leader]
            if not fits or kind(len(row.ids)) != kind(len(rows[leader].ids)):
                batches.append([])
                leader = number
            batches[-1].append(row)
    return batches


def _rows(texts: Sequence[tuple[Tokens, int]]) -> list[Row]:
    """What has to be computed, those that begin alike together: a row may answer for what it begins with."""
    names = [ids[:-1].astype(">i8").tobytes() for ids, _ in texts]  # in the order of the ids
    rows: list[Row] = []
    behind = b""
    # Longer ones first; of those with the same ids, that with the longest continuation.
    for number in sorted(range(len(texts)), key=lambda number: (names[number], -texts[number][1]), reverse=True):
        ids, start = texts[number]
        if rows and behind.startswith(names[number]) and start - 1 >= rows[-1].first:
            rows[-1].texts.append(number)
        else:
            rows.append(Row(ids[:-1], start - 1, [number]))
            behind = names[number]
    return rows[::-1]
