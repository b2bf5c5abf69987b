"""`ChunkStore`: K/V of chunks that outlives any one cache or call.

Chunks form a forest by their history. States (of linear attention) hang beneath the chunk border before them.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.chunks import (
    Chunker,
    FixedChunker,
    Tokens,
    common_length,
    content_key,
    prefix_key,
    root_key,
    states_key,
)
from kvboost_hf.cache.eviction import EvictionOrder
from kvboost_hf.cache.kv import LayerKV, LayerStates
from kvboost_hf.cache.plan import HEAD_TOKENS
from kvboost_hf.cache.state import ModelState
from kvboost_hf.compat import bytes_per_token, known_reason, require_cache
from kvboost_hf.config import ReusePolicy
from kvboost_hf.errors import StoreClosedError

if TYPE_CHECKING:
    from kvboost_hf.cache.report import ReuseReport

_REMEMBERED_KEYS = 65_536  # evicted keys that explain() can still tell from never seen ones
_MAX_SIBLINGS = 256  # chunks with the same head that are compared token by token


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunk:
    """A chunk in the store. Immutable: whoever holds one may go on reading it after it was evicted."""

    prefix_key: bytes
    content_key: bytes
    parent: bytes  # prefix key of the chunk before, or the root
    start: int  # row token of the first token, when it was stored
    tokens: Tokens
    kv: LayerKV
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredStates:
    """The states of all layers after some token. Immutable, as chunks are."""

    key: bytes
    parent: bytes  # prefix key of the last chunk border before that token, or the root
    tokens: Tokens  # from that border to that token
    states: LayerStates
    nbytes: int


Copied = TypeVar("Copied", LayerKV, LayerStates)


class Put(Enum):
    """What became of what was offered to the store."""

    STORED = "stored"
    PRESENT = "present"
    GONE = "gone"  # the cache itself no longer holds it
    NO_PARENT = "no parent"  # the chunk before it is not stored: nothing could ever find it
    NO_ROOM = "no room"


class ChunkStore:
    """K/V of chunks, in host memory, within a byte budget.

    One store may serve many caches and threads. What it holds is found by prefix key (tokens, positions and history
    all the same) and by content key (tokens the same), never by another model, other weights or another salt.

    Args:
        model: The model whose K/V is stored. Held weakly.
        chunk_size: Tokens per chunk, a positive multiple of 16.
        max_bytes: Budget for all stored tensors, never exceeded. The least recently and least frequently used chunks
            that nothing continues go first.
        salt: Separates those who must not see each other's prompts, not even by timing.

    Raises:
        ValueError: for a bad `chunk_size`, a budget smaller than one chunk, or a model that cannot be served
            (encoder-decoder, on the meta device, no `PreTrainedModel`).

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
        chunk_size: int = 128,
        max_bytes: int = 4 * 2**30,
        salt: str | bytes = b"",
    ) -> None:
        require_cache(model)
        self.chunker: Chunker = FixedChunker(chunk_size)
        self.salt = salt_bytes(salt)
        self.max_bytes = _checked_budget(model, max_bytes, chunk_size)
        self._model = weakref.ref(model)
        self._lock = threading.RLock()
        self._closed = False
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._salts: OrderedDict[bytes, bytes] = OrderedDict()  # root -> its salt
        self._first_heads: OrderedDict[bytes, bytes] = OrderedDict()  # salt and first tokens -> root last stored under
        self._counts = dict.fromkeys(("hits", "misses", "evictions", "rejected"), 0)
        self._counts |= dict.fromkeys(("audits", "divergences", "quarantined"), 0)
        self._audit_debt = 0.0
        self._forget_all()

    def _forget_all(self) -> None:
        self._chunks: dict[bytes, StoredChunk] = {}
        self._by_content: dict[bytes, dict[bytes, None]] = {}
        self._by_head: dict[bytes, dict[bytes, None]] = {}  # parent and first tokens -> prefix keys, oldest first
        self._states: dict[bytes, StoredStates] = {}
        self._states_by_head: dict[bytes, dict[bytes, None]] = {}  # as `_by_head`
        self._order = EvictionOrder()
        self._offences: dict[bytes, int] = {}  # keys that were quarantined, and how often
        self._used = 0  # bytes stored, and bytes promised to chunks that are being copied
        self._generation = getattr(self, "_generation", 0) + 1

    # What a cache asks for

    def root(self, salt: bytes, regime: bytes = b"", *, read_all: bool = False) -> bytes | None:
        """The key that all chains of the model, as it is now, start from; None while a part of it is in training.

        Args:
            salt: Whose prompts they are.
            regime: Of the rotary frequencies, see `compat.rope_regime`.
            read_all: Read every weight to tell whether one has changed.
        """
        self._require_open()
        model = self._require_model()
        fingerprint = ModelState.of(model).fingerprint.current(model, full=read_all)
        if fingerprint is None:
            return None
        root = root_key(fingerprint, salt, regime)
        with self._lock:
            _remember(self._salts, root, salt)
        return root

    def find(self, key: bytes, tokens: Tokens) -> StoredChunk | None:
        """The chunk under prefix key `key`, if its tokens are `tokens`."""
        with self._lock:
            chunk = self._chunks.get(key)
        return chunk if chunk is not None and np.array_equal(chunk.tokens, tokens) else None

    def siblings(self, parent: bytes, head: Tokens) -> Iterable[StoredChunk]:
        """Chunks that continue `parent` and start with the tokens `head`, newest first."""
        with self._lock:
            keys = list(self._by_head.get(_head_key(parent, head), ()))[-_MAX_SIBLINGS:]
            chunks = [self._chunks[key] for key in reversed(keys)]
        return [c for c in chunks if np.array_equal(c.tokens[: len(head)], head)]

    def states_after(self, parent: bytes, head: Tokens) -> Iterable[StoredStates]:
        """States saved in the chunk after `parent`, or at its end, that starts with `head`; newest first."""
        with self._lock:
            keys = list(self._states_by_head.get(_head_key(parent, head), ()))[-_MAX_SIBLINGS:]
            return [self._states[key] for key in reversed(keys)]

    def chain(self, root: bytes, tokens: Tokens) -> list[tuple[StoredChunk, int, int]]:
        """Every chunk that may serve a row: with the row token that it starts at, and how many tokens it shares."""
        found: list[tuple[StoredChunk, int, int]] = []
        key, at = root, 0
        while at < len(tokens):
            rest = tokens[at:]
            siblings = self.siblings(key, rest[:HEAD_TOKENS]) if len(rest) >= HEAD_TOKENS else ()
            found += [(chunk, at, common_length(chunk.tokens, rest)) for chunk in siblings]
            cut = self.chunker.next_cut(tokens, at)
            if cut is None:
                break
            key, at = prefix_key(key, tokens[at:cut]), cut
        return found

    def find_content(self, key: bytes, tokens: Tokens) -> list[StoredChunk]:
        """All chunks under content key `key` whose tokens are `tokens`, whatever their history."""
        with self._lock:
            chunks = [self._chunks[k] for k in self._by_content.get(key, ())]
        return [c for c in chunks if np.array_equal(c.tokens, tokens)]

    def record_use(self, chunks: Sequence[StoredChunk], *, missed: bool, states: StoredStates | None = None) -> None:
        """Count chunks and states that served a prompt, and whether a look-up failed after them."""
        with self._lock:
            self._counts["hits"] += len(chunks)
            self._counts["misses"] += missed
            for key in [chunk.prefix_key for chunk in chunks] + ([states.key] if states is not None else []):
                if key in self._order:
                    self._order.touch(key)

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
        """
        self._require_open()
        assert len(tokens) >= HEAD_TOKENS
        key = prefix_key(parent, tokens)
        nbytes += tokens.nbytes
        with self._lock:
            if (holder := key if key in self._chunks else self._covering(parent, tokens)) is not None:
                if pinned:
                    self._order.pin(holder)
                return Put.PRESENT
            if copy_kv is None:
                return Put.GONE
            if (refusal := self._reserve(root, parent, key, nbytes)) is not None:
                return refusal
            generation = self._generation
        kv = self._copied(copy_kv, nbytes, tokens, generation)
        chunk = StoredChunk(key, content_key(root, tokens), parent, start, tokens.copy(), kv, nbytes)
        with self._lock:
            if (refusal := self._overtaken(root, parent, key, nbytes, generation, pinned)) is not None:
                return refusal
            self._insert(chunk, is_first=parent == root, pinned=pinned)
            if parent == root:
                _remember(self._first_heads, _head_key(self._salts.get(root, b""), tokens[:HEAD_TOKENS]), root)
            self._drop_shorter(chunk)
        return Put.STORED

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
        self._require_open()
        assert len(tokens) >= HEAD_TOKENS
        key = states_key(parent, tokens)
        nbytes += tokens.nbytes
        with self._lock:
            if key in self._states:
                if pinned:
                    self._order.pin(key)
                return Put.PRESENT
            if (refusal := self._reserve(root, parent, key, nbytes)) is not None:
                return refusal
            generation = self._generation
        states = self._copied(copy_states, nbytes, tokens, generation)
        with self._lock:
            if (refusal := self._overtaken(root, parent, key, nbytes, generation, pinned)) is not None:
                return refusal
            self._states[key] = StoredStates(key, parent, tokens.copy(), states, nbytes)
            self._states_by_head.setdefault(_head_key(parent, tokens[:HEAD_TOKENS]), {})[key] = None
            self._order.add(key, None if parent == root else parent, pinned=pinned)
        return Put.STORED

    # Audits

    def audit_is_due(self, rate: float) -> bool:
        """Whether one more reused prompt brings the share of audited ones up to `rate`."""
        with self._lock:
            self._audit_debt += rate
            due = self._audit_debt >= 1 - 1e-9
            self._audit_debt -= due
            return due

    def record_audit(self, *, diverged: bool) -> None:
        """Count an audit."""
        with self._lock:
            self._counts["audits"] += 1
            self._counts["divergences"] += diverged

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

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let what is stored under these keys be evicted again."""
        with self._lock:
            for key in keys:
                if key in self._order:
                    self._order.unpin(key)

    def was_evicted(self, key: bytes | None) -> bool:
        """Whether a chunk under this prefix key was stored and then evicted, not too long ago."""
        with self._lock:
            return key in self._evicted and key not in self._chunks

    def known_under_other_root(self, root: bytes, tokens: Tokens) -> bool:
        """Whether a prompt with this beginning was stored, under the same salt, for the model as it was before."""
        with self._lock:
            known = self._first_heads.get(_head_key(self._salts.get(root, b""), tokens[:HEAD_TOKENS]))
        return known is not None and known != root

    # What users ask for

    def warm(
        self,
        text_or_ids: str | Sequence[int] | torch.Tensor,
        *,
        tokenizer: Any = None,
        pin: bool = True,
        policy: ReusePolicy | None = None,
    ) -> "ReuseReport":
        """Compute and store the K/V of a text ahead of the first request.

        Args:
            text_or_ids: Text, or token ids ([n] or [1, n]).
            tokenizer: Tokenizes a text, with its special tokens, as it would a prompt.
            pin: Never evict it.
            policy: That of the caches that are to find it.

        Returns:
            What was already stored and what was computed.

        Raises:
            ValueError: for a text without a tokenizer, an empty one, or ids of a wrong shape.
            StoreFullError: if the pinned text does not fit into the budget; nothing of it stays pinned.
            StoreClosedError: after `close()`.
        """
        from kvboost_hf.cache.warm import warm  # the cache is built on the store, and warming on the cache

        self._require_open()
        return warm(self._require_model(), self, text_or_ids, tokenizer=tokenizer, pin=pin, policy=policy)

    def stats(self) -> dict[str, Any]:
        """Counts and bytes: `chunks`, `bytes`, `max_bytes`, `pinned_chunks`, `tokens`, `hits`, `misses`, … by tier."""
        with self._lock:
            ram = {"chunks": len(self._chunks), "bytes": self._used, "max_bytes": self.max_bytes}
            return {
                **ram,
                "pinned_chunks": len(self.pinned_keys()),
                "states": len(self._states),
                "tokens": sum(len(chunk.tokens) for chunk in self._chunks.values()),
                **self._counts,
                "tiers": {"ram": ram},
            }

    def invalidate(self) -> None:
        """Forget everything, live caches included: for weights that were changed where nobody can see it."""
        ModelState.of(self._require_model()).fingerprint.bump()
        self.clear()

    def clear(self) -> None:
        """Drop every stored chunk, pinned ones too."""
        with self._lock:
            self._forget_all()
            self._evicted.clear()
            self._first_heads.clear()

    def close(self) -> None:
        """Drop everything and refuse further use."""
        self.clear()
        self._closed = True

    @property
    def usable(self) -> bool:
        """Whether it is open and its model exists."""
        return not self._closed and self._model() is not None

    def __len__(self) -> int:
        return len(self._chunks)

    def serves(self, model: PreTrainedModel) -> bool:
        """Whether this store was made for `model`."""
        return self._model() is model

    # Bookkeeping; the lock is held

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("This ChunkStore was closed. Make a new one: ChunkStore(model).")

    def _require_model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise StoreClosedError("The model that this ChunkStore was made for no longer exists. Make a new store.")
        return model

    def _reserve(self, root: bytes, parent: bytes, key: bytes, nbytes: int) -> Put | None:
        """Promise room to something new under `key`, or say why it cannot be had."""
        if self._offences.get(key, 0) > 1:
            return Put.NO_ROOM
        if parent != root and parent not in self._chunks:
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
        self, root: bytes, parent: bytes, key: bytes, nbytes: int, generation: int, pinned: bool
    ) -> Put | None:
        """Take a promise back if, while the copy was made, somebody else put the same or took the parent away."""
        orphaned = parent != root and parent not in self._chunks
        if generation == self._generation and key not in self._order and not orphaned:
            return None
        self._release(nbytes, generation)
        if pinned and key in self._order:
            self._order.pin(key)
        return Put.NO_PARENT if orphaned else Put.PRESENT

    def _make_room(self, nbytes: int, keep: bytes) -> bool:
        if nbytes > self.max_bytes:
            return False
        while self._used + nbytes > self.max_bytes:
            victim = self._order.victim(keep=keep)
            if victim is None:
                return False
            self._counts["evictions"] += 1
            _remember(self._evicted, victim, None)
            self._unlink(victim)
        return True

    def _release(self, nbytes: int, generation: int) -> None:
        if generation == self._generation:  # clear() has reset the count already
            self._used -= nbytes

    def _insert(self, chunk: StoredChunk, *, is_first: bool, pinned: bool) -> None:
        self._chunks[chunk.prefix_key] = chunk
        self._by_content.setdefault(chunk.content_key, {})[chunk.prefix_key] = None
        self._by_head.setdefault(_head_key(chunk.parent, chunk.tokens[:HEAD_TOKENS]), {})[chunk.prefix_key] = None
        self._order.add(chunk.prefix_key, None if is_first else chunk.parent, pinned=pinned)

    def _unlink(self, key: bytes) -> None:
        if key in self._states:
            saved = self._states.pop(key)
            self._used -= saved.nbytes
            head = _head_key(saved.parent, saved.tokens[:HEAD_TOKENS])
            del self._states_by_head[head][key]
            if not self._states_by_head[head]:
                del self._states_by_head[head]
            return
        chunk = self._chunks.pop(key)
        self._used -= chunk.nbytes
        for index, index_key in (
            (self._by_content, chunk.content_key),
            (self._by_head, _head_key(chunk.parent, chunk.tokens[:HEAD_TOKENS])),
        ):
            del index[index_key][key]
            if not index[index_key]:
                del index[index_key]

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
                    if self._order.is_pinned(sibling.prefix_key):
                        self._order.pin(chunk.prefix_key)
                    self._order.remove(sibling.prefix_key)
                    self._unlink(sibling.prefix_key)


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


def _checked_budget(model: PreTrainedModel, max_bytes: int, chunk_size: int) -> int:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
        raise ValueError(f"`max_bytes` must be a positive int, got {max_bytes!r}.")
    if known_reason(model) is not None:  # nothing will be stored, and the configuration may have other names
        return max_bytes
    per_token = bytes_per_token(model)
    needed = (per_token + np.dtype(np.int64).itemsize) * chunk_size
    if max_bytes < needed:
        raise ValueError(
            f"`max_bytes` must hold at least one chunk, which is {needed} bytes ({chunk_size} tokens of {per_token} "
            f"bytes of K/V), got {max_bytes}. Raise it, or lower `chunk_size`."
        )
    return max_bytes


def _head_key(parent: bytes, head: Tokens) -> bytes:
    return prefix_key(parent, head)


def _remember(memory: "OrderedDict[bytes, Any]", key: bytes, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED_KEYS:
        memory.popitem(last=False)
