"""Compares beginnings: stems, which rows of a batch share, and the order of documents that is stored the farthest.

    rows            a b c d e f      stems   [0, 3) of rows 0, 1, 2
                    a b c d e g              [3, 5) of rows 0, 1
                    a b c x y z

Rows are compared by their tokens, padding left out. A stem that would save fewer tokens than another forward is worth
is joined with those that continue it.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Tokens, common_length

D = TypeVar("D")
Order = tuple[int, ...]  # numbers of documents
_LOOKUPS = 2  # for each pair of documents, beyond which only the best document of each place is followed


class BestOrder(NamedTuple, Generic[D]):
    """Documents in the order in which most of their prompt is stored.

    Args:
        documents: All of them.
        tokens: First tokens of their prompt that are stored.
        tokens_as_given: First tokens that are stored of the prompt in the order that was given.
    """

    documents: list[D]
    tokens: int
    tokens_as_given: int

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be computed, compared to the order that was given."""
        return self.tokens - self.tokens_as_given


def best_order(documents: Sequence[D], known: Callable[[list[D]], int]) -> BestOrder[D]:
    """Follow stored prompts document by document; see `search_order`. Ties keep the order that was given.

    `known` tells how many first tokens of a prompt are stored that has these documents, all or the first ones.
    """
    search, found = search_order(len(documents)), list[int]()
    while True:
        try:
            asked = search.send(found) if found else next(search)
        except StopIteration as end:
            order, tokens, given = end.value
            return BestOrder([documents[at] for at in order], tokens, given)
        found = [known([documents[at] for at in some]) for some in asked]


def search_order(count: int) -> Generator[list[Order], list[int], tuple[Order, int, int]]:
    """Find the order in which most of a prompt is stored: what is not stored comes last, in the order that was given.

    Yields:
        Orders of some documents. What is sent for them is how many first tokens are stored of a prompt with each.

    Returns:
        The best order of all documents, its stored tokens, and those of the order that was given.
    """
    as_given = tuple(range(count))
    given, start = yield [as_given, ()]
    left = _LOOKUPS * count**2
    best: tuple[int, Order] = start, ()
    branches: list[tuple[int, Order]] = [(start, ())]  # to follow, the best one last
    while branches and left > 0:
        tokens, chosen = branches.pop()
        rest = [(*chosen, at) for at in as_given if at not in chosen]
        if not rest:
            continue
        found = yield rest
        left -= len(rest)
        # A branch that has nothing of its last document leads nowhere.
        longer = [(more, order) for more, order in zip(found, rest, strict=True) if more >= tokens + HEAD_TOKENS]
        longer.sort(key=lambda pair: (pair[0], [-at for at in pair[1]]))  # ties as they were given
        if longer and longer[-1][0] > best[0]:
            best = longer[-1]
        branches += longer
    chosen = best[1]
    order = (*chosen, *(at for at in as_given if at not in chosen))
    if order == as_given:
        return as_given, given, given
    (tokens,) = yield [order]
    return (order, tokens, given) if tokens > given else (as_given, given, given)


@dataclass(frozen=True, slots=True)
class Stem:
    """Row tokens [start, stop) that some rows have alike, and all before them; the first of the rows computes them."""

    rows: tuple[int, ...]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def find_stems(tokens: Sequence[Tokens], known: Sequence[int], min_saving: int) -> list[Stem]:
    """The stems of a batch, each behind those that it continues.

    A row is in all stems that end behind what is known of it: `known` is the token from which each row can be
    continued, for what is before it is held or stored. The first of them begins there or earlier, and each one where
    the one before it ends. `tokens` are those of each row as far as they may be computed ahead.
    """
    order = sorted(range(len(tokens)), key=lambda row: tokens[row].astype(">i8").tobytes())
    alike = [common_length(tokens[row], tokens[following]) for row, following in pairwise(order)]
    found: list[Stem] = []
    left = [(0, len(order), 0)] if len(order) > 1 else []
    while left:
        first, last, start = left.pop()
        stop = min(alike[first : last - 1])
        rows = sorted((row for row in order[first:last] if known[row] < stop), key=lambda row: known[row])
        begin = max(start, known[rows[0]]) if rows else stop
        if (len(rows) - 1) * (stop - begin) >= max(min_saving, 1):
            found.append(Stem(tuple(rows), begin, stop))
            start = stop
        parts = [first, *(at for at in range(first + 1, last) if alike[at - 1] == stop), last]
        left += [(begin, end, start) for begin, end in pairwise(parts) if end - begin > 1]
    return found


def paths_of(stems: Iterable[Stem], batch: int) -> list[list[Stem]]:
    """The stems of each row, in order."""
    paths: list[list[Stem]] = [[] for _ in range(batch)]
    for stem in stems:
        for row in stem.rows:
            paths[row].append(stem)
    return paths


def in_groups(
    stems: Sequence[Stem], batch: int, waste: int, *, padded: bool, equal_starts: bool
) -> list[tuple[Stem, ...]]:
    """Stems that one forward can compute, in the order in which the forwards must run.

    A stem may be `waste` tokens shorter than the longest one in its forward, which may be `padded` on the left. With
    `equal_starts`, stems that continue something must begin at the same token to share a forward.
    """
    levels: dict[tuple[int, int, int], list[Stem]] = {}
    paths = paths_of(stems, batch)
    for stem in stems:
        level = paths[stem.rows[0]].index(stem)
        alone = equal_starts and stem.start > 0
        key = level, 0 if padded and not alone else stem.stop, stem.start if alone else 0
        levels.setdefault(key, []).append(stem)
    groups: list[tuple[Stem, ...]] = []
    for _, level_stems in sorted(levels.items()):
        group: list[Stem] = []
        for stem in sorted(level_stems, key=len, reverse=True):
            if group and len(group[0]) - len(stem) > waste:
                groups.append(tuple(group))
                group = []
            group.append(stem)
        groups.append(tuple(group))
    return groups
