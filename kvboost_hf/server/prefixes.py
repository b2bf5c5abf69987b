"""Texts that run together, as a tree: what several of them begin with is held once.

[ system prompt ─┬─ question a ]        text 0: parts 0, 1
                 ├─ question b ]        text 1: parts 0, 2
                 └─ document ─┬─ c ]    text 2: parts 0, 3, 4
                              └─ d ]    text 3: parts 0, 3, 5
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvboost_hf.ngrams import common_prefix

Held = TypeVar("Held")


@dataclass(slots=True, eq=False)
class Part(Generic[Held]):
    """Tokens that one or more texts have at the same place, and what is held of them."""

    start: int
    tokens: Sequence[int]
    held: Held
    above: "Part[Held] | None"
    below: "list[Part[Held]]" = field(default_factory=list)
    texts: int = 1  # that go through it

    @property
    def stop(self) -> int:
        """Where the next part of a text begins."""
        return self.start + len(self.tokens)


class PrefixTree(Generic[Held]):
    """Texts in an order of their own, in which the last one takes the place of one that leaves.

    Args:
        cut: Of what is held of some tokens, what is held of the ones in [start, stop), counted from the first of them.
        least: Tokens that texts share at least, if they share any.
    """

    def __init__(self, cut: Callable[[Held, int, int], Held], least: int) -> None:
        self._cut, self._least = cut, least
        self._roots: dict[Hashable, list[Part[Held]]] = {}  # by owner
        self._texts: list[tuple[Hashable, Part[Held] | None]] = []  # the last part of each

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, owner: Hashable, tokens: Sequence[int], held: Held) -> int:
        """Add a text behind the others.

        Args:
            owner: Only texts of the same owner share anything.
            tokens: Of the text.
            held: What is held of all of them.

        Returns:
            How many first tokens are in parts: all but a rest of fewer than `least`.
        """
        beside, last, stop = self._roots.setdefault(owner, []), None, 0
        while (found := self._shared(beside, tokens[stop:])) is not None:
            found.texts += 1
            beside, last, stop = found.below, found, found.stop
        if len(tokens) - stop >= self._least:
            last = Part(stop, tokens[stop:], self._cut(held, stop, len(tokens)), last)
            beside.append(last)
            stop = len(tokens)
        self._texts.append((owner, last))
        return stop

    def remove(self, text: int) -> None:
        """Remove a text; the last one takes its place."""
        owner, part = self._texts[text]
        while part is not None:
            part.texts -= 1
            if not part.texts:
                (self._roots[owner] if part.above is None else part.above.below).remove(part)
            part = part.above
        last = self._texts.pop()
        if text < len(self._texts):
            self._texts[text] = last
        if all(each != owner for each, _ in self._texts):
            del self._roots[owner]

    def path(self, text: int) -> list[Part[Held]]:
        """The parts of a text, in order."""
        part, found = self._texts[text][1], []
        while part is not None:
            found.append(part)
            part = part.above
        return found[::-1]

    def _shared(self, beside: list[Part[Held]], tokens: Sequence[int]) -> Part[Held] | None:
        """The part of `beside` that the tokens begin with, split off from its rest if need be."""
        shared = [common_prefix(part.tokens, tokens) for part in beside]
        most = max(shared, default=0)
        part = beside[shared.index(most)] if most else None
        if part is None or most == len(part.tokens):
            return part
        if most < self._least:
            return None
        upper = Part(part.start, part.tokens[:most], self._cut(part.held, 0, most), part.above, [part], part.texts)
        beside[beside.index(part)] = upper
        part.held = self._cut(part.held, most, len(part.tokens))
        part.start, part.tokens, part.above = upper.stop, part.tokens[most:], upper
        return upper
