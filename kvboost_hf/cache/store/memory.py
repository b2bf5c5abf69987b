"""What a store holds in host memory, within a byte budget: taking in, finding, giving up.

Chunks form a forest by their history. States (of linear attention) hang beneath the chunk border before them. Chunks
that are found by their content only stand alone.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from kvboost_hf.cache.planning.chunks import KEY_BYTES, Tokens, common_length, content_only_key, prefix_key, states_key
from kvboost_hf.cache.planning.content_index import ContentIndex
from kvboost_hf.cache.planning.eviction import EvictionOrder
from kvboost_hf.cache.planning.match import MIN_MOVED_TOKENS
from kvboost_hf.cache.planning.ngram_index import NgramIndex
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.store.kv import LayerKV, LayerStates
from kvboost_hf.cache.tiers.below import Found
from kvboost_hf.errors import StoreClosedError

_REMEMBERED_KEYS = 65_536  # evicted keys that explain() can still tell from never seen ones
# Storing so many tokens, or what takes as long as computing so many, tells whether it pays.
_STORED_AT_LEAST, _COMPUTED_AT_LEAST = 65_536, 4_096
_MAX_SIBLINGS = 256  # chunks with the same head that are compared token by token


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunk:
    """A chunk in the store. Immutable: whoever holds one may go on reading it after it was evicted."""

    prefix_key: bytes  # its own key, where it is found by content only
    root: bytes
    parent: bytes  # key of the chunk that it was computed directly behind, or the root
    start: int  # row token of the first token, when it was stored
    tokens: Tokens
    loaded: LayerKV | None  # None while it is in a lower tier only
    nbytes: int
    content_only: bool = False  # its K/V is not that of a prompt computed whole
    found: Found | None = None  # where it was found, if not in host memory
    on_device: bool = False  # it was found where the model computes

    @property
    def key(self) -> bytes:
        """Its own key."""
        return self.prefix_key

    @property
    def tier(self) -> str:
        """Where it was found."""
        if self.on_device:
            return "device"
        return self.found.tier.tier.name if self.found is not None else "ram"

    @property
    def kv(self) -> LayerKV:
        """Its K/V, once it is loaded."""
        assert self.loaded is not None, "it must be loaded first"
        return self.loaded


@dataclass(frozen=True, slots=True, eq=False)
class StoredStates:
    """The states of all layers after some token. Immutable, as chunks are."""

    key: bytes
    root: bytes
    parent: bytes  # prefix key of the last chunk border before that token, or the root
    tokens: Tokens  # from that border to that token
    loaded: LayerStates | None  # None while they are in a lower tier only
    nbytes: int
    found: Found | None = None

    @property
    def states(self) -> LayerStates:
        """The states, once they are loaded."""
        assert self.loaded is not None, "they must be loaded first"
        return self.loaded


Copied = TypeVar("Copied", LayerKV, LayerStates)


class Put(Enum):
    """What became of what was offered to the store."""

    STORED = "stored"
    PRESENT = "present"
    GONE = "gone"  # the cache itself no longer holds it
    NO_PARENT = "no parent"  # the chunk before it is not stored: nothing could ever find it
    NO_ROOM = "no room"
    TOO_SHORT = "too short"  # to be found by content
    UNSEEN = "unseen"  # little of what was stored was of use: it will be stored when it comes again


class Shelf:
    """Chunks and states within a byte budget.

    Args:
        max_bytes: Of all that is taken in, never exceeded.
        pays_for: How many tokens take as long to store as one takes to compute; None stores all that comes.
    """

    def __init__(self, max_bytes: int, pays_for: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._pays_for = pays_for
        self._lock = threading.RLock()
        self._closed = False
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._salts: OrderedDict[bytes, bytes] = OrderedDict()  # root -> its salt
        self._first_heads: OrderedDict[bytes, bytes] = OrderedDict()  # salt and first tokens -> root last stored under
        self._counts = dict.fromkeys(("hits", "misses", "evictions", "rejected"), 0)
        self._counts |= dict.fromkeys(("audits", "divergences", "quarantined"), 0)
        self._texts_are_asked_for = False
        self._forget_all()

    def _forget_all(self) -> None:
        self._chunks: dict[bytes, StoredChunk] = {}
        self._contents: dict[bytes, ContentIndex[StoredChunk]] = {}  # by root
        self._ngrams: dict[bytes, NgramIndex] = {}  # by salt
        self._ngrams_of: dict[bytes, NgramIndex] = {}  # the same by root
        self._by_head: dict[bytes, dict[bytes, None]] = {}  # parent and first tokens -> prefix keys, oldest first
        self._states: dict[bytes, StoredStates] = {}
        self._states_by_head: dict[bytes, dict[bytes, None]] = {}  # as `_by_head`
        self._order = EvictionOrder()
        self._unpaid = 0  # tokens stored, less those that serving prompts has paid for
        self._unseen: OrderedDict[bytes, None] = OrderedDict()  # keys of what was not stored when it came first
        self._offences: dict[bytes, int] = {}  # keys that were quarantined, and how often
        self._used = 0  # bytes stored, and bytes promised to chunks that are being copied
        self._generation = getattr(self, "_generation", 0) + 1

    # Looking up

    def find(self, key: bytes, tokens: Tokens) -> StoredChunk | None:
        """The chunk under prefix key `key`, if its tokens are `tokens`."""
        with self._lock:
            chunk = self._chunks.get(key)
        if chunk is None or chunk.content_only or not np.array_equal(chunk.tokens, tokens):
            return None
        return chunk

    def siblings(self, parent: bytes, head: Tokens) -> Iterable[StoredChunk]:
        """Chunks that continue `parent` and start with the tokens `head`, newest first."""
        with self._lock:
            keys = list(self._by_head.get(head_key(parent, head), ()))[-_MAX_SIBLINGS:]
            chunks = [self._chunks[key] for key in reversed(keys)]
        return [c for c in chunks if np.array_equal(c.tokens[: len(head)], head)]

    def states_after(self, parent: bytes, head: Tokens) -> Iterable[StoredStates]:
        """States saved in the chunk after `parent`, or at its end, that starts with `head`; newest first."""
        with self._lock:
            keys = list(self._states_by_head.get(head_key(parent, head), ()))[-_MAX_SIBLINGS:]
            return [self._states[key] for key in reversed(keys)]

    def moved_index(self, root: bytes) -> ContentIndex[StoredChunk]:
        """The chunks under `root` by their content, for `match.find_moved`; follows what is stored from then on."""
        return self._content_index(root)

    def _content_index(self, root: bytes) -> ContentIndex[StoredChunk]:
        with self._lock:
            return self._contents.setdefault(root, ContentIndex(self._lock))

    def _ngrams_with(self, salt: bytes) -> NgramIndex | None:
        """The text stored with a salt; kept from the first time on that anybody asks for text."""
        if not self._texts_are_asked_for:
            self._texts_are_asked_for = True
            for chunk in self._chunks.values():
                self._ngram_index(chunk.root).add(chunk.key, chunk.parent, chunk.tokens)
        return self._ngrams.get(salt)

    def _ngram_index(self, root: bytes) -> NgramIndex:
        if root not in self._ngrams_of:  # a salt that is forgotten is nobody's
            self._ngrams_of[root] = self._ngrams.setdefault(self._salts.get(root, root), NgramIndex())
        return self._ngrams_of[root]

    def record_use(
        self, chunks: Sequence[StoredChunk], *, missed: bool, states: StoredStates | None = None, moved: bool = False
    ) -> None:
        """Count what served a prompt, whether any of it was moved, and whether a look-up failed after it."""
        with self._lock:
            self._order.next_prompt()
            self._order.by_content |= moved
            if self._pays_for is not None:
                self._unpaid = max(0, self._unpaid - self._pays_for * sum(len(chunk.tokens) for chunk in chunks))
            self._counts["hits"] += len(chunks)
            self._counts["misses"] += missed
            for key in [chunk.prefix_key for chunk in chunks] + ([states.key] if states is not None else []):
                if key in self._order:
                    self._order.touch(key)

    def salt_of(self, root: bytes) -> bytes | None:
        """The salt behind a root, as far as it is remembered."""
        with self._lock:
            return self._salts.get(root)

    def was_evicted(self, key: bytes | None) -> bool:
        """Whether a chunk under this prefix key was stored and then evicted, not too long ago."""
        with self._lock:
            return key in self._evicted and key not in self._chunks

    def known_under_other_root(self, root: bytes, tokens: Tokens) -> bool:
        """Whether a prompt with this beginning was stored, under the same salt, for the model as it was before."""
        with self._lock:
            known = self._first_heads.get(head_key(self._salts.get(root, b""), tokens[:HEAD_TOKENS]))
        return known is not None and known != root

    # Taking in

    def expects(self, key: bytes) -> bool:
        """Whether a chunk that nobody asked to store is to be: where storing has not paid, one that comes again.

        What serves a prompt pays for what was stored before.
        """
        with self._lock:
            if self._pays_for is None or self._texts_are_asked_for or key in self._chunks:
                return True
            if self._unpaid < max(_STORED_AT_LEAST, _COMPUTED_AT_LEAST * self._pays_for):
                return True
            if key in self._unseen:
                del self._unseen[key]
                return True
            remember(self._unseen, key, None)
            return False

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
        nbytes += tokens.nbytes

        def holder() -> bytes | None:
            if key in self._chunks:
                return key
            return self._covering(parent, tokens) if unfinished else None

        def insert(kv: LayerKV) -> None:
            chunk = StoredChunk(key, root, parent, start, tokens.copy(), kv, nbytes)
            self._insert(chunk, pinned=pinned)
            self._drop_shorter(chunk)

        return self._take(root, parent, key, tokens, nbytes, copy_kv, holder, insert, pinned)

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
        history = parent if parent is not None else os.urandom(KEY_BYTES)
        key = content_only_key(root, history, start, tokens)
        nbytes += tokens.nbytes
        index = self.moved_index(root)

        def holder() -> bytes | None:
            nearest = index.variants(tokens)[:1]
            return nearest[0].prefix_key if nearest and nearest[0].start <= start else None

        def insert(kv: LayerKV) -> None:
            chunk = StoredChunk(key, root, history, start, tokens.copy(), kv, nbytes, content_only=True)
            self._insert(chunk, pinned=pinned)

        return self._take(root, root, key, tokens, nbytes, copy_kv, holder, insert, pinned)

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
        nbytes += tokens.nbytes

        def insert(states: LayerStates) -> None:
            self._insert_states(StoredStates(key, root, parent, tokens.copy(), states, nbytes), pinned=pinned)

        def holder() -> bytes | None:
            return key if key in self._states else None

        return self._take(root, parent, key, tokens, nbytes, copy_states, holder, insert, pinned)

    # Letting go

    def quarantine(self, keys: Iterable[bytes]) -> None:
        """Take chunks and states out of service, and all that continues them.

        What comes again is taken again, for memory may have failed; what is quarantined a second time is refused from
        then on, until `clear()`.
        """
        with self._lock:
            for key in keys:
                if key in self._order:
                    self._offences[key] = self._offences.get(key, 0) + 1
                    self._counts["quarantined"] += 1
                    for inner in self._order.remove_tree(key):
                        self._unlink(inner)

    def pinned_keys(self) -> set[bytes]:
        """Keys of all pinned chunks and states."""
        with self._lock:
            return {key for key in (*self._chunks, *self._states) if self._order.is_pinned(key)}

    def pinned_of(self, root: bytes, tokens: Tokens) -> dict[bytes, int]:
        """Keys and bytes of what is pinned of a text that begins at `root`, or has taken the place of that."""
        found: dict[bytes, int] = {}
        with self._lock:
            for key in self.pinned_keys():
                each = self._chunks.get(key) or self._states[key]
                start = each.start if isinstance(each, StoredChunk) else self._end(each.root, each.parent)
                if each.root == root and start is not None:
                    shared = tokens[start : start + len(each.tokens)]
                    if len(shared) and np.array_equal(each.tokens[: len(shared)], shared):
                        found[key] = each.nbytes
        return found

    def root_under(self, key: bytes) -> bytes:
        """The root of a stored chunk, or of stored states."""
        with self._lock:
            return (self._chunks.get(key) or self._states[key]).root

    def has_pinned(self, keys: Iterable[bytes]) -> bool:
        """Whether some of what is stored under these keys is pinned."""
        with self._lock:
            return any(key in self._order and self._order.is_pinned(key) for key in keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let what is stored under these keys be evicted again."""
        with self._lock:
            for key in keys:
                if key in self._order:
                    self._order.unpin(key)

    def clear(self) -> None:
        """Drop every stored chunk, pinned ones too."""
        with self._lock:
            self._forget_all()
            self._evicted.clear()
            self._first_heads.clear()

    # Bookkeeping; the lock is held

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("This ChunkStore was closed. Make a new one: ChunkStore(model).")

    def _take(
        self,
        root: bytes,
        parent: bytes,
        key: bytes,
        tokens: Tokens,
        nbytes: int,
        copy: Callable[[], Copied] | None,
        holder: Callable[[], bytes | None],
        insert: Callable[[Copied], None],
        pinned: bool,
    ) -> Put:
        """Take something in, unless it is there, the cache has lost it, or there is no room; takes the lock itself.

        Args:
            root: Whose it is.
            parent: Key of the chunk that must be stored before it, or `root`.
            key: Its own.
            tokens: Its tokens.
            nbytes: Its bytes, tokens included.
            copy: Makes the copy of its tensors.
            holder: Finds the key of what serves as well.
            insert: Enters the copy.
            pinned: Never evict it.
        """
        self._require_open()
        assert len(tokens) >= HEAD_TOKENS
        with self._lock:
            if (present := self._present(holder, pinned)) is not None:
                return present
            if copy is None:
                return Put.GONE
            if (refusal := self._reserve(root, parent, key, nbytes)) is not None:
                return refusal
            generation = self._generation
        copied = self._copied(copy, nbytes, tokens, generation)
        with self._lock:
            if (refusal := self._overtaken(root, parent, nbytes, generation, holder, pinned)) is not None:
                return refusal
            insert(copied)
            self._unpaid += 0 if pinned else len(tokens)
        return Put.STORED

    def _present(self, holder: Callable[[], bytes | None], pinned: bool) -> Put | None:
        key = holder()
        if key is None:
            return None
        if pinned and key not in self._order:  # there was no room to bring it back from a lower tier
            return Put.NO_ROOM
        if pinned:
            self._order.pin(key)
        return Put.PRESENT

    def _reserve(self, root: bytes, parent: bytes, key: bytes, nbytes: int) -> Put | None:
        """Promise room to something new under `key`, or say why it cannot be had."""
        if self._offences.get(key, 0) > 1:
            return Put.NO_ROOM
        if not self._continues(root, parent):
            return Put.NO_PARENT
        if not self._make_room(nbytes, keep=parent):
            self._counts["rejected"] += 1
            return Put.NO_ROOM
        self._used += nbytes
        return None

    def _copied(self, copy: Callable[[], Copied], nbytes: int, tokens: Tokens, generation: int) -> Copied:
        """Make a copy that room was promised to. The lock is not held: copies take their time."""
        try:
            copied = copy()
        except BaseException:
            with self._lock:
                self._release(nbytes, generation)
            raise
        assert copied.nbytes + tokens.nbytes == nbytes, "the promised size must be the real one"
        return copied

    def _overtaken(
        self,
        root: bytes,
        parent: bytes,
        nbytes: int,
        generation: int,
        holder: Callable[[], bytes | None],
        pinned: bool,
    ) -> Put | None:
        """Take a promise back if, while the copy was made, somebody else put the same or took the parent away."""
        present = self._present(holder, pinned)
        orphaned = not self._continues(root, parent)
        if generation == self._generation and present is None and not orphaned:
            return None
        self._release(nbytes, generation)
        return Put.NO_PARENT if orphaned else Put.PRESENT

    def _end(self, root: bytes, key: bytes) -> int | None:
        """The row token behind a chunk, or 0 for the root; None for one that is not in host memory."""
        chunk = self._chunks.get(key)
        return 0 if key == root else None if chunk is None else chunk.start + len(chunk.tokens)

    def _continues(self, root: bytes, parent: bytes) -> bool:
        """Whether what continues `parent` can be found."""
        return parent == root or parent in self._chunks

    def _make_room(self, nbytes: int, keep: bytes) -> bool:
        if nbytes > self.max_bytes:
            return False
        while self._used + nbytes > self.max_bytes:
            victim = self._order.victim(keep=keep)
            if victim is None:
                return False
            self._counts["evictions"] += 1
            self._evict(victim)
        return True

    def _evict(self, key: bytes) -> None:
        remember(self._evicted, key, None)
        self._unlink(key)

    def _release(self, nbytes: int, generation: int) -> None:
        if generation == self._generation:  # clear() has reset the count already
            self._used -= nbytes

    def _insert(self, chunk: StoredChunk, *, pinned: bool) -> None:
        self._chunks[chunk.prefix_key] = chunk
        # Computed again behind something else it has another key, and is as popular as before.
        name = content_only_key(chunk.root, b"", 0, chunk.tokens)
        above = chunk.parent if not chunk.content_only and chunk.parent in self._chunks else None
        self._order.add(chunk.prefix_key, above, name=name, pinned=pinned)
        if not chunk.content_only:
            head = head_key(chunk.parent, chunk.tokens[:HEAD_TOKENS])
            self._by_head.setdefault(head, {})[chunk.prefix_key] = None
            if chunk.parent == chunk.root:
                salt = self._salts.get(chunk.root, b"")
                remember(self._first_heads, head_key(salt, chunk.tokens[:HEAD_TOKENS]), chunk.root)
        if self._texts_are_asked_for:
            self._ngram_index(chunk.root).add(chunk.key, chunk.parent, chunk.tokens)
        index = self._content_index(chunk.root)
        index.add(chunk)
        for other in index.variants(chunk.tokens):
            if other is not chunk and other.content_only and other.start >= chunk.start:
                self._replace(other, chunk)

    def _insert_states(self, saved: StoredStates, *, pinned: bool) -> None:
        self._states[saved.key] = saved
        self._states_by_head.setdefault(head_key(saved.parent, saved.tokens[:HEAD_TOKENS]), {})[saved.key] = None
        self._order.add(saved.key, saved.parent if saved.parent in self._chunks else None, pinned=pinned)

    def _unlink(self, key: bytes) -> None:
        if key in self._states:
            gone: StoredChunk | StoredStates = self._states.pop(key)
            by_head = self._states_by_head
        else:
            gone, by_head = self._chunks.pop(key), self._by_head
            self._content_index(gone.root).remove(gone)
            if self._texts_are_asked_for:
                self._ngram_index(gone.root).remove(key)
        self._used -= gone.nbytes
        head = head_key(gone.parent, gone.tokens[:HEAD_TOKENS])
        if key in by_head.get(head, ()):  # what is found by content only is not
            del by_head[head][key]
            if not by_head[head]:
                del by_head[head]

    def _replace(self, old: StoredChunk, new: StoredChunk) -> None:
        """Drop a leaf for what serves better; its pin goes over."""
        if self._order.is_pinned(old.prefix_key):
            self._order.pin(new.prefix_key)
        self._order.remove(old.prefix_key)
        self._unlink(old.prefix_key)

    def _covering(self, parent: bytes, tokens: Tokens) -> bytes | None:
        """The key of a stored chunk that starts with all of these tokens, after the same history."""
        for sibling in self.siblings(parent, tokens[:HEAD_TOKENS]):
            if common_length(sibling.tokens, tokens) == len(tokens):
                return sibling.prefix_key
        return None

    def _drop_shorter(self, chunk: StoredChunk) -> None:
        """Drop the unfinished chunks that `chunk` continues: it holds all that they hold."""
        for sibling in self.siblings(chunk.parent, chunk.tokens[:HEAD_TOKENS]):
            n = len(sibling.tokens)
            if n < len(chunk.tokens) and common_length(sibling.tokens, chunk.tokens) == n:
                if self._order.is_leaf(sibling.prefix_key):
                    self._replace(sibling, chunk)


def head_key(parent: bytes, head: Tokens) -> bytes:
    """What all that begins alike behind `parent` shares."""
    return prefix_key(parent, head)


def remember(memory: "OrderedDict[bytes, Any]", key: bytes, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED_KEYS:
        memory.popitem(last=False)
