"""Chunks by their content: those in host memory, and those that are known to be in lower tiers only."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from kvboost_hf.cache.kv.records import Stored, StoredChunk
from kvboost_hf.cache.planning.content_index import ContentIndex


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
