"""Takes chunks and states into a store, and finds chunks by their content and by how stored text went on."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.kv import Put, Stored, StoredChunk, StoredStates
from kvboost_hf.cache.kv.layer_kv import LayerKV
from kvboost_hf.cache.kv.layer_states import LayerStates
from kvboost_hf.cache.planning.chunks import (
    HEAD_TOKENS,
    KEY_BYTES,
    Tokens,
    content_only_key,
    packed,
    prefix_key,
    states_key,
    text_ids,
)
from kvboost_hf.cache.planning.content_index import ContentIndex
from kvboost_hf.cache.planning.match import MIN_MOVED_TOKENS
from kvboost_hf.cache.store.history import Payback
from kvboost_hf.cache.store.lower import LowerMemory
from kvboost_hf.cache.store.memory import HostMemory, Reservation
from kvboost_hf.ngrams import Continued, NgramIndex, check_ngrams


class ContentIndexes:
    """A `ContentIndex` for each root, made when somebody asks for it: most prompts are found by their keys alone.

    Whoever changes the indexes holds the lock, which is reentrant.
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
        """Assert that just the chunks of host memory, and those below, are in the indexes that are made, each once."""
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

    Nobody finds the text of a root whose salt is forgotten.
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

        All stored chunks are read when text is asked for the first time.
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
        """Assert that the text of just these chunks is kept, if any is."""
        keys = sorted(key for index in self._by_salt.values() for key in index.keys())
        assert keys == (sorted(chunk.key for chunk in chunks) if self.is_used else []), (
            "text must be that of all chunks"
        )


class Insertion:
    """Takes records into host memory, and has them written to the lower tiers.

    Attributes:
        offences: Keys that were quarantined, and how often; what was quarantined twice is not taken in.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        memory: HostMemory,
        lower: LowerMemory,
        contents: ContentIndexes,
        payback: Payback,
        counts: dict[str, int],
        *,
        require_open: Callable[[], None],
        bring_back: Callable[[StoredChunk], None],
        on_torn: Callable[[], None],
    ) -> None:
        self._lock, self._memory, self._lower, self._has_lower = lock, memory, lower, bool(lower.tiers)
        self._contents, self._payback, self._counts = contents, payback, counts
        self._require_open, self._bring_back, self._on_torn = require_open, bring_back, on_torn
        self.offences: dict[bytes, int] = {}

    def put(
        self,
        root: bytes,
        parent: bytes,
        start: int,
        tokens: Tokens,
        nbytes: int,
        copy_kv: Callable[[], LayerKV] | None,
        *,
        pinned: bool = False,
        unfinished: bool = False,
    ) -> Put:
        """Offer a chunk. K/V is copied only if the chunk is new and room for it can be made.

        Its `tokens`, at least `HEAD_TOKENS`, follow the chunk with prefix key `parent`, or the root. `copy_kv` makes a
        copy of `nbytes` bytes; None if it can no longer be made. An `unfinished` one ends where no cut is, so that
        nothing will continue it, and a longer one serves as well.
        """
        key = prefix_key(parent, tokens)

        def holder() -> bytes | None:
            return key if key in self._memory else self._memory.covering(parent, tokens) if unfinished else None

        chunk = StoredChunk(key, root, parent, start, tokens, None, nbytes + tokens.nbytes, len(tokens))
        return self.take(chunk, copy_kv, holder, pinned)

    def put_content(
        self,
        root: bytes,
        tokens: Tokens,
        start: int,
        nbytes: int,
        copy_kv: Callable[[], LayerKV] | None,
        *,
        parent: bytes | None = None,
        pinned: bool = False,
    ) -> Put:
        """Offer a chunk that is to be found by its content only: one computed alone, or behind K/V that was moved.

        Of those with the same tokens, one is kept: the one that had the fewest tokens before it. None is, where a
        chunk with a prefix key had no more. Fewer than `MIN_MOVED_TOKENS` tokens are not stored. `parent` is the key
        of the chunk that it was computed directly behind, of either kind (`content_only_key` tells it), or bytes that
        name its history; None if nothing that is stored will ever continue it.
        """
        if len(tokens) < MIN_MOVED_TOKENS:
            return Put.TOO_SHORT
        self._lower.list_content(root)
        index = self._contents.of(root)
        for nearest in index.variants(tokens)[:1] if pinned else ():  # it must be in host memory to be pinned
            if nearest.loaded is None and nearest.start <= start:
                self._bring_back(nearest)

        def holder() -> bytes | None:
            nearest = index.variants(tokens)[:1]
            return nearest[0].key if nearest and nearest[0].start <= start else None

        history = parent if parent is not None else os.urandom(KEY_BYTES)
        key = content_only_key(root, history, start, tokens)
        size, length = nbytes + tokens.nbytes, len(tokens)
        chunk = StoredChunk(key, root, history, start, tokens, None, size, length, content_only=True)
        return self.take(chunk, copy_kv, holder, pinned)

    def put_states(
        self,
        root: bytes,
        parent: bytes,
        tokens: Tokens,
        nbytes: int,
        copy_states: Callable[[], LayerStates],
        *,
        pinned: bool = False,
        spare: bool = False,
    ) -> Put:
        """Offer the states after some token. They are copied only if they are new and room for them can be made.

        `tokens`, at least `HEAD_TOKENS`, go from the chunk border with prefix key `parent`, or the root, to that
        token. Host memory alone keeps `spare` ones: others of the same prompt are close.
        """
        key = states_key(parent, tokens)
        states = StoredStates(key, root, parent, tokens, None, nbytes + tokens.nbytes, spare=spare)
        return self.take(states, copy_states, lambda: key if key in self._memory else None, pinned)

    def take(
        self,
        offered: Stored,
        copy: Callable[[], LayerKV | LayerStates] | None,
        holder: Callable[[], bytes | None],
        pinned: bool,
    ) -> Put:
        """Take a record in, unless it is there, the cache has lost it, or there is no room.

        `copy` copies its tensors, if it can still be made; `holder` finds the key of a record that serves as well.
        """
        self._require_open()
        tokens = offered.tokens
        assert len(tokens) >= HEAD_TOKENS
        with self._lock:
            try:
                if (present := self._present(holder, pinned)) is not None:
                    return present
                if copy is None:
                    return Put.GONE
                reserved = self._reserve(offered, pinned)
                if isinstance(reserved, Put):
                    return reserved
            except BaseException:  # such as that of Ctrl+C, in the middle of a change
                self._on_torn()
                raise
        try:  # without the lock: copies take their time
            loaded, above = copy(), self._memory.chunks.get(offered.parent)
            own = {"ids": packed(tokens)} if isinstance(offered, StoredChunk) else {"tokens": tokens.copy()}
            parent = above.key if above is not None else offered.parent  # one object for all that continue it
            stored = replace(offered, parent=parent, loaded=loaded, **own)  # type: ignore[arg-type]
            assert loaded.nbytes + tokens.nbytes == stored.nbytes, "the promised size must be the real one"
        except BaseException:
            reserved.release()
            raise
        with self._lock:
            try:
                present, orphaned = self._present(holder, pinned), not self._continues(offered)
                if reserved.lapsed or present is not None or orphaned:  # somebody else was faster
                    reserved.release()
                    return Put.NO_PARENT if orphaned else Put.PRESENT
                self.insert(stored, reserved, pinned=pinned)
                if self._has_lower:
                    self._lower.write(stored)
                if isinstance(stored, StoredChunk) and not stored.content_only:
                    for shorter in self._memory.continued_by(stored):
                        self._replace(shorter, stored)
                if not pinned and not (isinstance(stored, StoredStates) and stored.spare):
                    self._payback.note_stored(len(tokens))
            except BaseException:  # such as that of Ctrl+C, in the middle of a change
                self._on_torn()
                raise
        return Put.STORED

    def _present(self, holder: Callable[[], bytes | None], pinned: bool) -> Put | None:
        key = holder()
        if key is None:
            return None
        if pinned and key not in self._memory:  # there was no room to bring it back from a lower tier
            return Put.NO_ROOM
        if pinned:
            self._memory.pin(key)
        return Put.PRESENT

    def _reserve(self, offered: Stored, pinned: bool) -> Reservation | Put:
        """Reserve room for a record, or tell why it cannot be taken in."""
        if self.offences.get(offered.key, 0) > 1:
            return Put.NO_ROOM
        if not self._continues(offered):
            return Put.NO_PARENT
        states = isinstance(offered, StoredStates) and not pinned
        reserved = self._memory.reserve(offered.nbytes, keep=offered.parent, states=states)
        if reserved is None:
            self._counts["rejected"] += 1
            return Put.NO_ROOM
        return reserved

    def _continues(self, offered: Stored) -> bool:
        """Whether a record can be found: what it continues is stored."""
        if isinstance(offered, StoredChunk) and offered.content_only:
            return True
        return offered.parent == offered.root or offered.parent in self._memory.chunks or offered.parent in self._lower

    def insert(self, stored: Stored, reserved: Reservation, *, pinned: bool = False) -> None:
        """Enter a record into host memory, in place of content-only chunks that had no fewer tokens before them."""
        self._memory.insert(stored, reserved, pinned=pinned)
        if isinstance(stored, StoredChunk):
            for other in self._contents.content_only(stored):
                if other is not stored and other.start >= stored.start:
                    self._replace(other, stored)

    def _replace(self, old: StoredChunk, new: StoredChunk) -> None:
        """Give up a chunk in every tier in favor of one that serves better."""
        if old.key in self._memory:
            self._memory.replace(old, new)
        else:
            self._contents.drop_below([old.key])
        if self._lower.keeps(old.root):
            self._lower.delete([old.key])
