"""Memory of a store: chunks and states in host memory within a byte budget, and copies of chunks on devices."""

import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from kvboost_hf import forks
from kvboost_hf.cache.kv import Stored, StoredChunk, StoredStates
from kvboost_hf.cache.kv.layer_kv import LayerKV
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Tokens, common_length, content_only_key, prefix_key
from kvboost_hf.cache.planning.eviction import Bag, EvictionOrder

_log = logging.getLogger("kvboost_hf")

_SAMPLED = 16  # states among which one to give up is chosen
_WEIGHT_OF_ENDS = 4  # as often as elsewhere, text goes on from its end
_SHORT = 7  # bytes of a key, of an int that takes least; a collision brings others, which are compared
_MAX_SIBLINGS = 256  # chunks with the same head that are compared token by token


class HostMemory:
    """Chunks and states within a byte budget. A `ChunkIndex` of the chunks that are found by prefix key.

    Chunks form a forest by their history. States hang beneath the chunk border before them. Chunks that are found by
    their content only stand alone. The chunks that are asked for least often, of those that nothing continues, are
    evicted first. Lookups take the lock; whoever changes the contents holds it. `on_evict` is called, after
    `on_remove`, with each chunk and all states that had to make room.
    """

    def __init__(
        self,
        max_bytes: int,
        lock: AbstractContextManager[object],
        *,
        state_share: float = 1.0,
        on_insert: Sequence[Callable[[StoredChunk], None]] = (),
        on_remove: Sequence[Callable[[StoredChunk], None]] = (),
        on_evict: Sequence[Callable[[Stored], None]] = (),
    ) -> None:
        self.max_bytes = max_bytes
        self._state_share = state_share
        self._warned = False
        self._random = random.Random(0)
        self.evictions = 0
        self.generation = 0  # how often it was cleared
        self._lock = lock
        self._on_insert, self._on_remove, self._on_evict = list(on_insert), list(on_remove), on_evict
        self.clear()

    def clear(self) -> None:
        """Drop all records, pinned ones too; reservations that are under way lapse."""
        self.chunks: dict[bytes, StoredChunk] = {}
        self.states: dict[bytes, StoredStates] = {}
        self._chunks_by_head: ByHead = {}
        self._states_by_head: ByHead = {}
        self.order = EvictionOrder(partial(_name_of, self.chunks))
        self._holders: dict[bytes, set[bytes]] = {}  # of pinned records, by key
        self._state_places: dict[bytes, int] = {}
        self._state_keys: Bag[bytes] = Bag([], self._state_places)
        self._state_bytes = 0
        self._stored = self._reserved = 0  # bytes
        self.generation += 1

    def watch(self, changed: Callable[[StoredChunk], None]) -> None:
        """From now on, call `changed` with each chunk that comes in or goes."""
        self._on_insert.append(changed)
        self._on_remove.append(changed)

    # Looking up

    def __contains__(self, key: bytes) -> bool:
        return key in self.chunks or key in self.states

    def get(self, key: bytes) -> Stored | None:
        """The record under a key."""
        return self.chunks.get(key) or self.states.get(key)

    def records(self) -> Iterator[Stored]:
        """All chunks, then all states."""
        yield from self.chunks.values()
        yield from self.states.values()

    @property
    def nbytes(self) -> int:
        """Bytes of all records, and bytes that are reserved."""
        return self._stored + self._reserved

    def find(self, key: bytes, tokens: Tokens) -> StoredChunk | None:
        with self._lock:
            chunk = self.chunks.get(key)
        if chunk is None or chunk.content_only:
            return None
        ids = np.frombuffer(chunk.ids, dtype=np.int32) if isinstance(chunk.ids, bytes) else chunk.ids
        return chunk if np.array_equal(ids, tokens) else None

    def siblings(self, parent: bytes, head: Tokens) -> list[StoredChunk]:
        """Chunks that continue `parent` and start with the tokens `head`, newest first."""
        found: list[StoredChunk] = []
        with self._lock:
            for key in _newest(self._chunks_by_head, parent, head):
                chunk = self.chunks[key]
                ids = np.frombuffer(chunk.ids, dtype=np.int32) if isinstance(chunk.ids, bytes) else chunk.ids
                if chunk.parent == parent and np.array_equal(ids[: len(head)], head):
                    found.append(chunk)
        return found

    def states_after(self, parent: bytes, head: Tokens) -> list[StoredStates]:
        """States saved in the chunk after `parent`, or at its end, that starts with `head`; newest first."""
        with self._lock:
            found = [self.states[key] for key in _newest(self._states_by_head, parent, head)]
        return [each for each in found if each.parent == parent]

    def covering(self, parent: bytes, tokens: Tokens) -> bytes | None:
        """The key of a chunk that continues `parent` and starts with all of `tokens`."""
        for sibling in self.siblings(parent, tokens[:HEAD_TOKENS]):
            if common_length(sibling.tokens, tokens) == len(tokens):
                return sibling.key
        return None

    def beginning(self, root: bytes, tokens: Tokens, stop: int) -> tuple[list[Stored], int]:
        """The records that serve the first tokens of a text, of those that begin before `stop`, and how many they
        serve.
        """
        found: list[Stored] = []
        key, at = root, 0
        with self._lock:
            while at < stop:
                rest = tokens[at:]
                for states in self.states_after(key, rest[:HEAD_TOKENS]):
                    if np.array_equal(states.tokens, rest[: len(states.tokens)]):
                        found.append(states)
                chunks = self.siblings(key, rest[:HEAD_TOKENS]) if len(rest) >= HEAD_TOKENS else []
                best = max(chunks, key=lambda chunk: common_length(chunk.tokens, rest), default=None)
                if best is None:
                    break
                found.append(best)
                key, common = best.key, common_length(best.tokens, rest)
                at += common
                if common < len(best.tokens):
                    break
        return found, at

    def continued_by(self, chunk: StoredChunk) -> list[StoredChunk]:
        """The unfinished chunks that `chunk` continues: it holds all that they hold."""
        own = chunk.tokens
        return [
            sibling
            for sibling in self.siblings(chunk.parent, own[:HEAD_TOKENS])
            if sibling.length < chunk.length
            and common_length(sibling.tokens, own) == sibling.length
            and self.order.is_leaf(sibling.key)
        ]

    def use(self, keys: Iterable[bytes], *, by_content: bool) -> None:
        """Count one use of each record by one prompt; tells whether chunks are found by their content, too."""
        self.order.next_prompt()
        self.order.by_content |= by_content
        for key in keys:
            if key in self.chunks or key in self.states:
                self.order.touch(key)

    # Taking in

    @property
    def max_state_bytes(self) -> int:
        """Bytes that states may take, the pinned ones left out."""
        return int(self._state_share * self.max_bytes)

    def reserve(self, nbytes: int, keep: bytes, *, states: bool = False) -> "Reservation | None":
        """Evict records until so many bytes are free, and reserve these; None where that cannot be done.

        What is under `keep`, which it continues, is not evicted for it. Of `states` there may be so many.
        """
        if states and not self._make_room_among_states(nbytes):
            return None
        if nbytes > self.max_bytes:
            return None
        while self.nbytes + nbytes > self.max_bytes:
            victim = self.order.victim(keep=keep)
            if victim is None:
                return None
            self._evict(victim)
        self._reserved += nbytes
        return Reservation(self, nbytes, self.generation)

    def _make_room_among_states(self, nbytes: int) -> bool:
        """Evict states until so many bytes more are within their share; tells whether they are."""
        most = self.max_state_bytes
        if nbytes > most:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "The states after one token take %d bytes, and the store may keep %d bytes of them, so that it "
                    "keeps none. Raise `max_bytes`, or `state_share`, of the ChunkStore.",
                    nbytes,
                    most,
                )
            return False
        pinned = sum([self.states[key].nbytes for key in self._holders if key in self.states])
        while self._state_bytes - pinned + nbytes > most:
            sample = self._state_keys.sample(self._random, _SAMPLED)
            unpinned = [key for key in sample if key not in self._holders]
            victim = min(unpinned or self.states.keys() - self._holders.keys(), key=self._loss)
            self.order.remove(victim)
            self._evict(victim)
        return True

    def _loss(self, key: bytes) -> float:
        """Tokens, for each byte of some states, that are expected to be computed again without them.

        A prompt that would go on from them goes on from the states before them. Text that goes on does so from the
        end more often than from elsewhere.
        """
        states = self.states[key]
        within = self.covering(states.parent, states.tokens)
        goes_on = within is not None and any(child in self.chunks for child in self.order.children(within))
        weight = 1 if goes_on else _WEIGHT_OF_ENDS
        return weight * self.order.rate(key) * self._tokens_since(states) / states.nbytes

    def _tokens_since(self, states: StoredStates) -> int:
        """Tokens between some states and those before them in the same text."""
        parent, tokens, at, since = states.parent, states.tokens, len(states.tokens) - 1, len(states.tokens)
        while True:
            before = [
                len(other.tokens)
                for other in self.states_after(parent, tokens[:HEAD_TOKENS])
                if len(other.tokens) <= at and common_length(other.tokens, tokens) == len(other.tokens)
            ]
            if before:
                return since - max(before)
            above = self.chunks.get(parent)
            if above is None:
                return since
            parent, tokens, at = above.parent, above.tokens, len(above.tokens)
            since += at

    def _evict(self, key: bytes) -> None:
        """Drop a record that is not in the order of eviction any more."""
        self.evictions += 1
        evicted = self._unlink(key)
        for tell in self._on_evict:
            tell(evicted)

    def insert(self, stored: Stored, reservation: "Reservation", *, pinned: bool = False) -> None:
        """Enter a record that room was reserved for."""
        reservation.release()
        self._stored += stored.nbytes
        if pinned:
            self._holders[stored.key] = {b""}
        above = stored.parent if stored.parent in self.chunks else None
        if isinstance(stored, StoredStates):
            self.states[stored.key] = stored
            self._state_keys.add(stored.key)
            self._state_bytes += stored.nbytes
            self.order.add(stored.key, above, pinned=pinned)
        else:
            self.chunks[stored.key] = stored
            self.order.add(stored.key, above if not stored.content_only else None, pinned=pinned)
        if (place := self._place(stored)) is not None:
            by_head, head = place
            there = by_head.setdefault(head, stored.key)
            if isinstance(there, dict):
                there[stored.key] = None
            elif there is not stored.key:
                by_head[head] = {there: None, stored.key: None}
        if isinstance(stored, StoredChunk):
            for tell in self._on_insert:
                tell(stored)

    # Pinning

    def pin(self, key: bytes, holder: bytes = b"") -> None:
        """Never evict a record until each of its holders has let go of it."""
        self.order.pin(key)
        self._holders.setdefault(key, set()).add(holder)

    def pin_all(self, keys: Collection[bytes], holder: bytes) -> bool:
        """Never evict some records until `holder` lets go of them; all, or none where one is not here."""
        with self._lock:
            if not all(key in self for key in keys):
                return False
            for key in keys:
                self.pin(key, holder)
        return True

    def unpin(self, key: bytes) -> None:
        """Let a record be evicted again, if it is still there, whoever holds it."""
        if self._holders.pop(key, None) is not None:
            self.order.unpin(key)

    def let_go(self, holder: bytes) -> None:
        """Unpin what nobody but this holder has pinned."""
        with self._lock:
            for key in [key for key, holders in self._holders.items() if holder in holders]:
                self._holders[key].remove(holder)
                if not self._holders[key]:
                    self.unpin(key)

    def pinned_bytes(self, holders: Iterable[bytes]) -> int:
        """Bytes of what some holders have pinned, each record counted once."""
        wanted = set(holders)
        with self._lock:
            found = [self.get(key) for key, by in self._holders.items() if not by.isdisjoint(wanted)]
            return sum(stored.nbytes for stored in found if stored is not None)

    def has_pinned(self, keys: Iterable[bytes]) -> bool:
        """Whether some of what is stored under these keys is pinned."""
        with self._lock:
            return any(key in self._holders for key in keys)

    def pinned_keys(self) -> set[bytes]:
        """Keys of all pinned records."""
        with self._lock:
            return set(self._holders)

    # Letting go

    def replace(self, old: StoredChunk, new: StoredChunk) -> None:
        """Remove a leaf in favor of a chunk that serves better and takes over its pin."""
        for holder in self._holders.get(old.key, ()):
            self.pin(new.key, holder)
        self.order.remove(old.key)
        self._unlink(old.key)

    def remove_tree(self, key: bytes) -> None:
        """Remove a record, if it is here, and all that continues it, pinned or not."""
        if key in self.order:
            for inner in self.order.remove_tree(key):
                self._unlink(inner)

    def release(self, reservation: "Reservation") -> None:
        """Give up a reservation; one from before `clear` has lapsed."""
        with self._lock:
            if reservation.generation == self.generation:
                self._reserved -= reservation.nbytes

    def _unlink(self, key: bytes) -> Stored:
        gone: Stored
        if key in self.states:
            gone = self.states.pop(key)
            self._state_keys.remove(key)
            del self._state_places[key]
            self._state_bytes -= gone.nbytes
        else:
            gone = self.chunks.pop(key)
        self._holders.pop(key, None)
        self._stored -= gone.nbytes
        if (place := self._place(gone)) is not None:
            by_head, head = place
            if isinstance(there := by_head[head], dict):
                del there[key]
            if not there or there == key:
                del by_head[head]
        if isinstance(gone, StoredChunk):
            for tell in self._on_remove:
                tell(gone)
        return gone

    def _place(self, stored: Stored) -> "tuple[ByHead, int] | None":
        """The index that a record is in, and its key there; None if it is found by its content only."""
        if isinstance(stored, StoredChunk) and stored.content_only:
            return None
        by_head = self._states_by_head if isinstance(stored, StoredStates) else self._chunks_by_head
        return by_head, int.from_bytes(prefix_key(stored.parent, stored.tokens[:HEAD_TOKENS])[:_SHORT])

    def check_consistency(self, *, complete: bool) -> None:
        """Assert that bytes, keys, parents and indexes are those of the records, naming what disagrees.

        It is `complete` without lower tiers that parents may be in.
        """
        records = list(self.records())
        assert self._state_bytes == sum(each.nbytes for each in self.states.values()), "states must be counted"
        assert self._stored == sum(each.nbytes for each in records), "bytes must be those of the records"
        assert self._stored <= self.nbytes <= self.max_bytes, "bytes must be within the budget"
        for each in records:
            assert each.loaded is not None, "records must be loaded"
            assert each.nbytes == each.loaded.nbytes + each.tokens.nbytes, "a record must have the size it claims"
        order = dict(self.order.parents())
        assert set(order) == {each.key for each in records}, "the order of eviction must hold all records"
        pinned = {key for key in order if self.order.is_pinned(key)}
        assert set(self._holders) == pinned, "just the pinned records must have holders"
        assert all(self._holders.values()), "a pinned record must have a holder"
        for each in records:
            assert order[each.key] in (None, each.parent), "the order of eviction must know parents"
        keys = [*self.chunks, *self.states]
        assert keys == [each.key for each in records], "a record must be under its own key"
        if complete and not self.order.by_content:  # else an ancestor may be evicted first
            reached = {key for key, chunk in self.chunks.items() if not chunk.content_only}
            parents = [each for each in records if self._place(each) is not None]
            assert all(each.parent in reached or each.parent == each.root for each in parents), "parents must be here"
        indexed = [*_indexed(self._chunks_by_head), *_indexed(self._states_by_head)]
        placed = [(place[1], each.key) for each in records if (place := self._place(each)) is not None]
        assert sorted(indexed) == sorted(placed), "indexes must hold the records that are found by prefix key"


# Keys of the records that begin alike behind the same parent, by a short form of the key of both: the oldest first, or
# the one that there is. Half a dict for each would take more than all else that is known of a chunk.
ByHead = dict[int, bytes | dict[bytes, None]]


def _newest(by_head: ByHead, parent: bytes, head: Tokens) -> list[bytes]:
    """Keys of the records that begin alike, and of a collision, newest first; not more than are compared."""
    found = by_head.get(int.from_bytes(prefix_key(parent, head)[:_SHORT]))
    if not isinstance(found, dict):
        return [found] if found is not None else []
    return list(islice(reversed(found), _MAX_SIBLINGS))


def _indexed(by_head: ByHead) -> Iterator[tuple[int, bytes]]:
    for head, keys in by_head.items():
        yield from ((head, key) for key in (keys if isinstance(keys, dict) else (keys,)))


def _name_of(chunks: Mapping[bytes, StoredChunk], key: bytes) -> bytes:
    """The name of a record: computed again behind something else a chunk has another key, and is as popular."""
    chunk = chunks.get(key)
    return content_only_key(chunk.root, b"", 0, chunk.tokens) if chunk is not None else key


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Bytes of host memory promised to a record that is being copied; ends with `insert` or `release`."""

    memory: HostMemory
    nbytes: int
    generation: int

    @property
    def lapsed(self) -> bool:
        """Whether the memory was cleared since."""
        return self.generation != self.memory.generation

    def release(self) -> None:
        """Give the bytes back."""
        self.memory.release(self)


DEVICE = "device"  # the name of the tier


class DeviceMemory:
    """Chunks in the memory of accelerators, within a byte budget; those that were not used for longest go first.

    What it holds is in host memory or below, too, or was; nothing is ever lost with it. With a budget of 0 it holds
    nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = forks.lock()
        self._copies: OrderedDict[bytes, LayerKV] = OrderedDict()
        self._used = 0

    def get(self, key: bytes) -> LayerKV | None:
        """A chunk's K/V, or None."""
        with self._lock:
            found = self._copies.get(key)
            if found is not None:
                self._copies.move_to_end(key)
        return found

    def put(self, key: bytes, kv: LayerKV) -> None:
        """Copy a chunk's K/V to where the model computes, unless it is there or too large."""
        if kv.nbytes > self.max_bytes or self.get(key) is not None:
            return
        copied = kv.promoted()
        with self._lock:
            while self._used + copied.nbytes > self.max_bytes:
                _, gone = self._copies.popitem(last=False)
                self._used -= gone.nbytes
            if key not in self._copies:
                self._copies[key] = copied
                self._used += copied.nbytes

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._copies.clear()
            self._used = 0

    def stats(self) -> dict[str, int]:
        """`chunks`, `bytes` and `max_bytes`."""
        return {"chunks": len(self._copies), "bytes": self._used, "max_bytes": self.max_bytes}

    def check_consistency(self) -> None:
        """Raise AssertionError if bytes are not those of the copies, or beyond the budget."""
        with self._lock:
            nbytes = sum(kv.nbytes for kv in self._copies.values())
            assert nbytes == self._used <= self.max_bytes, "bytes on devices must be those of the copies"
