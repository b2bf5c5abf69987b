"""Chooses the order of documents in which a store has most of a prompt, where their order does not matter."""

from collections.abc import Callable, Generator, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvboost_hf.cache.planning.plan import HEAD_TOKENS

D = TypeVar("D")
Order = tuple[int, ...]  # numbers of documents
_LOOKUPS = 2  # for each pair of documents, beyond which only the best document of each place is followed


class BestOrder(NamedTuple, Generic[D]):
    """Documents in the order in which most of their prompt is stored.

    Args:
        documents: All of them.
        tokens: First tokens of their prompt that are stored.
        tokens_as_given: Those of the prompt in the order that was given.
    """

    documents: list[D]
    tokens: int
    tokens_as_given: int

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be computed, compared to the order that was given."""
        return self.tokens - self.tokens_as_given


def best_order(documents: Sequence[D], known: Callable[[list[D]], int]) -> BestOrder[D]:
    """Follow stored prompts document by document; see `search_order`.

    Args:
        documents: In the order that was given, which ties keep.
        known: How many first tokens of a prompt are stored that has these documents, all or the first ones.
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

    Args:
        count: The number of documents.

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
