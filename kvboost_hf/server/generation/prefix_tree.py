"""`PrefixTree`: the parts that texts of a batch share with each other.

[ system prompt ─┬─ question a ]        text 0: parts 0, 1
                 ├─ question b ]        text 1: parts 0, 2
                 └─ document ─┬─ c ]    text 2: parts 0, 3, 4
                              └─ d ]    text 3: parts 0, 3, 5
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvboost_hf.ngrams import common_prefix

Held = TypeVar("Held")


@dataclass(slots=True, eq=False)
class _Text(Generic[Held]):
    owner: Hashable
    held: Held
    last: "SharedPart[Held] | None" = None


@dataclass(slots=True, eq=False)
class SharedPart(Generic[Held]):
    """Tokens that one or more texts have at the same place."""

    start: int
    tokens: list[int]
    texts: list[_Text[Held]]  # that go through it
    above: "SharedPart[Held] | None"
    below: "list[SharedPart[Held]]" = field(default_factory=list)

    @property
    def stop(self) -> int:
        """Where the next part of a text begins."""
        return self.start + len(self.tokens)

    @property
    def held(self) -> Held:
        """The K/V of one of the texts that go through the part; it covers all tokens of that text."""
        return self.texts[0].held


class PrefixTree(Generic[Held]):
    """Texts in an order of their own, in which the last one takes the place of one that leaves.

    If texts share any tokens, they share `least` at least.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._roots: dict[Hashable, list[SharedPart[Held]]] = {}  # by owner
        self._texts: list[_Text[Held]] = []

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, owner: Hashable, tokens: Sequence[int], held: Held) -> int:
        """Add a text of an owner behind the others; returns how many first tokens are in parts.

        A rest of fewer than `least` is in none. `held` is what is held of all tokens.
        """
        text, beside, stop = _Text(owner, held), self._roots.setdefault(owner, []), 0
        while (found := self._shared(beside, [*tokens[stop:]])) is not None:
            found.texts.append(text)
            beside, text.last, stop = found.below, found, found.stop
        if len(tokens) - stop >= self._least:
            text.last = SharedPart(stop, [*tokens[stop:]], [text], text.last)
            beside.append(text.last)
            stop = len(tokens)
        self._texts.append(text)
        return stop

    def remove(self, text: int) -> None:
        """Remove a text; the last one takes its place."""
        left, last = self._texts[text], self._texts.pop()
        if text < len(self._texts):
            self._texts[text] = last
        part = left.last
        while part is not None:
            part.texts.remove(left)
            if not part.texts:
                (self._roots[left.owner] if part.above is None else part.above.below).remove(part)
            elif len(part.below) == 1 and len(part.below[0].texts) == len(part.texts):
                _join(part, part.below[0])
            part = part.above
        if all(each.owner != left.owner for each in self._texts):
            del self._roots[left.owner]

    def clear(self) -> None:
        """Remove all texts, one by one: parts refer to each other, and would be freed much later."""
        while self._texts:
            self.remove(0)

    def path(self, text: int) -> list[SharedPart[Held]]:
        """The parts of a text, in order."""
        part, found = self._texts[text].last, []
        while part is not None:
            found.append(part)
            part = part.above
        return found[::-1]

    def _shared(self, beside: list[SharedPart[Held]], tokens: list[int]) -> SharedPart[Held] | None:
        """The part of `beside` that the tokens begin with, split off from its rest if need be."""
        shared = [common_prefix(part.tokens, tokens) for part in beside]
        most = max(shared, default=0)
        part = beside[shared.index(most)] if most else None
        if part is None or most == len(part.tokens):
            return part
        if most < self._least:
            return None
        upper = SharedPart(part.start, part.tokens[:most], [*part.texts], part.above, [part])
        beside[beside.index(part)] = upper
        part.start, part.tokens, part.above = upper.stop, part.tokens[most:], upper
        return upper


def _join(part: SharedPart[Held], lower: SharedPart[Held]) -> None:
    """Make one part of two that all of their texts go through."""
    part.tokens, part.below = part.tokens + lower.tokens, lower.below
    for each in lower.below:
        each.above = part
    for text in lower.texts:
        if text.last is lower:
            text.last = part
