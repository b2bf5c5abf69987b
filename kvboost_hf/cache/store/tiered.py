"""Chunks in host memory and below it: in lower tiers, where they outlive the process and others find them."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from kvboost_hf.cache.planning.chunks import Chunker, Tokens, prefix_key
from kvboost_hf.cache.planning.content_index import ContentIndex
from kvboost_hf.cache.planning.plan import HEAD_TOKENS, Border, Chunk, ChunkIndex, SavedState
from kvboost_hf.cache.store.device import DeviceShelf
from kvboost_hf.cache.store.kv import ColumnFormat, LayerKV, LayerStates
from kvboost_hf.cache.store.memory import Put, Shelf, StoredChunk, StoredStates, head_key, remember
from kvboost_hf.cache.store.model_form import ModelForm, read_kv, read_states
from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.below import Found, LowerTiers
from kvboost_hf.cache.tiers.record import Blob, DamagedBlobError, dump

_LISTED_ANEW_AFTER = 10.0  # seconds after which other processes are asked for new content again

Stored = TypeVar("Stored", bound=StoredChunk | StoredStates)


class TieredShelf(Shelf):
    """A shelf in host memory over lower tiers.

    What is stored is also written to every lower tier, by a thread. What is found in one comes back to host memory
    when it is used.

    Args:
        max_bytes: Of host memory.
        lower: The tiers below.
        device: The tier above.
        model: Names the model to them, see `Entry.model`.
        pays_for: See `Shelf`; what other processes may ask for is always stored.
    """

    def __init__(
        self, max_bytes: int, lower: LowerTiers, device: DeviceShelf, model: bytes, pays_for: int | None = None
    ) -> None:
        self._lower, self._device, self._model_name = lower, device, model
        self._durable_roots: set[bytes] = set()  # that mean the same in every process
        self._below: OrderedDict[bytes, None] = OrderedDict()  # keys of what is in a lower tier, as far as is known
        super().__init__(max_bytes, pays_for if not lower else None)
        self._counts |= dict.fromkeys(("loaded", "lost", "not_worth_loading"), 0)

    @property
    def column_format(self) -> ColumnFormat:
        """How columns are kept."""
        return ColumnFormat()

    def forms(self, root: bytes) -> Iterator[ModelForm]:
        """What K/V under a root may look like: as the model was, then, where it may have changed since, as it is."""
        raise NotImplementedError

    def _forget_all(self) -> None:
        super()._forget_all()
        self._below.clear()
        self._device.clear()
        self._ghosts: dict[bytes, StoredChunk] = {}  # in content indexes, but in lower tiers only
        self._listed: dict[bytes, float] = {}  # root -> when the lower tiers were last asked for all that is under it

    # Looking up

    def view(self, root: bytes, row: "Row", without: frozenset[bytes] = frozenset()) -> ChunkIndex:
        """What can be found for a row, in whatever tier, but for some keys."""
        return _View(self, self._lower, row, without) if root in self._durable_roots else self

    def moved_index(self, root: bytes) -> ContentIndex[StoredChunk]:
        """See `Shelf.moved_index`. What other processes have stored in lower tiers appears within seconds."""
        listed, now = self._listed.get(root), time.monotonic()
        if root in self._durable_roots and (listed is None or now - listed >= _LISTED_ANEW_AFTER):
            self._listed[root] = now
            if listed is None:
                self._add_ghosts(self._lower.entries(root))
            else:  # a prompt need not wait for it
                self._lower.run(lambda: self._add_ghosts(self._lower.entries(root)))
        return super().moved_index(root)

    def fetch(self, wanted: Iterable[Stored], *, check: bool = True) -> dict[bytes, Stored]:
        """Load what is in lower tiers only.

        Args:
            wanted: What is wanted, loaded or not.
            check: Whether all of it is to be compared with its checksums now, rather than as it is read.

        Returns:
            By key, what is loaded now. What is missing was lost, and will not be found again.
        """
        fetched: dict[bytes, Stored] = {}
        for each in wanted:
            if each.key in fetched:
                continue
            if isinstance(each, StoredChunk) and (near := self._device.get(each.key)) is not None:
                fetched[each.key] = replace(each, loaded=near, on_device=True)
                continue
            if each.loaded is not None:
                fetched[each.key] = each
                continue
            assert each.found is not None
            try:
                loaded = self._load(each, each.found, check=check)
            except DamagedBlobError as error:
                self.lose(each, error)
                continue
            if loaded is not None:
                fetched[each.key] = loaded
            else:
                self._forget(each)
        return fetched

    def everything(self) -> list[StoredChunk | StoredStates]:
        """All that is stored under the roots that this store knows, in any tier; loaded or not."""
        self.flush()
        with self._lock:
            found: dict[bytes, StoredChunk | StoredStates] = {**self._chunks, **self._states}
            roots = set(self._durable_roots)
        for root in roots:
            for each in self._lower.entries(root):
                states = each.entry.kind is Kind.STATES
                found.setdefault(each.entry.key, _unloaded_states(each) if states else unloaded_chunk(each))
        return list(found.values())

    def entries_below(self) -> Iterator[Entry]:
        """What lower tiers keep, of other models, weights, salts and codecs, too."""
        return (found.entry for found in self._lower.entries())

    def lose(self, damaged: StoredChunk | StoredStates, error: DamagedBlobError) -> None:
        """Something found in a lower tier is not what was written there."""
        assert damaged.found is not None
        damaged.found.tier.note_damage(error)
        self._forget(damaged)

    def _forget(self, gone: StoredChunk | StoredStates) -> None:
        """Something found in a lower tier cannot be had from there."""
        assert gone.found is not None
        gone.found.tier.tier.delete([gone.key])
        with self._lock:
            self._counts["lost"] += 1
            self._below.pop(gone.key, None)
            self._drop_ghost(gone.key)

    def promote(self, chunks: Sequence[StoredChunk | StoredStates]) -> None:
        """Let what has served come nearer: to the device, and from lower tiers to host memory, in a while.

        It takes time that a forward under way has more use for.
        """
        for each in chunks:
            if each.loaded is None or each.key in self._offences:  # somebody else has found it to be wrong
                continue
            if isinstance(each, StoredChunk) and not each.on_device:
                with suppress(DamagedBlobError):  # whoever reads it next finds out
                    self._device.put(each.key, each.kv)
            if each.found is not None:
                with self._lock:
                    remember(self._below, each.key, None)
                self._lower.run(lambda each=each, generation=self._generation: self._take_back(each, generation))  # type: ignore[misc]

    def record_use(
        self, chunks: Sequence[StoredChunk], *, missed: bool, states: StoredStates | None = None, moved: bool = False
    ) -> None:
        """See `Shelf.record_use`."""
        super().record_use(chunks, missed=missed, states=states, moved=moved)
        used: list[StoredChunk | StoredStates] = [*chunks, *([states] if states is not None else [])]
        if durable := [each.key for each in used if each.root in self._durable_roots]:
            self._lower.touch(durable)

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
        """See `Shelf.put_content`; what is in a lower tier comes back to host memory if it is to be pinned."""
        for nearest in self.moved_index(root).variants(tokens)[:1] if pinned else ():
            if nearest.loaded is None and nearest.start <= start:
                for loaded in self.fetch([nearest]).values():
                    self._take_back(loaded, self._generation)
        return super().put_content(root, tokens, start, nbytes, copy_kv, parent=parent, pinned=pinned)

    def flush(self) -> None:
        """Wait until everything stored so far has been written to the lower tiers."""
        self._lower.flush()

    # Letting go

    def quarantine(self, keys: Iterable[bytes]) -> None:
        """See `Shelf.quarantine`; in lower tiers, too."""
        doomed = set(keys)
        self.flush()  # what was on its way to host memory is there
        below = self._lower.find(list(doomed))
        near = [each for key in doomed if (each := self._chunks.get(key) or self._states.get(key)) is not None]
        roots = {each.root for each in near} | {found.entry.root for found in below.values()}
        entries = [found.entry for root in roots for found in self._lower.entries(root)]
        with self._lock:
            only_below = below.keys() - self._chunks.keys() - self._states.keys()
            tree = _with_descendants(doomed, [*entries, *self._chunks.values(), *self._states.values()])
            super().quarantine(doomed)
            for key in tree:  # what was stored while its parent was in a lower tier only
                if key in self._order:
                    for inner in self._order.remove_tree(key):
                        self._unlink(inner)
            for key in only_below:
                self._offences[key] = self._offences.get(key, 0) + 1
                self._counts["quarantined"] += 1
            for key in tree:
                self._below.pop(key, None)
                self._drop_ghost(key)
            self._device.clear()
        if self._lower:
            self._lower.delete(tree)
            self.flush()

    def clear(self) -> None:
        """Drop everything stored for this model, pinned or not, in all tiers: what other processes stored, too."""
        super().clear()
        if self._lower:
            self._lower.clear(self._model_name)

    # Bookkeeping; the lock is held

    def _continues(self, root: bytes, parent: bytes) -> bool:
        return super()._continues(root, parent) or parent in self._below

    def _insert(self, chunk: StoredChunk, *, pinned: bool) -> None:
        self._drop_ghost(chunk.key)
        super()._insert(chunk, pinned=pinned)
        self._write(chunk)

    def _insert_states(self, saved: StoredStates, *, pinned: bool) -> None:
        super()._insert_states(saved, pinned=pinned)
        self._write(saved)

    def _evict(self, key: bytes) -> None:
        gone = self._chunks.get(key) or self._states.get(key)
        super()._evict(key)
        if gone is not None and gone.root in self._durable_roots and (key in self._below or self._write(gone)):
            if isinstance(gone, StoredChunk) and gone.root in self._listed:
                entry = self._entry(gone)
                self._lower.run(lambda: self._add_ghosts(self._lower.find([entry.key]).values()))

    def _replace(self, old: StoredChunk, new: StoredChunk) -> None:
        if old.key in self._ghosts:
            self._drop_ghost(old.key)
        else:
            super()._replace(old, new)
        if old.root in self._durable_roots:
            self._below.pop(old.key, None)
            self._lower.delete([old.key])

    def _write(self, stored: StoredChunk | StoredStates) -> bool:
        """Have something written to the lower tiers that do not have it; tells whether it will be there."""
        if stored.root not in self._durable_roots:
            return False
        above = stored.found.tier if stored.found is not None else None

        def make() -> tuple[Entry, list[bytes | memoryview]]:
            held = stored.loaded
            assert held is not None
            tensors, layout = held.parts()
            return dump(self._entry(stored), tensors, layout)

        if isinstance(stored, StoredStates) and not stored.states.can_be_written:
            return False
        written = self._lower.write(stored.nbytes, make, above) or above is not None
        if written:
            remember(self._below, stored.key, None)
        return written

    def _entry(self, stored: StoredChunk | StoredStates) -> Entry:
        if isinstance(stored, StoredStates):
            kind, start = Kind.STATES, 0
        else:
            kind, start = Kind.CONTENT if stored.content_only else Kind.CHUNK, stored.start
        head = b"" if kind is Kind.CONTENT else head_key(stored.parent, stored.tokens[:HEAD_TOKENS])
        rest = (self._model_name, stored.root, stored.parent, head, start, stored.tokens)
        return Entry(stored.key, kind, *rest, nbytes=0)

    def _load(self, stored: Stored, found: Found, *, check: bool) -> Stored | None:
        """What is in a lower tier, or None if it is not there any more.

        Raises:
            DamagedBlobError: if it is not what this store would have written there.
        """
        begin = time.perf_counter()
        blob = found.tier.read(found.entry)
        held = self._read(stored, blob) if blob is not None else None
        if blob is None or held is None:
            return None
        if check or isinstance(stored, StoredStates):
            blob.check_all()
            found.tier.took(blob.entry.nbytes, time.perf_counter() - begin)
        with self._lock:
            self._counts["loaded"] += 1
        return replace(stored, loaded=held, nbytes=held.nbytes + stored.tokens.nbytes)  # type: ignore[arg-type]

    def _read(self, stored: StoredChunk | StoredStates, blob: Blob) -> LayerKV | LayerStates | None:
        """What a blob holds, in the form that the model has, or None where that is not known."""
        damage: DamagedBlobError | None = None
        for form in self.forms(stored.root):
            try:
                if isinstance(stored, StoredStates):
                    return read_states(blob, form)
                return read_kv(blob, self.column_format, form)
            except DamagedBlobError as error:
                damage = error
        if damage is not None:
            raise damage
        return None

    def _take_back(self, stored: StoredChunk | StoredStates, generation: int) -> None:
        """Take something into host memory that was loaded from a lower tier."""
        try:
            held = stored.loaded.owned() if stored.loaded is not None else None
        except DamagedBlobError as error:
            return self.lose(stored, error)
        with self._lock:
            there = stored.key in self._order
            if held is None or there or self._closed or generation != self._generation:
                return None
            if stored.key in self._offences:
                return None
            if self._make_room(stored.nbytes, keep=stored.parent):
                self._used += stored.nbytes
                if isinstance(stored, StoredStates):
                    assert isinstance(held, LayerStates)
                    super()._insert_states(replace(stored, loaded=held, found=None), pinned=False)
                else:
                    assert isinstance(held, LayerKV)
                    self._drop_ghost(stored.key)
                    super()._insert(replace(stored, loaded=held, found=None), pinned=False)
                self._write(replace(stored, loaded=held))  # type: ignore[arg-type]
        return None

    def _add_ghosts(self, found: Iterable[Found]) -> None:
        """Enter into the content indexes what is in lower tiers only."""
        for each in found:
            entry = each.entry
            with self._lock:
                known = entry.key in self._chunks or entry.key in self._ghosts
                if not known and entry.kind is not Kind.STATES:
                    self._ghosts[entry.key] = ghost = unloaded_chunk(each)
                    self._content_index(entry.root).add(ghost)

    def _drop_ghost(self, key: bytes) -> None:
        if (ghost := self._ghosts.pop(key, None)) is not None:
            self._content_index(ghost.root).remove(ghost)


def unloaded_chunk(found: Found) -> StoredChunk:
    """A chunk as it was found in a lower tier."""
    entry = found.entry
    place = (entry.key, entry.root, entry.parent, entry.start, entry.tokens)
    return StoredChunk(*place, None, 0, content_only=entry.kind is Kind.CONTENT, found=found)


def _with_descendants(keys: Iterable[bytes], entries: Iterable[Entry | StoredChunk | StoredStates]) -> set[bytes]:
    """`keys`, and the keys of all that continues them."""
    children: dict[bytes, list[bytes]] = {}
    for entry in entries:
        children.setdefault(entry.parent, []).append(entry.key)
    found: set[bytes] = set()
    todo = list(keys)
    while todo:
        key = todo.pop()
        if key not in found:
            found.add(key)
            todo += children.get(key, ())
    return found


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
        """What may be found behind each border begins like this."""
        ends = [(border, self.tokens[border.at : border.at + HEAD_TOKENS]) for border in self.borders]
        return [head_key(border.key, head) for border, head in ends if len(head) == HEAD_TOKENS]


class _View:
    """A `ChunkIndex` of what a row can find in host memory and below it.

    The lower tiers are asked for all chunks that a row may have at once, when the first one is not in host memory.
    """

    def __init__(self, shelf: Shelf, lower: LowerTiers, row: Row, without: frozenset[bytes]) -> None:
        self._shelf, self._lower, self._row, self._without = shelf, lower, row, without
        self._found: dict[bytes, Found] | None = None
        self._alike: dict[bytes, list[Found]] | None = None  # by head

    def find(self, key: bytes, tokens: Tokens) -> Chunk | None:
        """See `ChunkIndex.find`."""
        chunk = self._shelf.find(key, tokens)
        if chunk is not None:
            return chunk
        if self._found is None:
            self._found = self._lower.find([border.key for border in self._row.borders[1:]])
        found = self._found.get(key)
        if found is None or key in self._without or found.entry.kind is not Kind.CHUNK:
            return None
        return unloaded_chunk(found) if np.array_equal(found.entry.tokens, tokens) else None

    def siblings(self, parent: bytes, head: Tokens) -> Iterable[Chunk]:
        """See `ChunkIndex.siblings`."""
        near = list(self._shelf.siblings(parent, head))
        known = {chunk.prefix_key for chunk in near} | self._without
        below = [each for each in self._like(parent, head) if each.entry.kind is Kind.CHUNK]
        return [*near, *(unloaded_chunk(each) for each in below if each.entry.key not in known)]

    def states_after(self, parent: bytes, head: Tokens) -> Iterable[SavedState]:
        """See `ChunkIndex.states_after`."""
        near = list(self._shelf.states_after(parent, head))
        known = {saved.key for saved in near} | self._without
        below = [each for each in self._like(parent, head) if each.entry.kind is Kind.STATES]
        return [*near, *(_unloaded_states(each) for each in below if each.entry.key not in known)]

    def _like(self, parent: bytes, head: Tokens) -> list[Found]:
        key = head_key(parent, head)
        if self._alike is None or key not in self._alike:
            # Of models with states all borders will be asked for, of others just this one.
            wanted = {key, *self._row.heads} if self._row.stateful else {key}
            self._alike = {head: [] for head in wanted} | (self._alike or {})
            for each in self._lower.find_alike(sorted(wanted)):
                self._alike[each.entry.head].append(each)
        return [
            each
            for each in self._alike[key]
            if each.entry.parent == parent and np.array_equal(each.entry.tokens[: len(head)], head)
        ]


def _unloaded_states(found: Found) -> StoredStates:
    entry = found.entry
    return StoredStates(entry.key, entry.root, entry.parent, entry.tokens, None, 0, found)
