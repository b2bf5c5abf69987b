"""How chunks are found by something other than their keys: by their content, and by how stored text went on."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.kv.records import Stored, StoredChunk
from kvboost_hf.cache.planning.chunks import text_ids
from kvboost_hf.cache.planning.content_index import ContentIndex
from kvboost_hf.ngrams import Continued, NgramIndex, check_ngrams


class ContentIndexes:
    """A `ContentIndex` for each root, made when somebody asks for it: most prompts are found by their keys alone.

    Args:
        lock: Reentrant; whoever changes the indexes holds it.
        chunks: Gives the chunks of host memory.
    """

    def __init__(self, lock: AbstractContextManager[object], chunks: Callable[[], Iterable[StoredChunk]]) -> None:
        self._lock, self._chunks = lock, chunks
        self.clear()

    def clear(self) -> None:
        """Forget all chunks."""
        self._by_root: dict[bytes, ContentIndex[StoredChunk]] = {}
        self._counts: Counter[bytes] = Counter()  # chunks of host memory by root
        self._below: dict[bytes, StoredChunk] = {}  # by key, those in lower tiers only

    def of(self, root: bytes) -> ContentIndex[StoredChunk]:
        """The chunks under a root; the index follows what comes and goes."""
        with self._lock:
            if root not in self._by_root:
                index = self._by_root[root] = ContentIndex(self._lock)
                for chunk in self._chunks() if self._counts[root] else ():
                    if chunk.root == root:
                        index.add(chunk)
            return self._by_root[root]

    def content_only(self, chunk: StoredChunk) -> list[StoredChunk]:
        """The chunks with the same tokens that are found by their content only."""
        index = self._by_root.get(chunk.root)  # there is one where there are such chunks
        return [each for each in index.variants(chunk.tokens) if each.content_only] if index is not None else []

    def add(self, chunk: StoredChunk) -> None:
        """Enter a chunk of host memory, in place of its record from a lower tier."""
        self.drop_below([chunk.key])
        self._counts[chunk.root] += 1
        if (index := self._by_root.get(chunk.root)) is not None:
            index.add(chunk)
        elif chunk.content_only:
            self.of(chunk.root)

    def remove(self, chunk: StoredChunk) -> None:
        """Take out a chunk of host memory."""
        self._counts[chunk.root] -= 1
        if (index := self._by_root.get(chunk.root)) is not None:
            index.remove(chunk)

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
        """Check that just the chunks of host memory, and those below, are in the indexes that are made, each once.

        Raises:
            AssertionError: if they are not.
        """
        here = list(chunks)
        assert Counter(chunk.root for chunk in here) == +self._counts, "chunks must be counted by root"
        expected = [*(chunk for chunk in here if chunk.root in self._by_root), *self._below.values()]
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
            self._index(chunk.root).add(chunk.key, chunk.parent, text_ids(chunk.tokens))

    def remove(self, chunk: StoredChunk) -> None:
        """Take out the text of a chunk."""
        if self.is_used:
            self._index(chunk.root).remove(chunk.key)

    def continued(
        self,
        chunks: Iterable[StoredChunk],
        salt: bytes,
        ids: NDArray[np.int64],
        length: int,
        max_ngram: int,
        min_ngram: int,
    ) -> Continued:
        """The tokens that followed the longest n-gram that ends `ids`; see `ChunkStore.continued`.

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
        return index.continued(ids, length, max_ngram, min_ngram) if index is not None else Continued.nothing()

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
