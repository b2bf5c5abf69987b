"""Looks up one row in host memory and in the lower tiers."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvboost_hf.cache.kv.records import Stored, StoredChunk, StoredStates, head_key, unloaded
from kvboost_hf.cache.planning.chunks import Chunker, Tokens, prefix_key
from kvboost_hf.cache.planning.plan import HEAD_TOKENS, Border, Chunk, SavedState
from kvboost_hf.cache.store.records.memory import HostMemory
from kvboost_hf.cache.tiers.below import LowerTiers


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row to find chunks for.

    Args:
        tokens: All of it.
        border: The chunk border that it is to be served from.
        chunker: Where its chunks end.
        stateful: Saved states are wanted, too.
    """

    tokens: Tokens
    border: Border
    chunker: Chunker
    stateful: bool

    @property
    def borders(self) -> list[Border]:
        """The border, and all that follow it."""
        found = [self.border]
        while (cut := self.chunker.next_cut(self.tokens, found[-1].at)) is not None:
            found.append(Border(cut, prefix_key(found[-1].key, self.tokens[found[-1].at : cut])))
        return found

    @property
    def heads(self) -> list[bytes]:
        """The `head_key` of the tokens behind each border."""
        ends = [(border, self.tokens[border.at : border.at + HEAD_TOKENS]) for border in self.borders]
        return [head_key(border.key, head) for border, head in ends if len(head) == HEAD_TOKENS]


class TieredView:
    """A `ChunkIndex` of the chunks that a row can find in host memory and below it.

    The lower tiers are asked for all chunks that a row may have at once, when the first one is not in host memory.

    Args:
        memory: Host memory.
        lower: The tiers below it.
        row: The row.
        without: Keys of records in lower tiers that are not to be found.
    """

    def __init__(self, memory: HostMemory, lower: LowerTiers, row: Row, without: frozenset[bytes]) -> None:
        self._memory, self._lower, self._row, self._without = memory, lower, row, without
        self._found: dict[bytes, Stored] | None = None
        self._alike: dict[bytes, list[Stored]] | None = None  # by head

    def find(self, key: bytes, tokens: Tokens) -> Chunk | None:
        """See `ChunkIndex.find`."""
        chunk = self._memory.find(key, tokens)
        if chunk is not None:
            return chunk
        if self._found is None:
            found = self._lower.find([border.key for border in self._row.borders[1:]])
            self._found = {key: unloaded(each) for key, each in found.items() if key not in self._without}
        below = self._found.get(key)
        if not isinstance(below, StoredChunk) or below.content_only:
            return None
        return below if np.array_equal(below.tokens, tokens) else None

    def siblings(self, parent: bytes, head: Tokens) -> Iterable[Chunk]:
        """See `ChunkIndex.siblings`."""
        near = self._memory.siblings(parent, head)
        below = [each for each in self._like(parent, head, near) if isinstance(each, StoredChunk)]
        return [*near, *(chunk for chunk in below if not chunk.content_only)]

    def states_after(self, parent: bytes, head: Tokens) -> Iterable[SavedState]:
        """See `ChunkIndex.states_after`."""
        near = self._memory.states_after(parent, head)
        return [*near, *(each for each in self._like(parent, head, near) if isinstance(each, StoredStates))]

    def _like(self, parent: bytes, head: Tokens, near: Iterable[Stored]) -> list[Stored]:
        """The records below that continue `parent` and start with `head`, but for those that are near."""
        key = head_key(parent, head)
        if self._alike is None or key not in self._alike:
            # Of models with states all borders will be asked for, of others just this one.
            wanted = {key, *self._row.heads} if self._row.stateful else {key}
            self._alike = {head: [] for head in wanted} | (self._alike or {})
            for each in self._lower.find_alike(sorted(wanted)):
                self._alike[each.entry.head].append(unloaded(each))
        known = self._without | {each.key for each in near}
        return [
            each
            for each in self._alike[key]
            if each.key not in known and each.parent == parent and np.array_equal(each.tokens[: len(head)], head)
        ]
