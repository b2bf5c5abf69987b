"""`ChunkStore`: K/V of chunks that outlives any one cache or call."""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvboost_hf.cache.codecs import make_codec
from kvboost_hf.cache.codecs.base import Codec
from kvboost_hf.cache.identity.fingerprint import model_name
from kvboost_hf.cache.identity.model_state import ModelState
from kvboost_hf.cache.planning.chunks import (
    KEY_BYTES,
    Chunker,
    FixedChunker,
    Tokens,
    common_length,
    content_only_key,
    prefix_key,
    states_key,
)
from kvboost_hf.cache.planning.content_index import ContentIndex
from kvboost_hf.cache.planning.match import MIN_MOVED_TOKENS
from kvboost_hf.cache.planning.plan import HEAD_TOKENS, Border, ChunkIndex, RowPlan, Segment, trim_row
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.store.admission import Admission
from kvboost_hf.cache.store.audits import Audits
from kvboost_hf.cache.store.blob_reader import BlobReader
from kvboost_hf.cache.store.compute_pace import ComputePace
from kvboost_hf.cache.store.content import ContentIndexes
from kvboost_hf.cache.store.costs import stored_per_computed
from kvboost_hf.cache.store.device import DeviceMemory
from kvboost_hf.cache.store.history import History
from kvboost_hf.cache.store.integrity import IntegrityReport, check_integrity
from kvboost_hf.cache.store.kv import ColumnFormat, LayerKV, LayerStates
from kvboost_hf.cache.store.lower import LowerMemory
from kvboost_hf.cache.store.memory import HostMemory, Reservation
from kvboost_hf.cache.store.records import Put, StoreContents, Stored, StoredChunk, StoredStates
from kvboost_hf.cache.store.roots import Roots
from kvboost_hf.cache.store.text import StoredText
from kvboost_hf.cache.store.view import Row, TieredView
from kvboost_hf.cache.tiers.addresses import open_tiers
from kvboost_hf.cache.tiers.base import Entry, Tier
from kvboost_hf.cache.tiers.below import LowerTiers
from kvboost_hf.cache.tiers.record import DamagedBlobError
from kvboost_hf.compat import KeptOnModel, bytes_per_token, known_reason, require_cache, unwrapped
from kvboost_hf.config import KVQuantConfig, ReusePolicy, require_size
from kvboost_hf.errors import StoreClosedError
from kvboost_hf.ngrams import MAX_NGRAM

__all__ = ["ChunkStore", "Put", "StoredChunk", "StoredStates", "salt_bytes"]

S = TypeVar("S", bound=Stored)

Texts = str | Sequence[int] | torch.Tensor  # a text, or its token ids


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """The keyword arguments of `ChunkStore.warm`."""

    tokenizer: Any
    pin: bool
    policy: ReusePolicy | None
    salt: bytes
    progress: Callable[[int, int], None] | None  # given the tokens that are done, and all of them
    live_quant: KVQuantConfig | None


Warmer = Callable[
    [PreTrainedModel, "ChunkStore", Texts | None, Sequence[Texts] | None, Texts | None, WarmSettings], ReuseReport
]
_warmer: Warmer | None = None


def register_warmer(warmer: Warmer) -> None:
    """Set what `ChunkStore.warm` calls: it runs the model with caches, which are built on the store."""
    global _warmer
    _warmer = warmer


class ChunkStore:
    """K/V of chunks, in host memory within a byte budget, and in the tiers below it.

    One store may serve many caches and threads; `with` closes it. What it holds is found by prefix key (tokens,
    positions and history all the same) and by content (tokens the same), never by another model, other weights or
    another salt.

    Args:
        model: The model whose K/V is stored. Held weakly.
        chunk_size: Tokens per chunk, a positive multiple of 16. With a `chunker`, that one's, or left out.
        chunker: Cuts prompts into chunks, such as a `ContentChunker`; None cuts at multiples of `chunk_size`.
        max_bytes: Budget for all tensors in host memory, never exceeded: bytes, or text such as `"2GB"`; None for
            that of `tiers`, or 4 GiB. The chunks that are asked for least often, of those that nothing continues, go
            first.
        tiers: Where chunks live, as addresses or `Tier` objects, the nearest first: `"ram:4GB"`,
            `"disk:~/.cache/kvboost_hf:50GB"`, `"redis://host:6379"`, and any fsspec URL. Host memory is always one of
            them. What is stored is written to all of them, and outlives the process on all others.
        tier_key: 32 bytes or more: blobs below host memory carry a seal that only whoever has this key can make, and
            what does not have it is never used. All who share a tier need the same key. None for no seals.
        codec: How K/V is kept, in all tiers: `"raw"`, `"int8"`, `"int4"`, `"turboquant"`, `"turboquant:3.5"`, a
            `KVQuantConfig`, or the codec of another store. All but `"raw"` are lossy: what is reused is no longer
            exactly what was computed.
        salt: Separates those who must not see each other's prompts, not even by timing.

    Raises:
        ValueError: for a bad `chunk_size`, or another one than its chunker's, a budget smaller than one chunk, an
            unknown tier or codec, a `tier_key` that is too short, or a model that cannot be served (encoder-decoder,
            on the meta device, no `PreTrainedModel`).

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> store = ChunkStore(model, max_bytes=64 * 2**20)
        >>> store.stats()["chunks"]
        0
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk_size: int | None = None,
        chunker: Chunker | None = None,
        max_bytes: int | str | None = None,
        salt: str | bytes = b"",
        tiers: Sequence[str | Tier] = (),
        tier_key: bytes | None = None,
        codec: str | KVQuantConfig | Codec | None = None,
    ) -> None:
        model = unwrapped(model)
        require_cache(model)
        self.chunker = _checked_chunker(chunker, chunk_size)
        self.salt = salt_bytes(salt)
        self.codec = make_codec(codec)
        ram = None if max_bytes is None else require_size("max_bytes", max_bytes, least=1)
        least = _chunk_bytes(model, self.chunker.chunk_size, self.codec)
        if ram is not None and ram < least:
            raise ValueError(
                f"`max_bytes` must hold at least one chunk, which is {least} bytes ({self.chunker.chunk_size} tokens "
                f"of {bytes_per_token(model)} bytes of K/V), got {ram}. Raise it, or lower `chunk_size`."
            )
        opened = open_tiers(tiers, ram, tier_key, least_bytes=least)
        self._model = weakref.ref(model)
        require_model = partial(_require_model, self._model)
        self._lock = threading.RLock()
        self._closed = False
        self._counts = dict.fromkeys(("hits", "misses", "rejected", "quarantined", "not_worth_loading"), 0)
        self._offences: dict[bytes, int] = {}  # keys that were quarantined, and how often
        self._history, self._audits = History(), Audits()
        self._contents = ContentIndexes(self._lock)
        self._text = StoredText(self._history.salt_of)
        self._reader = BlobReader(require_model, self.codec)
        tiers_below = LowerTiers(opened.lower, opened.opened)
        name = model_name(model) if opened.lower else b""  # nobody else asks for it
        self._lower = LowerMemory(tiers_below, name, self._reader, self._lock, self._contents.add_below)
        # What other processes may ask for is always stored.
        self._admission = Admission(stored_per_computed(model) if not opened.lower else None)
        # None of these refers to the store, which must go as soon as nobody holds it.
        followers = _Followers(self._contents, self._text, self._history, self._lower)
        self._memory = HostMemory(
            opened.ram,
            self._lock,
            on_insert=followers.inserted,
            on_remove=followers.removed,
            on_evict=followers.evicted,
        )
        self._device = DeviceMemory(opened.device)
        self._roots = Roots(self.codec.name, self._history, self._lower)
        if self._lower:  # now, for it takes a moment
            ComputePace.of(model).seconds_per_token(model)
            self._reader.look_at_model()
        self._close_tiers = weakref.finalize(self, tiers_below.close)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A ChunkStore can be neither pickled nor copied: it belongs to a model in this process. Make a new one, "
            "which finds what this one keeps in tiers on disk and on servers."
        )

    # Roots

    def root(self, salt: bytes, regime: bytes = b"", *, read_all: bool = False) -> bytes | None:
        """The key that all chains of the model, as it is now, start from; None while a part of it is in training.

        Args:
            salt: Whose prompts they are.
            regime: Of the rotary frequencies, see `compat.rope_regime`.
            read_all: Read every weight to tell whether one has changed.
        """
        self._require_open()
        with self._lock:
            return self._roots.root(self._require_model(), salt, regime, read_all=read_all)

    def salt_of(self, root: bytes) -> bytes | None:
        """The salt behind a root, as far as it is remembered."""
        return self._history.salt_of(root)

    def root_under(self, key: bytes) -> bytes:
        """The root of a chunk or of states in host memory."""
        stored = self._memory.get(key)
        assert stored is not None
        return stored.root

    def without_room(self) -> "ChunkStore":
        """A store with the same roots that takes no chunks in: its caches compute, and keep, all columns."""
        store = ChunkStore(self._require_model(), chunker=_Uncut(), max_bytes=2**62)
        store._roots = self._roots
        return store

    # Finding

    def view(self, root: bytes, row: Row, without: frozenset[bytes] = frozenset()) -> ChunkIndex:
        """The chunks and states that a row can find by prefix key, in whatever tier.

        Args:
            root: Of the row.
            row: The row.
            without: Keys of records in lower tiers that are not to be found.
        """
        return TieredView(self._memory, self._lower.tiers, row, without) if self._lower.keeps(root) else self._memory

    def moved_index(self, root: bytes) -> ContentIndex[StoredChunk]:
        """The chunks under `root` by their content, for `match.find_moved`; follows what is stored from then on.

        Chunks that other processes have stored in lower tiers appear within seconds.
        """
        self._lower.list_content(root)
        return self._contents.of(root)

    def fetch(self, wanted: Iterable[S], *, check: bool = True) -> dict[bytes, S]:
        """Load records that are in lower tiers only.

        Args:
            wanted: Records, loaded or not.
            check: Whether all of each is to be compared with its checksums now, rather than as it is read.

        Returns:
            By key, what is loaded now. What is missing was lost, and will not be found again.
        """
        fetched: dict[bytes, S] = {}
        for each in wanted:
            if each.key not in fetched and (loaded := self._fetch(each, check)) is not None:
                fetched[each.key] = loaded
        return fetched

    def _fetch(self, stored: S, check: bool) -> S | None:
        if isinstance(stored, StoredChunk) and (near := self._device.get(stored.key)) is not None:
            return replace(stored, loaded=near, on_device=True)
        if stored.loaded is not None:
            return stored
        try:
            loaded = self._lower.load(stored, check=check)
        except DamagedBlobError as error:
            self.lose(stored, error)
            return None
        if loaded is None:
            self.lose(stored)
        return loaded

    def lose(self, stored: Stored, error: DamagedBlobError | None = None) -> None:
        """Give up a record that was found in a lower tier: its blob is not there, or not what was written there."""
        self._lower.give_up(stored, error)
        with self._lock:
            self._contents.drop_below([stored.key])

    def everything(self) -> list[Stored]:
        """All records under the roots that this store knows, in any tier; loaded or not."""
        self.flush()
        with self._lock:
            found = {each.key: each for each in self._memory.records()}
        for each in self._lower.all_records():
            found.setdefault(each.key, each)
        return list(found.values())

    def entries_below(self) -> Iterator[Entry]:
        """Entries of all blobs in lower tiers, of other models, weights, salts and codecs, too."""
        return (found.entry for found in self._lower.tiers.entries())

    @property
    def column_format(self) -> ColumnFormat:
        """How columns are kept."""
        return self._reader.column_format

    def worth(self, plan: RowPlan) -> RowPlan:
        """The plan without what would take longer to load than to compute."""
        if all(segment.chunk.found is None for segment in plan.segments if isinstance(segment.chunk, StoredChunk)):
            return plan
        model = self._require_model()
        per_token = ComputePace.of(model).seconds_per_token(model)

        def saving(segment: Segment) -> float:
            assert isinstance(segment.chunk, StoredChunk)
            found, computing = segment.chunk.found, (segment.stop - segment.start) * per_token
            return computing - (found.tier.seconds_to_read(found.entry.nbytes) if found is not None else 0.0)

        trimmed = trim_row(plan, saving)
        with self._lock:
            self._counts["not_worth_loading"] += plan.hit - trimmed.hit
        return trimmed

    def chain(self, root: bytes, tokens: Tokens) -> list[tuple[StoredChunk, int, int]]:
        """Every chunk that may serve a row: with the row token that it starts at, and how many tokens it shares."""
        found: list[tuple[StoredChunk, int, int]] = []
        index = self.view(root, Row(tokens, Border(0, root), self.chunker, stateful=False))
        key, at = root, 0
        while at < len(tokens):
            rest = tokens[at:]
            siblings = index.siblings(key, rest[:HEAD_TOKENS]) if len(rest) >= HEAD_TOKENS else ()
            loaded = self.fetch(chunk for chunk in siblings if isinstance(chunk, StoredChunk))
            found += [(chunk, at, common_length(chunk.tokens, rest)) for chunk in loaded.values()]
            cut = self.chunker.next_cut(tokens, at)
            if cut is None:
                break
            key, at = prefix_key(key, tokens[at:cut]), cut
        return found

    def was_evicted(self, key: bytes | None) -> bool:
        """Whether a chunk under this prefix key was stored and then evicted, not too long ago."""
        with self._lock:
            return self._history.was_evicted(key) and key not in self._memory.chunks

    def known_under_other_root(self, root: bytes, tokens: Tokens) -> bool:
        """Whether a prompt with this beginning was stored, under the same salt, for the model as it was before."""
        return self._history.known_under_other_root(root, tokens)

    # Using

    def record_use(
        self, chunks: Sequence[StoredChunk], *, missed: bool, states: StoredStates | None = None, moved: bool = False
    ) -> None:
        """Count what served a prompt, whether any of it was moved, and whether a look-up failed after it."""
        used: list[Stored] = [*chunks, *([states] if states is not None else [])]
        with self._lock:
            self._memory.use([each.key for each in used], by_content=moved)
            self._admission.note_served(sum(len(chunk.tokens) for chunk in chunks))
            self._counts["hits"] += len(chunks)
            self._counts["misses"] += missed
        if durable := [each.key for each in used if self._lower.keeps(each.root)]:
            self._lower.tiers.touch(durable)

    def promote(self, used: Sequence[Stored]) -> None:
        """Let records that have served come nearer: to the device, and from lower tiers to host memory, in a while.

        It takes time that a forward under way has more use for.
        """
        for each in used:
            if each.loaded is None or each.key in self._offences:  # somebody else has found it to be wrong
                continue
            if isinstance(each, StoredChunk) and not each.on_device:
                with suppress(DamagedBlobError):  # whoever reads it next finds out
                    self._device.put(each.key, each.kv)
            if each.found is not None:
                self._lower.note_known(each.key)
                self._lower.tiers.run(partial(self._take_back, each, self._memory.generation))

    def _take_back(self, stored: Stored, generation: int) -> None:
        """Take a record into host memory that was loaded from a lower tier."""
        try:
            held = stored.loaded.owned() if stored.loaded is not None else None
        except DamagedBlobError as error:
            return self.lose(stored, error)
        with self._lock:
            if held is None or stored.key in self._memory or self._closed or stored.key in self._offences:
                return None
            if generation == self._memory.generation:
                reserved = self._memory.reserve(stored.nbytes, keep=stored.parent)
                if reserved is not None:
                    self._insert(stored.in_memory(held), reserved)
                    self._lower.write(stored)
        return None

    # Taking in

    def expects(self, key: bytes) -> bool:
        """Whether a chunk that nobody asked to store is to be: where storing has not paid, one that comes again.

        What serves a prompt pays for what was stored before.
        """
        with self._lock:
            return self._text.is_used or key in self._memory.chunks or self._admission.admits(key)

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

        Args:
            root: The root that `parent` descends from.
            parent: Prefix key of the chunk before it, or `root`.
            start: Row token of its first token.
            tokens: Its tokens, at least `HEAD_TOKENS` of them.
            nbytes: Bytes that `copy_kv` will take.
            copy_kv: Makes the copy; None if it can no longer be made.
            pinned: Never evict it.
            unfinished: It ends where no cut is, so that nothing will continue it, and a longer one serves as well.
        """
        key = prefix_key(parent, tokens)

        def holder() -> bytes | None:
            return key if key in self._memory else self._memory.covering(parent, tokens) if unfinished else None

        chunk = StoredChunk(key, root, parent, start, tokens, None, nbytes + tokens.nbytes)
        return self._take(chunk, copy_kv, holder, pinned)

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
        chunk with a prefix key had no more.

        Args:
            root: Whose it is.
            tokens: Its tokens; fewer than `MIN_MOVED_TOKENS` are not stored.
            start: How many tokens were before it.
            nbytes: Bytes that `copy_kv` will take.
            copy_kv: Makes the copy; None if it can no longer be made.
            parent: Key of the chunk that it was computed directly behind, of either kind (`content_only_key` tells
                it), or bytes that name its history, such as a digest of it. None if nothing that is stored will ever
                continue it.
            pinned: Never evict it.
        """
        if len(tokens) < MIN_MOVED_TOKENS:
            return Put.TOO_SHORT
        index = self.moved_index(root)
        for nearest in index.variants(tokens)[:1] if pinned else ():  # it must be in host memory to be pinned
            if nearest.loaded is None and nearest.start <= start:
                for loaded in self.fetch([nearest]).values():
                    self._take_back(loaded, self._memory.generation)

        def holder() -> bytes | None:
            nearest = index.variants(tokens)[:1]
            return nearest[0].key if nearest and nearest[0].start <= start else None

        history = parent if parent is not None else os.urandom(KEY_BYTES)
        key = content_only_key(root, history, start, tokens)
        chunk = StoredChunk(key, root, history, start, tokens, None, nbytes + tokens.nbytes, content_only=True)
        return self._take(chunk, copy_kv, holder, pinned)

    def put_states(
        self,
        root: bytes,
        parent: bytes,
        tokens: Tokens,
        nbytes: int,
        copy_states: Callable[[], LayerStates],
        *,
        pinned: bool = False,
    ) -> Put:
        """Offer the states after some token. They are copied only if they are new and room for them can be made.

        Args:
            root: The root that `parent` descends from.
            parent: Prefix key of the last chunk border before that token, or `root`.
            tokens: Tokens from that border to that token, at least `HEAD_TOKENS` of them.
            nbytes: Bytes that `copy_states` will take.
            copy_states: Makes the copy.
            pinned: Never evict them.
        """
        key = states_key(parent, tokens)
        states = StoredStates(key, root, parent, tokens, None, nbytes + tokens.nbytes)
        return self._take(states, copy_states, lambda: key if key in self._memory else None, pinned)

    def _take(
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
        self._require_open()
        assert len(offered.tokens) >= HEAD_TOKENS
        with self._lock:
            if (present := self._present(holder, pinned)) is not None:
                return present
            if copy is None:
                return Put.GONE
            reserved = self._reserve(offered)
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
            self._insert(stored, reserved, pinned=pinned)
            self._lower.write(stored)
            if isinstance(stored, StoredChunk) and not stored.content_only:
                for shorter in self._memory.continued_by(stored):
                    self._replace(shorter, stored)
            if not pinned:
                self._admission.note_stored(len(stored.tokens))
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

    def _reserve(self, offered: Stored) -> Reservation | Put:
        """Reserve room for a record, or tell why it cannot be taken in."""
        if self._offences.get(offered.key, 0) > 1:
            return Put.NO_ROOM
        if not self._continues(offered):
            return Put.NO_PARENT
        reserved = self._memory.reserve(offered.nbytes, keep=offered.parent)
        if reserved is None:
            self._counts["rejected"] += 1
            return Put.NO_ROOM
        return reserved

    def _continues(self, offered: Stored) -> bool:
        """Whether a record can be found: what it continues is stored."""
        if isinstance(offered, StoredChunk) and offered.content_only:
            return True
        return offered.parent == offered.root or offered.parent in self._memory.chunks or offered.parent in self._lower

    def _insert(self, stored: Stored, reserved: Reservation, *, pinned: bool = False) -> None:
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

    # Pinning, and letting go

    def pinned_keys(self) -> set[bytes]:
        """Keys of all pinned chunks and states."""
        with self._lock:
            return self._memory.pinned_keys()

    def pinned_of(self, root: bytes, tokens: Tokens) -> dict[bytes, int]:
        """Keys and bytes of what is pinned of a text that begins at `root`, or has taken the place of that."""
        with self._lock:
            return self._memory.pinned_of(root, tokens)

    def has_pinned(self, keys: Iterable[bytes]) -> bool:
        """Whether some of what is stored under these keys is pinned."""
        with self._lock:
            return any(map(self._memory.is_pinned, keys))

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let what is stored under these keys be evicted again."""
        with self._lock:
            for key in keys:
                self._memory.unpin(key)

    def quarantine(self, keys: Iterable[bytes]) -> None:
        """Take chunks and states out of service in every tier, and all that continues them.

        What comes again is taken again, for memory may have failed; what is quarantined a second time is refused from
        then on, until `clear()`.
        """
        doomed = set(keys)
        self.flush()  # what was on its way to host memory is there
        below = self._lower.tiers.find(list(doomed))
        roots = {found.entry.root for found in below.values()}
        roots |= {each.root for key in doomed if (each := self._memory.get(key)) is not None}
        entries = [each for root in roots for each in self._lower.records(root)]
        with self._lock:
            for key in doomed:
                if key in self._memory or key in below:
                    self._offences[key] = self._offences.get(key, 0) + 1
                    self._counts["quarantined"] += 1
            tree = _with_descendants(doomed, [*entries, *self._memory.records()])
            for key in tree:
                self._memory.remove_tree(key)
            self._contents.drop_below(tree)
            self._device.clear()
            self._lower.delete(tree)
        self.flush()

    def clear(self) -> None:
        """Drop everything stored for this model, pinned or not, in all tiers: what other processes stored, too."""
        with self._lock:
            self._forget_all()
            self._history.clear()
        self._lower.clear()

    def _forget_all(self) -> None:
        for part in (self._memory, self._contents, self._text, self._admission, self._offences, self._device):
            part.clear()
        self._lower.forget_all()

    # Audits

    def audit_is_due(self, rate: float) -> bool:
        """Whether one more reused prompt brings the share of audited ones up to `rate`."""
        with self._lock:
            return self._audits.is_due(rate)

    def record_audit(self, *, diverged: bool) -> None:
        """Count an audit."""
        with self._lock:
            self._audits.record(diverged=diverged)

    # What users ask for

    def check_integrity(self, sample: float = 1.0) -> IntegrityReport:
        """Compute what is stored again, compare, and take out of the store what differs.

        It costs a forward over each stored text, once: as much as it took to store them. Nothing else may use the
        model meanwhile, as with any forward.

        Args:
            sample: The share of the chunks to check, drawn at random: above 0, up to 1 for all of them.

        Returns:
            What was checked, and what was wrong.

        Raises:
            ValueError: for a bad `sample`.
            StoreClosedError: after `close()`.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> model, tokenizer = load_embedded()
            >>> store = ChunkStore(model)
            >>> _ = store.warm("The lamp is red. " * 40, tokenizer=tokenizer)
            >>> store.check_integrity().wrong
            0
        """
        if not 0 < sample <= 1:
            raise ValueError(f"`sample` must be above 0 and at most 1, got {sample!r}. Pass 1.0 to check all of it.")
        self._require_open()
        return check_integrity(self._require_model(), self, sample)

    def warm(
        self,
        text_or_ids: Texts | None = None,
        *,
        documents: Sequence[Texts] | None = None,
        prefix: Texts | None = None,
        tokenizer: Any = None,
        pin: bool = True,
        policy: ReusePolicy | None = None,
        salt: str | bytes | None = None,
        progress: Callable[[int, int], None] | None = None,
        live_quant: KVQuantConfig | None = None,
    ) -> ReuseReport:
        """Compute and store K/V ahead of the first request: of the start of prompts, or of documents within them.

        Args:
            text_or_ids: What prompts start with: text, or token ids ([n] or [1, n]). Any mode finds it.
            documents: In place of it, texts or ids that may stand anywhere in prompts, each computed without the
                others. Only mode `"blend"` finds them, and only parts of 16 tokens or more.
            prefix: What each of the documents is computed behind, such as a system prompt; itself computed once, and
                stored as `text_or_ids` is.
            tokenizer: Tokenizes texts; `text_or_ids` and `prefix` with special tokens, as it would a prompt.
            pin: Never evict it.
            policy: That of the caches that are to find it.
            salt: That of the caches that are to find it; None for the store's.
            progress: Called as texts are computed, with the tokens that are done, and how many there are in all.
            live_quant: That of the caches that are to find it. Not with `documents`, for codes cannot be moved.

        Returns:
            What was already stored and what was computed, summed over the documents.

        Raises:
            ValueError: for both or neither of `text_or_ids` and `documents`, a text without a tokenizer, an empty one,
                ids of a wrong shape, documents for a model whose K/V cannot be moved, or with `live_quant`.
            StoreFullError: if what is to be pinned does not fit into the budget; nothing of it stays pinned.
            StoreClosedError: after `close()`.
        """
        self._require_open()
        assert _warmer is not None, "kvboost_hf.cache.warm registers itself when it is imported"
        settings = WarmSettings(
            tokenizer=tokenizer,
            pin=pin,
            policy=policy,
            salt=self.salt if salt is None else salt_bytes(salt),
            progress=progress,
            live_quant=live_quant,
        )
        return _warmer(self._require_model(), self, text_or_ids, documents, prefix, settings)

    def continuation(
        self,
        ids: Sequence[int] | NDArray[np.int64],
        length: int,
        *,
        max_ngram: int = MAX_NGRAM,
        min_ngram: int = 2,
        salt: str | bytes | None = None,
    ) -> list[int]:
        """Look up how text went on: the tokens that followed the longest n-gram that ends `ids`, in host memory.

        The same n-gram may stand in several places: what followed it most often counts, of that the last one stored.

        Args:
            ids: Token ids, from 0 on.
            length: So many tokens are wanted.
            max_ngram: Compare so many tokens at most, 8 or fewer.
            min_ngram: And so many at least, 2 or more.
            salt: Of the caches that stored it; None for the store's.

        Returns:
            At most `length` token ids, fewer where the stored text ends or something other than text follows.

        Raises:
            ValueError: for a bad `max_ngram` or `min_ngram`.
            StoreClosedError: after `close()`.
        """
        self._require_open()
        with self._lock:
            salt = self.salt if salt is None else salt_bytes(salt)
            chunks = self._memory.chunks.values()
            return self._text.continuation(chunks, salt, np.asarray(ids), length, max_ngram, min_ngram)

    def inspect(self) -> StoreContents:
        """The contents of host memory: chunks, states, and which of them are pinned."""
        with self._lock:
            memory = self._memory
            pinned = frozenset(memory.pinned_keys())
            return StoreContents(dict(memory.chunks), dict(memory.states), pinned, memory.nbytes)

    def check_consistency(self) -> None:
        """Check the store's bookkeeping: bytes, keys, parents, pins and indexes against the chunks that are there.

        Raises:
            AssertionError: naming what disagrees. The store is to be thrown away, and the bug reported.
        """
        with self._lock:
            chunks = self._memory.chunks.values()
            self._memory.check_consistency(complete=not self._lower)
            self._contents.check_consistency(chunks)
            self._text.check_consistency(chunks)
            self._device.check_consistency()

    def stats(self) -> dict[str, Any]:
        """Counts and bytes: `chunks`, `bytes`, `max_bytes`, `pinned_chunks`, `tokens`, `hits`, `misses`, … by tier."""
        with self._lock:
            chunks, states = self._memory.chunks, self._memory.states
            device = {"device": self._device.stats()} if self._device.max_bytes else {}
            ram = {"chunks": len(chunks), "bytes": self._memory.nbytes, "max_bytes": self.max_bytes}
            return {
                **ram,
                "pinned_chunks": len(self._memory.pinned_keys()),
                "content_only": sum(chunk.content_only for chunk in chunks.values()),
                "states": len(states),
                "tokens": sum(len(chunk.tokens) for chunk in chunks.values()),
                "ngram_bytes": self._text.nbytes,
                **self._counts,
                "evictions": self._memory.evictions,
                "audits": self._audits.audits,
                "divergences": self._audits.divergences,
                "loaded": self._lower.loaded,
                "lost": self._lower.lost,
                "codec": self.codec.name,
                "seconds_per_token": self._seconds_per_token(),
                "tiers": {**device, "ram": ram, **self._lower.tiers.stats()},
            }

    @property
    def max_bytes(self) -> int:
        """Budget of host memory. A smaller one holds from the next chunk on that comes in."""
        return self._memory.max_bytes

    @max_bytes.setter
    def max_bytes(self, max_bytes: int) -> None:
        self._memory.max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._memory.chunks)

    def serves(self, model: PreTrainedModel) -> bool:
        """Whether this store was made for `model`."""
        return self._model() is model

    def flush(self) -> None:
        """Wait until everything stored so far has been written to the lower tiers."""
        self._lower.tiers.flush()

    def invalidate(self) -> None:
        """Forget everything, live caches included: for weights that were changed where nobody can see it."""
        ModelState.of(self._require_model()).fingerprint.bump()
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish writing to the lower tiers, drop what is in host memory, and refuse further use."""
        self._close_tiers()
        with self._lock:
            self._forget_all()
            self._history.clear()
            self._closed = True

    @property
    def usable(self) -> bool:
        """Whether it is open and its model exists."""
        return not self._closed and self._model() is not None

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("This ChunkStore was closed. Make a new one: ChunkStore(model).")

    def _seconds_per_token(self) -> float | None:
        model = self._model()
        return ComputePace.of(model).seconds_per_token(model) if self._lower and model is not None else None

    def _require_model(self) -> PreTrainedModel:
        return _require_model(self._model)


def _require_model(ref: "weakref.ref[PreTrainedModel]") -> PreTrainedModel:
    model = ref()
    if model is None:
        raise StoreClosedError("The model that this ChunkStore was made for no longer exists. Make a new store.")
    return model


class _Uncut:
    """A chunker that cuts nothing."""

    chunk_size = 2**31

    def next_cut(self, tokens: Tokens, start: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class _Followers:
    """Parts of the store that are told what comes into host memory, and what goes."""

    contents: ContentIndexes
    text: StoredText
    history: History
    lower: LowerMemory

    def inserted(self, stored: Stored) -> None:
        if isinstance(stored, StoredChunk):
            self.history.note_stored(stored)
            self.text.add(stored)
            self.contents.add(stored)

    def removed(self, stored: Stored) -> None:
        if isinstance(stored, StoredChunk):
            self.contents.remove(stored)
            self.text.remove(stored)

    def evicted(self, stored: Stored) -> None:
        self.history.note_evicted(stored.key)
        self.lower.keep_evicted(stored)


def _with_descendants(keys: Iterable[bytes], records: Iterable[Stored]) -> set[bytes]:
    """`keys`, and the keys of all that continues them."""
    children: dict[bytes, list[bytes]] = {}
    for each in records:
        children.setdefault(each.parent, []).append(each.key)
    found: set[bytes] = set()
    todo = list(keys)
    while todo:
        key = todo.pop()
        if key not in found:
            found.add(key)
            todo += children.get(key, ())
    return found


def salt_bytes(salt: str | bytes) -> bytes:
    """A salt as bytes.

    Raises:
        ValueError: if it is neither text nor bytes.
    """
    if isinstance(salt, str):
        return salt.encode()
    if isinstance(salt, bytes):
        return salt
    raise ValueError(f"`salt` must be str or bytes, got {type(salt).__name__}.")


def _checked_chunker(chunker: Chunker | None, chunk_size: int | None) -> Chunker:
    if chunker is None:
        return FixedChunker(128 if chunk_size is None else chunk_size)
    if chunk_size not in (None, chunker.chunk_size):
        raise ValueError(
            f"`chunk_size` must be left out beside a `chunker`, or be its {chunker.chunk_size}, got {chunk_size!r}."
        )
    return chunker


def _chunk_bytes(model: PreTrainedModel, chunk_size: int, codec: Codec) -> int:
    """The least that a chunk takes; 0 where nothing will be stored, and the configuration may have other names."""
    if known_reason(model) is not None:
        return 0
    per_token = bytes_per_token(model) if codec.lossless else 0  # of codes: less, and not worth a second formula
    return (per_token + np.dtype(np.int64).itemsize) * chunk_size


class _DefaultStore(KeptOnModel):
    """The store of a model's caches that were given none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: ChunkStore | None = None


def default_store(model: PreTrainedModel) -> ChunkStore:
    """The store of a model's caches that were given none; made at the first call, and again after `close()`."""
    kept = _DefaultStore.of(model)
    with kept.lock:
        if kept.store is None or not kept.store.usable:
            kept.store = ChunkStore(model)
        return kept.store
