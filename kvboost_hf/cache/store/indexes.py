"""How chunks are found, and what is remembered of those that went.

Found by their content, by how stored text went on, and for one row in all tiers. Remembered are evicted keys, the
salts of roots, what storing has paid, and audits.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvboost_hf import forks
from kvboost_hf.cache.kv.records import Stored, StoredChunk, StoredStates, head_key, unloaded
from kvboost_hf.cache.planning.chunks import Chunker, Tokens, prefix_key
from kvboost_hf.cache.planning.content_index import ContentIndex, NgramIndex
from kvboost_hf.cache.planning.plan import HEAD_TOKENS, Border, Chunk, SavedState
from kvboost_hf.cache.store.memory import HostMemory
from kvboost_hf.cache.tiers.below import LowerTiers
from kvboost_hf.ngrams import check_ngrams


class ContentIndexes:
    """A `ContentIndex` for each root.

    Args:
        lock: Reentrant; whoever changes the indexes holds it.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self.clear()

    def clear(self) -> None:
        """Forget all chunks."""
        self._by_root: dict[bytes, ContentIndex[StoredChunk]] = {}
        self._below: dict[bytes, StoredChunk] = {}  # by key, those in lower tiers only

    def of(self, root: bytes) -> ContentIndex[StoredChunk]:
        """The chunks under a root; the index follows what comes and goes."""
        with self._lock:
            return self._by_root.setdefault(root, ContentIndex(self._lock))

    def add(self, chunk: StoredChunk) -> None:
        """Enter a chunk of host memory, in place of its record from a lower tier."""
        self.drop_below([chunk.key])
        self.of(chunk.root).add(chunk)

    def remove(self, chunk: StoredChunk) -> None:
        """Take out a chunk of host memory."""
        self.of(chunk.root).remove(chunk)

    def add_below(self, found: Iterable[Stored]) -> None:
        """Enter chunks that were found in lower tiers, but for those that are here; takes the lock for each."""
        for chunk in found:
            if isinstance(chunk, StoredChunk):
                with self._lock:
                    index = self.of(chunk.root)
                    if all(other.key != chunk.key for other in index.variants(chunk.tokens)):
                        self._below[chunk.key] = chunk
                        index.add(chunk)

    def drop_below(self, keys: Iterable[bytes]) -> None:
        """Take out chunks that were known to be in lower tiers only."""
        for key in keys:
            if (chunk := self._below.pop(key, None)) is not None:
                self.of(chunk.root).remove(chunk)

    def check_consistency(self, chunks: Iterable[StoredChunk]) -> None:
        """Check that just the chunks of host memory, and those below, are indexed, each once.

        Raises:
            AssertionError: if they are not.
        """
        expected = [*chunks, *self._below.values()]
        indexed = [chunk for index in self._by_root.values() for chunk in index.chunks()]
        assert sorted(c.key for c in indexed) == sorted(c.key for c in expected), "indexes must hold all chunks"
        assert set(map(id, indexed)) == set(map(id, expected)), "indexes must hold the stored records"
        for chunk in expected:
            variants = self._by_root[chunk.root].variants(chunk.tokens)
            assert chunk in variants, "a chunk must be indexed under its root and tokens"


class StoredText:
    """The n-grams of all chunks of host memory, by salt; kept from the first time on that anybody asks for text.

    Args:
        salt_of: The salt behind a root; None for one that is forgotten, whose text nobody finds.
    """

    def __init__(self, salt_of: Callable[[bytes], bytes | None]) -> None:
        self._salt_of = salt_of
        self.is_used = False
        self.clear()

    def clear(self) -> None:
        """Forget all text."""
        self._by_salt: dict[bytes, NgramIndex] = {}
        self._by_root: dict[bytes, NgramIndex] = {}  # the same

    @property
    def nbytes(self) -> int:
        """Bytes of all n-grams."""
        return sum(index.nbytes for index in self._by_salt.values())

    def add(self, chunk: StoredChunk) -> None:
        """Enter the text of a chunk."""
        if self.is_used:
            self._index(chunk.root).add(chunk.key, chunk.parent, chunk.tokens)

    def remove(self, chunk: StoredChunk) -> None:
        """Take out the text of a chunk."""
        if self.is_used:
            self._index(chunk.root).remove(chunk.key)

    def continuation(
        self,
        chunks: Iterable[StoredChunk],
        salt: bytes,
        ids: NDArray[np.int64],
        length: int,
        max_ngram: int,
        min_ngram: int,
    ) -> list[int]:
        """The tokens that followed the longest n-gram that ends `ids`; see `ChunkStore.continuation`.

        Args:
            chunks: All that are stored, which are read when text is asked for the first time.
            salt: Whose text.
            ids: Token ids.
            length: So many tokens are wanted.
            max_ngram: Compare so many tokens at most.
            min_ngram: And so many at least.
        """
        check_ngrams(max_ngram, min_ngram)
        if not self.is_used:
            self.is_used = True
            for chunk in chunks:
                self.add(chunk)
        index = self._by_salt.get(salt)
        return index.continuation(ids, length, max_ngram, min_ngram) if index is not None else []

    def _index(self, root: bytes) -> NgramIndex:
        if root not in self._by_root:
            salt = self._salt_of(root)
            self._by_root[root] = self._by_salt.setdefault(root if salt is None else salt, NgramIndex())
        return self._by_root[root]

    def check_consistency(self, chunks: Iterable[StoredChunk]) -> None:
        """Check that the text of just these chunks is kept, if any is.

        Raises:
            AssertionError: if it is not.
        """
        keys = sorted(key for index in self._by_salt.values() for key in index.keys())
        assert keys == (sorted(chunk.key for chunk in chunks) if self.is_used else []), (
            "text must be that of all chunks"
        )


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
        near = self._memory.siblings(parent, head)
        below = [each for each in self._like(parent, head, near) if isinstance(each, StoredChunk)]
        return [*near, *(chunk for chunk in below if not chunk.content_only)]

    def states_after(self, parent: bytes, head: Tokens) -> Iterable[SavedState]:
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


_REMEMBERED = 65_536  # keys

K = TypeVar("K")
V = TypeVar("V")


def remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    """Enter the newest of a bounded number of keys."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)


class History:
    """Salts of roots, keys that were evicted, and beginnings of prompts; as far as they are remembered."""

    def __init__(self) -> None:
        self._salts: OrderedDict[bytes, bytes] = OrderedDict()  # by root
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # keys
        self._first_heads: OrderedDict[bytes, bytes] = OrderedDict()  # salt and first tokens -> root last stored under

    def clear(self) -> None:
        """Forget keys and beginnings."""
        self._evicted.clear()
        self._first_heads.clear()

    def note_root(self, root: bytes, salt: bytes) -> None:
        """Remember the salt behind a root."""
        remember(self._salts, root, salt)

    def salt_of(self, root: bytes) -> bytes | None:
        """The salt behind a root."""
        return self._salts.get(root)

    def note_stored(self, chunk: StoredChunk) -> None:
        """Remember how a prompt begins, and that a chunk is here."""
        self._evicted.pop(chunk.key, None)
        if not chunk.content_only and chunk.parent == chunk.root:
            remember(self._first_heads, self._first_head(chunk.root, chunk.tokens), chunk.root)

    def known_under_other_root(self, root: bytes, tokens: Tokens) -> bool:
        """Whether a prompt with this beginning was stored, under the same salt, for the model as it was before."""
        known = self._first_heads.get(self._first_head(root, tokens))
        return known is not None and known != root

    def _first_head(self, root: bytes, tokens: Tokens) -> bytes:
        return head_key(self._salts.get(root, b""), tokens[:HEAD_TOKENS])

    def note_evicted(self, stored: Stored) -> None:
        """Remember that a record had to make room."""
        remember(self._evicted, stored.key, None)

    def was_evicted(self, key: bytes | None) -> bool:
        """Whether a record under this key had to make room."""
        return key in self._evicted


# Storing so many tokens, or what takes as long as computing so many, tells whether it pays.
_STORED_AT_LEAST, _COMPUTED_AT_LEAST = 65_536, 4_096


class Payback:
    """Counts what was stored against what served prompts.

    Args:
        pays_for: How many tokens take as long to store as one takes to compute; None stores all that comes.
    """

    def __init__(self, pays_for: int | None) -> None:
        self._pays_for = pays_for
        self.clear()

    def clear(self) -> None:
        """Start over."""
        self._unpaid = 0  # tokens stored, less those that serving prompts has paid for
        self._unseen: OrderedDict[bytes, None] = OrderedDict()  # keys of what was not stored when it came first

    def admits(self, key: bytes) -> bool:
        """Whether a new chunk is to be stored: where storing has not paid, one that comes again."""
        if self._pays_for is None or self._unpaid < max(_STORED_AT_LEAST, _COMPUTED_AT_LEAST * self._pays_for):
            return True
        if key in self._unseen:
            del self._unseen[key]
            return True
        remember(self._unseen, key, None)
        return False

    def note_stored(self, tokens: int) -> None:
        """So many tokens were stored that nobody asked to store."""
        self._unpaid += tokens

    def note_served(self, tokens: int) -> None:
        """So many tokens served a prompt, which pays for what was stored before."""
        if self._pays_for is not None:
            self._unpaid = max(0, self._unpaid - self._pays_for * tokens)


class Audits:
    """Spreads audits evenly over reused prompts, and counts them. Safe for threads."""

    def __init__(self) -> None:
        self.count = self.divergences = 0
        self._lock = forks.lock()
        self._debt = 0.0

    def is_due(self, rate: float) -> bool:
        """Whether one more reused prompt brings the share of audited ones up to `rate`."""
        with self._lock:
            self._debt += rate
            due = self._debt >= 1 - 1e-9
            self._debt -= due
        return due

    def record(self, *, diverged: bool) -> None:
        """Count an audit."""
        with self._lock:
            self.count += 1
            self.divergences += diverged
