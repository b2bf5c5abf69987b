"""Chunks and states in the tiers below host memory, where they outlive the process and other processes find them."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from kvboost_hf.cache.kv.records import Stored, StoredChunk, StoredStates, head_key, unloaded
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.store.records.blob_reader import BlobReader
from kvboost_hf.cache.store.records.history import remember
from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.below import Found, LowerTiers
from kvboost_hf.cache.tiers.record import DamagedBlobError, dump

_LISTED_ANEW_AFTER = 10.0  # seconds after which other processes are asked for new content again

S = TypeVar("S", bound=Stored)


class LowerMemory:
    """Chunks and states of one model in lower tiers. Only records under durable roots are written.

    Args:
        tiers: The tiers; there may be none.
        model_name: Names the model to them, see `Entry.model`.
        reader: Reads K/V and states from their blobs.
        lock: Held wherever the known keys change.
        on_found: Called with chunks that are found under a root which `list_content` was called for.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        model_name: bytes,
        reader: BlobReader,
        lock: AbstractContextManager[object],
        on_found: Callable[[Iterable[Stored]], None],
    ) -> None:
        self.tiers = tiers
        self.loaded = self.lost = 0  # records that were read, and that could not be read
        self._model_name, self._reader, self._lock, self._on_found = model_name, reader, lock, on_found
        self._durable_roots: set[bytes] = set()  # that mean the same in every process
        self.forget_all()

    def __bool__(self) -> bool:
        return bool(self.tiers)

    def forget_all(self) -> None:
        """Forget what is known of the tiers, which keep what they have."""
        self._known: OrderedDict[bytes, None] = OrderedDict()  # keys of what is in a lower tier, as far as is known
        self._listed: dict[bytes, float] = {}  # root -> when the tiers were last asked for all content under it

    # Looking up

    def note_root(self, root: bytes, fingerprint: bytes, *, keeps_hidden: bool = False) -> None:
        """From now on, write what is stored under a root, and find what is there; see `BlobReader.note_root`."""
        self._durable_roots.add(root)
        self._reader.note_root(root, fingerprint, keeps_hidden=keeps_hidden)

    def keeps(self, root: bytes) -> bool:
        """Whether records under a root are written to lower tiers."""
        return root in self._durable_roots

    def __contains__(self, key: bytes) -> bool:
        """Whether a record is known to be in a lower tier."""
        return key in self._known

    def records(self, root: bytes) -> Iterator[Stored]:
        """All records under a root."""
        return map(unloaded, self.tiers.entries(root))

    def entries(self) -> Iterator[Entry]:
        """Entries of all blobs, of other models, weights, salts and codecs, too."""
        return (found.entry for found in self.tiers.entries())

    def all_records(self) -> Iterator[Stored]:
        """All records under the roots that the store knows."""
        for root in list(self._durable_roots):
            yield from self.records(root)

    def list_content(self, root: bytes) -> None:
        """Call `on_found` with all chunks under a root: at once the first time, and again from time to time."""
        listed, now = self._listed.get(root), time.monotonic()
        if root in self._durable_roots and (listed is None or now - listed >= _LISTED_ANEW_AFTER):
            self._listed[root] = now
            if listed is None:
                self._on_found(self.records(root))
            else:  # a prompt need not wait for it
                self.tiers.run(lambda: self._on_found(self.records(root)))

    def load(self, stored: S, *, check: bool) -> S | None:
        """Read a record from the tier that it was found in; None if it is not there any more.

        Args:
            stored: Not loaded yet.
            check: Compare all of a chunk with its checksums now, rather than as it is read.

        Raises:
            DamagedBlobError: if it is not what this store would have written there.
        """
        found = stored.found
        assert found is not None
        begin = time.perf_counter()
        blob = found.tier.read(found.entry)
        held = self._reader.read(blob, stored.root) if blob is not None else None
        if blob is None or held is None:
            return None
        if check or isinstance(stored, StoredStates):
            blob.check_all()
            found.tier.took(blob.entry.nbytes, time.perf_counter() - begin)
        with self._lock:
            self.loaded += 1
        return replace(stored, loaded=held, nbytes=held.nbytes + stored.tokens.nbytes)  # type: ignore[arg-type]

    # Writing

    def write(self, stored: Stored) -> bool:
        """Have a record written to the tiers that do not have it; tells whether it will be there."""
        if stored.root not in self._durable_roots:
            return False
        if isinstance(stored, StoredStates) and not stored.states.can_be_written:
            return False
        above = stored.found.tier if stored.found is not None else None

        def make() -> tuple[Entry, list[bytes | memoryview]]:
            assert stored.loaded is not None
            return dump(self._entry(stored), *stored.loaded.parts())

        written = self.tiers.write(stored.nbytes, make, above) or above is not None
        if written:
            self.note_known(stored.key)
        return written

    def note_known(self, key: bytes) -> None:
        """A record is in a lower tier."""
        with self._lock:
            remember(self._known, key, None)

    def keep_evicted(self, stored: Stored) -> None:
        """Host memory has evicted a record: write it if it is not there yet, and have it found by its content."""
        if stored.root in self._durable_roots and (stored.key in self._known or self.write(stored)):
            if isinstance(stored, StoredChunk) and stored.root in self._listed:
                key = stored.key
                self.tiers.run(lambda: self._on_found(map(unloaded, self.tiers.find([key]).values())))

    def _entry(self, stored: Stored) -> Entry:
        if isinstance(stored, StoredStates):
            kind, start = Kind.STATES, 0
        else:
            kind, start = Kind.CONTENT if stored.content_only else Kind.CHUNK, stored.start
        head = b"" if kind is Kind.CONTENT else head_key(stored.parent, stored.tokens[:HEAD_TOKENS])
        rest = (self._model_name, stored.root, stored.parent, head, start, stored.tokens)
        return Entry(stored.key, kind, *rest, nbytes=0)

    # Giving up

    def give_up(self, stored: Stored, error: DamagedBlobError | None = None) -> None:
        """Delete a record that cannot be had from the tier that it was found in, because of its damage if any."""
        found: Found | None = stored.found
        assert found is not None
        if error is not None:
            found.tier.note_damage(error)
        found.tier.tier.delete([stored.key])
        with self._lock:
            self.lost += 1
            self._known.pop(stored.key, None)

    def delete(self, keys: Collection[bytes]) -> None:
        """Delete records in every tier."""
        for key in keys:
            self._known.pop(key, None)
        if self.tiers:
            self.tiers.delete(keys)

    def clear(self) -> None:
        """Delete all records of the model in every tier: what other processes have stored, too."""
        self.forget_all()
        if self.tiers:
            self.tiers.clear(self._model_name)
