"""The tiers below host memory as a store sees them: chunks and states of one model, under roots that last."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import TypeVar

import numpy as np

from kvboost_hf.cache.kv import Stored, StoredChunk, StoredStates
from kvboost_hf.cache.kv.model_form import BlobReader, ModelForm, remember
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Chunker, Tokens, prefix_key
from kvboost_hf.cache.planning.plan import Border, Chunk, SavedState
from kvboost_hf.cache.store.memory import HostMemory
from kvboost_hf.cache.tiers.base import Entry, Kind, MadeWith
from kvboost_hf.cache.tiers.below import Found, LowerTiers, MeasuredTier
from kvboost_hf.cache.tiers.record import DamagedBlobError, dump

_LISTED_ANEW_AFTER = 10.0  # seconds after which other processes are asked for new content again
_LISTING_S = 0.5  # seconds that it may take; where it takes longer, they are asked less often
_LISTED_AT_ONCE = 2_000  # chunks
_HOLDS_S = 1.0  # seconds after which other processes may have stored what a prompt under way lacks

S = TypeVar("S", bound=Stored)


class LowerMemory:
    """Chunks and states of one model in lower tiers. Only records under durable roots are written.

    The lock is held wherever the known keys change. `on_found` is called with chunks that are found under a root which
    `list_content` was called for, `watchers` with keys that are known to be in a lower tier, or known not to be there
    any more.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        model_name: bytes,
        reader: BlobReader,
        lock: AbstractContextManager[object],
        on_found: Callable[[Iterable[Stored]], None],
        watchers: Sequence[Callable[[Collection[bytes]], None]],
    ) -> None:
        self.tiers = tiers
        self.loaded = self.lost = 0  # records that were read, and that could not be read
        self.model_name, self._reader, self._lock, self._on_found = model_name, reader, lock, on_found
        self._watchers = watchers
        self._durable_roots: dict[bytes, MadeWith] = {}  # that mean the same in every process
        self.forget_all()

    def forget_all(self) -> None:
        """Forget what is known of the tiers, which keep what they have."""
        self._known: OrderedDict[bytes, None] = OrderedDict()  # keys of what is in a lower tier, as far as is known
        self._listed: dict[bytes, tuple[float, float]] = {}  # root -> when all under it was listed, and for how long

    # Looking up

    def keep(self, root: bytes, made_with: MadeWith, fingerprint: bytes, hidden_layers: tuple[int, ...]) -> None:
        """From now on, write what is stored under a root, with some hidden states, and find what is there."""
        self._durable_roots.setdefault(root, made_with)
        self._reader.note_root(root, fingerprint, hidden_layers=hidden_layers)

    def keep_beside(self, root: bytes, beside: bytes, form: ModelForm) -> None:
        """From now on, write what is stored under a root `beside` another one, if that is written; and find it."""
        if (made_with := self._durable_roots.get(root)) is not None:
            self._durable_roots.setdefault(beside, made_with)
            self._reader.note_form(beside, form)

    def keeps(self, root: bytes) -> bool:
        """Whether records under a root are written to lower tiers."""
        return root in self._durable_roots

    def __contains__(self, key: bytes) -> bool:
        """Whether a record is known to be in a lower tier."""
        return key in self._known

    def records(self, root: bytes) -> Iterator[Stored]:
        """All records under a root."""
        return map(unloaded, self.tiers.entries(root))

    def records_by_tier(self, root: bytes) -> Iterator[tuple[str, Stored, int]]:
        """All records under roots that begin so, in each tier that has them: its name, the record, its bytes there."""
        for tier in self.tiers.tiers:
            for entry in tier.tier.entries(root):
                if entry.root.startswith(root):
                    yield tier.tier.name, unloaded(Found(entry, tier)), entry.nbytes

    @property
    def roots(self) -> list[bytes]:
        """The roots under which records are written."""
        return list(self._durable_roots)

    def list_content(self, root: bytes) -> None:
        """Call `on_found` with all chunks under a root, and again from time to time.

        The first time, a prompt waits for as many as take a moment.
        """
        last, now = self._listed.get(root), time.monotonic()
        if root not in self._durable_roots:
            return
        if last is None or now - last[0] >= _LISTED_ANEW_AFTER * max(1.0, last[1] / _LISTING_S):
            self._listed[root] = inf, 0.0  # under way
            records = self.records(root)
            if last is None:
                self._list_some(root, records, now)
            else:  # a prompt need not wait for it
                self.tiers.run(lambda: self._list_some(root, records, now))

    def _list_some(self, root: bytes, records: Iterator[Stored], began: float) -> None:
        """List some chunks, and let what waits to be written pass before the next ones."""
        some = list(islice(records, _LISTED_AT_ONCE))
        self._on_found(some)
        if len(some) == _LISTED_AT_ONCE:
            self.tiers.run(lambda: self._list_some(root, records, began))
        elif root in self._listed:
            now = time.monotonic()
            self._listed[root] = now, now - began

    def load(self, wanted: Iterable[S], *, check: bool) -> list[S | DamagedBlobError | None]:
        """Read records from the tiers that they were found in; `check` all of each now, rather than as it is read.

        Returns each record; None if it is not there any more, or why it is not what this store would have written.
        """
        results: list[S | DamagedBlobError | None] = []
        times: dict[MeasuredTier, list[tuple[int, float]]] = {}
        for stored in wanted:
            found = stored.found
            assert found is not None
            begin = time.perf_counter()
            try:
                blob = found.tier.read(found.entry)
                if blob is not None and (check or isinstance(stored, StoredStates)):
                    blob.check_all()
                    times.setdefault(found.tier, []).append((blob.entry.nbytes, time.perf_counter() - begin))
                held = self._reader.read(blob, stored.root) if blob is not None else None
                if held is None:
                    results.append(None)
                    continue
            except DamagedBlobError as error:
                results.append(error)
                continue
            nbytes = held.nbytes + found.entry.tokens.nbytes
            results.append(replace(stored, loaded=held, nbytes=nbytes))  # type: ignore[arg-type]
        for tier, blobs in times.items():
            tier.took(*blobs)
        with self._lock:
            self.loaded += sum(isinstance(each, StoredChunk | StoredStates) for each in results)
        return results

    # Writing

    def write(self, stored: Stored) -> bool:
        """Have a record written to the tiers that do not have it; tells whether it will be there."""
        if stored.root not in self._durable_roots or not self.may_write(stored):
            return False
        above = stored.found.tier if stored.found is not None else None

        def forget() -> None:
            if above is None:
                with self._lock:
                    self.forget([stored.key])

        written = self.tiers.write(stored.nbytes, lambda: self.blob_of(stored), above, forget) or above is not None
        if written:
            self.note_known([stored.key])
        return written

    def may_write(self, stored: Stored) -> bool:
        """Whether a record means the same in other processes, and is one that lower tiers keep."""
        if isinstance(stored, StoredStates) and (stored.spare or not stored.states.can_be_written):
            return False
        return stored.root in self._durable_roots

    def blob_of(self, stored: Stored) -> tuple[Entry, list[bytes | memoryview]]:
        """The entry and the blob of a record that is loaded."""
        assert stored.loaded is not None
        return dump(self._entry(stored), *stored.loaded.parts())

    def note_known(self, keys: Collection[bytes]) -> None:
        """Records are in a lower tier."""
        with self._lock:
            for key in keys:
                remember(self._known, key, None)
            for changed in self._watchers:
                changed(keys)

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
        head = b"" if kind is Kind.CONTENT else prefix_key(stored.parent, stored.tokens[:HEAD_TOKENS])
        rest = (self.model_name, stored.root, stored.parent, head, start, stored.tokens)
        return Entry(stored.key, kind, *rest, nbytes=0, made_with=self._durable_roots[stored.root])

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
            self.forget((stored.key,))

    def delete(self, keys: Collection[bytes]) -> None:
        """Delete records in every tier."""
        self.forget(keys)
        if self.tiers:
            self.tiers.delete(keys)

    def forget(self, keys: Collection[bytes]) -> None:
        """Records are not in a lower tier any more."""
        for key in keys:
            self._known.pop(key, None)
        for changed in self._watchers:
            changed(keys)

    def clear(self) -> None:
        """Delete all records of the model in every tier: what other processes have stored, too."""
        self.forget_all()
        if self.tiers:
            self.tiers.clear(self.model_name)
            self.tiers.announce({"kind": "cleared", "model": self.model_name.hex()})


@dataclass(frozen=True, slots=True, eq=False)
class RowToServe:
    """A row to find chunks for."""

    root: bytes  # the root of its chain
    tokens: Tokens
    border: Border  # the chunk border that it is to be served from
    chunker: Chunker  # where its chunks end
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
        """The key that the chunks behind each border share which begin as the row goes on there."""
        ends = [(border, self.tokens[border.at : border.at + HEAD_TOKENS]) for border in self.borders]
        return [prefix_key(border.key, head) for border, head in ends if len(head) == HEAD_TOKENS]


def unloaded(found: Found) -> Stored:
    """The record of a blob in a lower tier, which is not read yet."""
    entry = found.entry
    if entry.kind is Kind.STATES:
        return StoredStates(entry.key, entry.root, entry.parent, entry.tokens, None, 0, found)
    place = (entry.key, entry.root, entry.parent, entry.start, entry.tokens)
    content_only, tier = entry.kind is Kind.CONTENT, found.tier.tier.name
    return StoredChunk(*place, None, 0, len(entry.tokens), content_only=content_only, found=found, tier=tier)


class TieredView:
    """A `ChunkIndex` of the chunks that a row can find in host memory and below it, except those under some keys.

    The lower tiers are asked for all chunks that a row may have at once, when the first one is not in host memory; for
    chunks that go on otherwise behind a border at that border, and at a second one for all borders behind it.
    """

    def __init__(self, memory: HostMemory, lower: LowerTiers, row: RowToServe, without: frozenset[bytes]) -> None:
        self._memory, self._lower, self._row, self._without = memory, lower, row, without
        self._until = time.monotonic() + _HOLDS_S
        self._found: dict[bytes, Stored | None] = {}  # None for what no tier has
        self._alike: dict[bytes, list[Stored]] = {}  # by head

    def holds_for(self, row: RowToServe) -> bool:
        """Whether the view still holds, for a row that goes on as its own does: a later piece of the prompt."""
        own, tokens = self._row, row.tokens
        return (
            time.monotonic() <= self._until
            and row.root == own.root
            and row.stateful == own.stateful
            and np.array_equal(own.tokens[: len(tokens)], tokens)
        )

    def find(self, key: bytes, tokens: Tokens) -> Chunk | None:
        if key in self._memory.chunks and (chunk := self._memory.find(key, tokens)) is not None:
            return chunk
        if key not in self._found:
            keys = [key] if self._found else [key, *[border.key for border in self._row.borders[1:]]]
            found = self._lower.find(list(dict.fromkeys(keys)))
            usable = {key: unloaded(each) for key, each in found.items() if key not in self._without}
            self._found |= dict.fromkeys(keys) | usable  # at once: another thread may look here, too
        below = self._found[key]
        if not isinstance(below, StoredChunk) or below.content_only:
            return None
        return below if np.array_equal(below.ids, tokens) else None

    def siblings(self, parent: bytes, head: Tokens) -> Iterable[Chunk]:
        near = self._memory.siblings(parent, head)
        below = [each for each in self._like(parent, head, near) if isinstance(each, StoredChunk)]
        return [*near, *(chunk for chunk in below if not chunk.content_only)]

    def states_after(self, parent: bytes, head: Tokens) -> Iterable[SavedState]:
        near = self._memory.states_after(parent, head)
        return [*near, *(each for each in self._like(parent, head, near) if isinstance(each, StoredStates))]

    def _like(self, parent: bytes, head: Tokens, near: Iterable[Stored]) -> list[Stored]:
        """The records below that continue `parent` and start with `head`, but for those that are near."""
        key = prefix_key(parent, head)
        if key not in self._alike:
            # Of models with states all borders will be asked for, of others just this one, unless a prompt comes in
            # pieces.
            wanted = {key, *self._row.heads} if self._row.stateful or self._alike else {key}
            wanted -= self._alike.keys()
            found: dict[bytes, list[Stored]] = {head: [] for head in wanted}
            for each in self._lower.find_alike(sorted(wanted)):
                found[each.entry.head].append(unloaded(each))
            self._alike |= found
        known = self._without | {each.key for each in near}
        return [
            each
            for each in self._alike[key]
            if each.key not in known and each.parent == parent and np.array_equal(each.tokens[: len(head)], head)
        ]
