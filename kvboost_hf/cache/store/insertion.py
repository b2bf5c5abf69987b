"""`Insertion`: takes chunks and states into a store, and out of it what they serve in place of."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from kvboost_hf.cache.kv.layer_kv import LayerKV
from kvboost_hf.cache.kv.layer_states import LayerStates
from kvboost_hf.cache.kv.records import Put, Stored, StoredChunk, StoredStates
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.store.indexes import ContentIndexes, Payback
from kvboost_hf.cache.store.lower import LowerMemory
from kvboost_hf.cache.store.memory import HostMemory, Reservation


class Insertion:
    """Takes records in.

    Args:
        lock: Held wherever records change.
        memory: Host memory, which takes them.
        lower: The lower tiers, to which they are written.
        contents: Finds chunks by their content.
        payback: Is told what was stored.
        counts: In which `"rejected"` counts the records that there was no room for.

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
    ) -> None:
        self._lock, self._memory, self._lower = lock, memory, lower
        self._contents, self._payback, self._counts = contents, payback, counts
        self.offences: dict[bytes, int] = {}

    def take(
        self,
        offered: Stored,
        copy: Callable[[], LayerKV | LayerStates] | None,
        holder: Callable[[], bytes | None],
        pinned: bool,
    ) -> Put:
        """Take a record in, unless it is there, the cache has lost it, or there is no room.

        Args:
            offered: The record, not loaded.
            copy: Copies its tensors; None if it can no longer be made.
            holder: Finds the key of a record that serves as well.
            pinned: Never evict it.
        """
        assert len(offered.tokens) >= HEAD_TOKENS
        with self._lock:
            if (present := self._present(holder, pinned)) is not None:
                return present
            if copy is None:
                return Put.GONE
            reserved = self._reserve(offered, pinned)
            if isinstance(reserved, Put):
                return reserved
        try:  # without the lock: copies take their time
            loaded = copy()
            stored = replace(offered, tokens=offered.tokens.copy(), loaded=loaded)  # type: ignore[arg-type]
            assert loaded.nbytes + stored.tokens.nbytes == stored.nbytes, "the promised size must be the real one"
        except BaseException:
            reserved.release()
            raise
        with self._lock:
            present, orphaned = self._present(holder, pinned), not self._continues(offered)
            if reserved.lapsed or present is not None or orphaned:  # somebody else was faster
                reserved.release()
                return Put.NO_PARENT if orphaned else Put.PRESENT
            self.insert(stored, reserved, pinned=pinned)
            self._lower.write(stored)
            if isinstance(stored, StoredChunk) and not stored.content_only:
                for shorter in self._memory.continued_by(stored):
                    self._replace(shorter, stored)
            if not pinned and not (isinstance(stored, StoredStates) and stored.spare):
                self._payback.note_stored(len(stored.tokens))
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
            for other in self._contents.of(stored.root).variants(stored.tokens):
                if other is not stored and other.content_only and other.start >= stored.start:
                    self._replace(other, stored)

    def _replace(self, old: StoredChunk, new: StoredChunk) -> None:
        """Give up a chunk in every tier in favor of one that serves better."""
        if old.key in self._memory:
            self._memory.replace(old, new)
        else:
            self._contents.drop_below([old.key])
        if self._lower.keeps(old.root):
            self._lower.delete([old.key])
