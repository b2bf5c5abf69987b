"""The records of one store across its tiers: host memory, devices, and lower tiers."""

import logging
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

from kvboost_hf import forks
from kvboost_hf.cache.kv import Stored, StoredChunk, StoredStates, with_descendants
from kvboost_hf.cache.kv.model_form import BlobReader
from kvboost_hf.cache.planning.chunks import (
    HEAD_TOKENS,
    KEY_BYTES,
    Chunker,
    Tokens,
    begin_beside,
    common_length,
    prefix_key,
)
from kvboost_hf.cache.planning.content_index import ContentIndex
from kvboost_hf.cache.planning.plan import Border, ChunkIndex, RowPlan
from kvboost_hf.cache.store.history import Audits, History, Payback
from kvboost_hf.cache.store.insertion import ContentIndexes, Insertion, StoredText
from kvboost_hf.cache.store.lower import LowerMemory, RowToServe, TieredView
from kvboost_hf.cache.store.memory import DEVICE, DeviceMemory, HostMemory
from kvboost_hf.cache.store.settings import hand_over
from kvboost_hf.cache.tiers.base import Entry, MadeWith
from kvboost_hf.cache.tiers.below import LowerTiers
from kvboost_hf.cache.tiers.record import DamagedBlobError, read_entry
from kvboost_hf.errors import StoreClosedError

_log = logging.getLogger(__name__)

S = TypeVar("S", bound=Stored)
_KEY = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")
_KEYS_AT_ONCE = 2000  # in a notice
_MAX_INBOX = 65_536  # notices
_MOST_VIEWS = 16  # of prompts that may go on in pieces


class Unsettled(Protocol):
    """K/V of a prompt that is not stored yet."""

    def settle_here(self) -> None:
        """Store it, unless another thread may still be computing."""

    def wait_for(self, root: bytes, ids: Tokens) -> None:
        """Wait for another thread that is about to store a prompt which begins as `ids` [batch, columns] do."""


class TieredRecords:
    """Moves records between host memory, devices and lower tiers, and keeps the indexes in step with them.

    None of its parts refers to the store, which must go as soon as nobody holds it.
    """

    def __init__(
        self,
        ram_bytes: int,
        state_share: float,
        device_bytes: int,
        tiers: LowerTiers,
        model_name: bytes,
        reader: BlobReader,
        payback: Payback,
        chunker: Chunker,
    ) -> None:
        self._chunker = chunker
        self.lock = forks.rlock(torn=self._forget_torn)
        self.payback, self.history = payback, History()
        self.contents = ContentIndexes(self.lock, lambda: memory.chunks.values())
        self.text = StoredText(self.history.salt_of)
        self._watchers: list[Callable[[Iterable[bytes] | None], None]] = []
        self.lower = LowerMemory(tiers, model_name, reader, self.lock, self.contents.add_below, self._watchers)
        self.has_lower = bool(tiers)
        self.device = DeviceMemory(device_bytes)
        self.memory = HostMemory(
            ram_bytes,
            self.lock,
            state_share=state_share,
            on_insert=(self.history.note_stored, self.text.add, self.contents.add),
            on_remove=(self.contents.remove, self.text.remove),
            on_evict=(self.history.note_evicted, self.lower.keep_evicted),
        )
        memory = weakref.proxy(self.memory)  # which tells the indexes what it takes, and is freed with the store
        self.is_open = True
        self._unsettled: weakref.WeakSet[Unsettled] = weakref.WeakSet()
        self._hearing, self._inbox = forks.lock(), deque[dict[str, Any]](maxlen=_MAX_INBOX)
        self._removals = 0  # by others
        self._views: deque[TieredView] = deque(maxlen=_MOST_VIEWS)  # since records were removed last
        self.counts = dict.fromkeys(("hits", "misses", "rejected", "quarantined", "not_worth_loading"), 0)
        self.insertion = Insertion(
            self.lock,
            self.memory,
            self.lower,
            self.contents,
            self.payback,
            self.counts,
            require_open=self.require_open,
            bring_back=self._bring_back,
            on_torn=self._forget_torn,
        )

    # Watching

    def watch(self, changed: Callable[[Iterable[bytes] | None], None]) -> None:
        """Have `changed` called with the keys of chunks that come, go or move, or with None when all have gone.

        It is called with the lock held, and must not wait; `is_in_memory` and `holds` tell what has become of them.
        """
        with self.lock:
            self._watchers.append(changed)
            self.memory.watch(lambda chunk: changed((chunk.key,)))

    # Finding

    def wait_for_others(self, root: bytes, ids: Tokens) -> None:
        """Wait for other threads that are about to store a prompt which begins as `ids` [batch, columns] do."""
        with self.lock:
            unsettled = list(self._unsettled)
        for each in unsettled:
            each.wait_for(root, ids)

    def view(
        self,
        root: bytes,
        tokens: Tokens,
        border: Border | None = None,
        *,
        stateful: bool = False,
        without: frozenset[bytes] = frozenset(),
        is_piece: bool = False,
    ) -> ChunkIndex:
        """The chunks and states that a row can find by their keys, in whatever tier, `without` those under some keys.

        It is to be served from a `border`, or its beginning. A `is_piece` row goes on behind what a cache holds: if
        more of it was looked up within a second, it finds what lower tiers had then, and what host memory has now.
        """
        if not (self.has_lower and self.lower.keeps(root)):
            return self.memory
        self.hear()
        row = RowToServe(root, tokens, border or Border(0, root), self._chunker, stateful)
        if is_piece and not without:
            for known in reversed(tuple(self._views)):
                if known.holds_for(row):
                    return known
        view = TieredView(self.memory, self.lower.tiers, row, without)
        if not is_piece and not without:
            self._views.append(view)
        return view

    def chain(self, root: bytes, tokens: Tokens) -> list[tuple[StoredChunk, int, int]]:
        """Every chunk that may serve a row: with the row token that it starts at, and how many tokens it shares."""
        found: list[tuple[StoredChunk, int, int]] = []
        index = self.view(root, tokens)
        key, at = root, 0
        while at < len(tokens):
            rest = tokens[at:]
            siblings = index.siblings(key, rest[:HEAD_TOKENS]) if len(rest) >= HEAD_TOKENS else ()
            loaded = self.fetch(chunk for chunk in siblings if isinstance(chunk, StoredChunk))
            found += [(chunk, at, common_length(chunk.tokens, rest)) for chunk in loaded.values()]
            cut = self._chunker.next_cut(tokens, at)
            if cut is None:
                break
            key, at = prefix_key(key, tokens[at:cut]), cut
        return found

    def moved_index(self, root: bytes) -> ContentIndex[StoredChunk]:
        """The chunks under `root` by their content, for `match.find_moved`; follows what is stored from then on.

        Chunks that other processes have stored in lower tiers appear within seconds.
        """
        if self.has_lower:
            self.lower.list_content(root)
        return self.contents.of(root)

    def worth(self, plan: RowPlan) -> RowPlan:
        """The plan without what would take longer to load than to compute."""
        if not self.has_lower:
            return plan
        trimmed = self.payback.worth_loading(plan)
        with self.lock:
            self.counts["not_worth_loading"] += plan.hit - trimmed.hit
        return trimmed

    def fetch(self, wanted: Iterable[S], *, check: bool = True) -> dict[bytes, S]:
        """Load records that are in lower tiers only; `check` all of each now, rather than as it is read.

        Returns by key what is loaded now. What is missing was lost, and will not be found again.
        """
        fetched: dict[bytes, S] = {}
        below: dict[bytes, S] = {}
        for each in wanted:
            if self.device.max_bytes and isinstance(each, StoredChunk):
                if (near := self.device.get(each.key)) is not None:
                    fetched[each.key] = replace(each, loaded=near, tier=DEVICE)
                    continue
            (below if each.loaded is None else fetched).setdefault(each.key, each)
        if not below:
            return fetched
        for each, loaded in zip(below.values(), self.lower.load(below.values(), check=check), strict=True):
            if loaded is None or isinstance(loaded, DamagedBlobError):
                self.lose(each, loaded)
            else:
                fetched[each.key] = loaded
        return fetched

    def lose(self, stored: Stored, error: DamagedBlobError | None = None) -> None:
        """Give up a record that was found in a lower tier: its blob is not there, or not what was written there."""
        self.lower.give_up(stored, error)
        self._views.clear()
        with self.lock:
            self.contents.drop_below([stored.key])

    def held(self, roots: Collection[bytes] | None = None) -> list[Stored]:
        """All records in host memory, or those under some roots."""
        with self.lock:
            return [each for each in self.memory.records() if roots is None or each.root in roots]

    def entries(self) -> Iterator[Entry]:
        """Entries of all blobs in lower tiers, of other models, weights, salts and codecs, too."""
        return (found.entry for found in self.lower.tiers.entries())

    def made_with(self, key: bytes) -> MadeWith | None:
        """What the K/V under a key in a lower tier was made with, by its blob; None where that is not known."""
        for found in self.lower.tiers.find([key]).values():
            blob = found.tier.tier.read(key)
            with suppress(DamagedBlobError):
                return read_entry(blob).made_with if blob is not None else None
        return None

    def everything(self) -> list[Stored]:
        """All records under the roots that this store knows, in any tier; loaded or not."""
        self.lower.tiers.flush()
        found = {each.key: each for each in self.held()}
        for each in [each for root in self.lower.roots for each in self.lower.records(root)]:
            found.setdefault(each.key, each)
        return list(found.values())

    def unkept(self) -> list[Stored]:
        """Write what only host memory holds to the lower tiers; returns what these have not, or not any more."""
        self.hand_over(inf, self.hear)
        due = [each for each in self.held() if self.lower.may_write(each)]
        kept = self.lower.tiers.find([each.key for each in due])
        return [each for each in due if each.key not in kept]

    # Using

    def record_use(
        self, chunks: Sequence[StoredChunk], *, missed: bool, states: StoredStates | None = None, moved: bool = False
    ) -> None:
        """Count what served a prompt, whether any of it was moved, and whether a look-up failed after it."""
        used: list[Stored] = [*chunks, *([states] if states is not None else [])]
        with self.lock:
            here = [each.key for each in used if each.key in self.memory.chunks or each.key in self.memory.states]
            if here or moved or self.memory.order.passed:  # else a prompt changes nothing
                self.memory.use(here, by_content=moved)
            self.counts["hits"] += len(chunks)
            self.counts["misses"] += missed
            if chunks and self.payback.pays_for is not None:
                self.payback.note_served(sum(chunk.length for chunk in chunks))
        if self.has_lower and (durable := [each.key for each in used if self.lower.keeps(each.root)]):
            self.lower.tiers.touch(durable)

    def promote(self, used: Sequence[Stored]) -> None:
        """Let records that have served come nearer: to the device, and from lower tiers to host memory, in a while.

        It takes time that a forward under way has more use for.
        """
        right = [each for each in used if each.loaded is not None and each.key not in self.insertion.offences]
        if self.device.max_bytes:
            for each in right:
                if isinstance(each, StoredChunk) and each.tier != DEVICE:
                    with suppress(DamagedBlobError):  # whoever reads it next finds out
                        self.device.put(each.key, each.kv)
        if below := [each for each in right if each.found is not None]:
            self.lower.note_known([each.key for each in below])
            self.lower.tiers.run(partial(self._take_all_back, below, self._age))

    @property
    def _age(self) -> tuple[int, int]:
        """Another one after records were removed that may be on their way to host memory."""
        return self.memory.generation, self._removals

    def _take_all_back(self, records: Sequence[Stored], age: tuple[int, int]) -> None:
        for each in records:
            self._take_back(each, age)

    def _bring_back(self, chunk: StoredChunk) -> None:
        """Take a chunk into host memory that is in a lower tier only."""
        for loaded in self.fetch([chunk]).values():
            self._take_back(loaded, self._age)

    def _take_back(self, stored: Stored, age: tuple[int, int]) -> None:
        """Take a record into host memory that was loaded from a lower tier."""
        try:
            held = stored.loaded.owned() if stored.loaded is not None else None
        except DamagedBlobError as error:
            return self.lose(stored, error)
        with self.lock:
            if held is None or stored.key in self.memory or not self.is_open or stored.key in self.insertion.offences:
                return None
            if age == self._age:
                reserved = self.memory.reserve(stored.nbytes, keep=stored.parent)
                if reserved is not None:
                    self.insertion.insert(stored.in_memory(held), reserved)
                    self.lower.write(stored)
        return None

    # Taking in

    def holds(self, key: bytes) -> bool:
        """Whether the record under a key is in host memory, or known to be below."""
        with self.lock:
            return key in self.memory or key in self.lower

    def expects(self, key: bytes) -> bool:
        """Whether a chunk that nobody asked to store is to be: where storing has not paid, one that comes again.

        What serves a prompt pays for what was stored before.
        """
        with self.lock:
            return self.text.is_used or key in self.memory.chunks or self.payback.admits(key)

    # Pinning, and letting go

    def settles_first(self, unsettled: Unsettled) -> None:
        """Have it stored before everything is written to the lower tiers, or dropped."""
        with self.lock:
            self._unsettled.add(unsettled)

    def settle(self) -> None:
        """Store what is not stored yet."""
        with self.lock:
            unsettled = list(self._unsettled)
        for each in unsettled:
            each.settle_here()

    def quarantine(self, keys: Iterable[bytes]) -> None:
        """Take chunks and states out of service in every tier, and all that continues them.

        What comes again is taken again, for memory may have failed; what is quarantined a second time is refused from
        then on, until `clear()`.
        """
        doomed = set(keys)
        self.lower.tiers.flush()  # what was on its way to host memory is there
        below = self.lower.tiers.find(list(doomed))
        roots = {found.entry.root for found in below.values()}
        roots |= {each.root for key in doomed if (each := self.memory.get(key)) is not None}
        entries = [each for root in roots for each in self.lower.records(root)]
        with self.lock:
            for key in doomed:
                if key in self.memory or key in below:
                    self.insertion.offences[key] = self.insertion.offences.get(key, 0) + 1
                    self.counts["quarantined"] += 1
            everything = with_descendants(doomed, [*entries, *self.memory.records()])
            self.take_out(everything)
        self.lower.tiers.flush()
        self._tell_removed(everything)

    def remove(
        self, roots: Collection[bytes], choose: Callable[[Collection[Stored]], Collection[bytes]]
    ) -> dict[str, int]:
        """Remove records from every tier, pinned or not, and wait until all tiers have done so; returns bytes by tier.

        `choose` is given all records under the roots, and returns the keys of those to remove.
        """
        self.lower.tiers.flush()  # what was on its way to host memory is there
        below = [each for root in roots for each in self.lower.records_by_tier(root)]
        with self.lock:
            here = self.held(roots)
            doomed = choose([*here, *(stored for _, stored, _ in below)])
            self.take_out(doomed)
        self.lower.tiers.flush()
        self._tell_removed(doomed)
        freed: Counter[str] = Counter()
        for name, stored, nbytes in [*(("ram", each, each.nbytes) for each in here), *below]:
            if stored.key in doomed:
                freed[name] += nbytes
        return dict(freed)

    def roots_beside(self, roots: Collection[bytes]) -> frozenset[bytes]:
        """The roots under which anything is that others than the model, such as heads, have computed of texts."""
        self.lower.tiers.flush()
        begins = tuple(map(begin_beside, roots))
        here = {each.root for each in self.held() if each.root.startswith(begins)}
        return frozenset(here.union(*({each.root for _, each, _ in self.lower.records_by_tier(at)} for at in begins)))

    def discard(self, keys: Collection[bytes]) -> None:
        """Remove records from host memory and devices, pinned or not, and soon from lower tiers."""
        with self.lock:
            self._removals += 1
            self.take_out(keys)

    def take_out(self, keys: Collection[bytes]) -> None:
        """Remove records from every tier, pinned or not; in lower tiers soon. Whoever calls it holds the lock."""
        self._views.clear()
        for key in keys:
            self.memory.remove_tree(key)
        self.contents.drop_below(keys)
        self.device.clear()
        self.lower.delete(keys)

    # What others who share a tier do

    def _tell_removed(self, keys: Collection[bytes]) -> None:
        listed = [key.hex() for key in keys]
        for at in range(0, len(listed) if self.has_lower else 0, _KEYS_AT_ONCE):
            self.lower.tiers.announce({"kind": "removed", "keys": listed[at : at + _KEYS_AT_ONCE]})

    def announce(self, notice: Mapping[str, Any], *, soon: bool = False) -> None:
        """Have all who share a tier hear a notice, before returning or `soon`; its `kind` is none of ours."""
        if self.has_lower and soon:
            self.lower.tiers.run(lambda: self.lower.tiers.announce(notice))
        elif self.has_lower:
            self.lower.tiers.announce(notice)

    def hear(self, *, take: bool = False) -> list[dict[str, Any]]:
        """Take out of host memory and devices what others who share a tier have removed.

        With `take`, return the notices of other kinds that were heard since the last time, in their order.
        """
        if not self.has_lower:
            return []
        with self._hearing:
            notices, complete = self.lower.tiers.hear()
            if not complete:
                _log.warning("Notices of other processes were missed: what is in host memory is not used any more.")
                self.clear()
            for notice in notices:
                try:
                    self._heed(notice)
                except Exception:
                    _log.exception("A notice of another process failed: what is in host memory is not used any more.")
                    self.clear()
            return [self._inbox.popleft() for _ in range(len(self._inbox))] if take else []

    def _heed(self, notice: dict[str, Any]) -> None:
        match notice:
            case {"kind": "cleared", "model": model}:
                if model == self.lower.model_name.hex():
                    self.clear()
            case {"kind": "removed", "keys": list(keys)}:
                found = [bytes.fromhex(key) for key in keys if isinstance(key, str) and _KEY.fullmatch(key)]
                with self.lock:
                    # What was on its way to the tiers is deleted there once more.
                    self.discard([key for key in found if key in self.memory])
                    self.contents.drop_below(found)
                    self.lower.forget(found)
            case _:
                self._inbox.append(notice)

    def hand_over(self, until: float, hear: Callable[[], object]) -> int:
        """Write what only host memory holds to the lower tiers; returns its bytes."""
        self.lower.tiers.flush()
        return hand_over(self.memory, self.lower, self.lock, until, hear) if self.has_lower and self.is_open else 0

    def drop(self, roots: set[bytes]) -> None:
        """Forget what host memory holds under these roots, pinned or not."""
        with self.lock:
            for each in [each for each in self.memory.records() if each.root in roots]:
                self.memory.remove_tree(each.key)

    def clear(self) -> None:
        """Forget all records; the lower tiers keep what they have."""
        with self.lock:
            for part in (self.memory, self.contents, self.text, self.payback, self.history, self.device):
                part.clear()
            self.lower.forget_all()
            self._views.clear()
            self.insertion.offences.clear()
            for changed in self._watchers:
                changed(None)

    def _forget_torn(self) -> None:
        """Keep nothing of what is in memory, after a fork or an exception in the middle of a change."""
        try:
            self.clear()
        except Exception:  # whatever a half changed book leads to
            _log.exception("A ChunkStore was left in the middle of a change, and cannot be used in this process.")
            self.is_open = False

    def close(self) -> None:
        """Forget all records, and take no more in."""
        with self.lock:
            self.clear()
            self.is_open = False

    def require_open(self) -> None:
        """Raise StoreClosedError after `close`."""
        if not self.is_open:
            raise StoreClosedError(
                "This ChunkStore was closed. Make a new one and pass it: ChunkReuseCache(model, ChunkStore(model)) or "
                "attach(model, ChunkStore(model)). To generate without reuse, call detach(model)."
            )

    # Books

    def places(self) -> dict[str, str]:
        """Where each lower tier is, for people, by its name."""
        return {tier.tier.name: tier.tier.location for tier in self.lower.tiers.tiers}

    def stats(self, audits: Audits, codec: str) -> dict[str, Any]:
        """Counts and bytes by tier, as `ChunkStore.stats()` returns them."""
        memory, device, lower = self.memory, self.device, self.lower
        below = lower.tiers.stats()  # a tier that takes long to answer keeps nobody from the store
        with self.lock:
            chunks = memory.chunks.values()
            ram = {"chunks": len(chunks), "bytes": memory.nbytes, "max_bytes": memory.max_bytes}
            near = {**({DEVICE: device.stats()} if device.max_bytes else {}), "ram": ram}
            return {
                **ram,
                "pinned_chunks": len(memory.pinned_keys()),
                "content_only": sum(chunk.content_only for chunk in chunks),
                "states": len(memory.states),
                "tokens": sum(chunk.length for chunk in chunks),
                "ngram_bytes": self.text.nbytes,
                **self.counts,
                "evictions": memory.evictions,
                "audits": audits.count,
                "divergences": audits.divergences,
                "loaded": lower.loaded,
                "lost": lower.lost,
                "codec": codec,
                "seconds_per_token": self.payback.seconds_per_token if self.has_lower else None,
                "tiers": {**near, **below},
            }

    def check_consistency(self) -> None:
        """Assert that bytes, keys, parents, pins and indexes are those of the records, naming what disagrees."""
        with self.lock:
            chunks = self.memory.chunks.values()
            self.memory.check_consistency(complete=not self.has_lower)
            self.contents.check_consistency(chunks)
            self.text.check_consistency(chunks)
            self.device.check_consistency()
