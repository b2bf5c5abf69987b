"""K/V as a store keeps it: the records of chunks, and of states of linear attention."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

from kvboost_hf.cache.kv.layer_kv import LayerKV
from kvboost_hf.cache.kv.layer_states import LayerStates
from kvboost_hf.cache.planning.chunks import Tokens, packed, text_in, tokens_in
from kvboost_hf.cache.tiers.below import Found


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunk:
    """A chunk in the store. Immutable: whoever holds one may go on reading it after it was evicted."""

    key: bytes
    root: bytes
    parent: bytes  # key of the chunk that it was computed directly behind, or the root
    start: int  # row token of the first token, when it was stored
    ids: Tokens | bytes  # its tokens, as they are or `packed`
    loaded: LayerKV | None  # None while it is in a lower tier only
    nbytes: int
    length: int  # tokens
    content_only: bool = False  # its K/V is not that of a prompt computed whole
    found: Found | None = None  # where it was found, if not in host memory
    tier: str = "ram"  # name of the tier that it was found in; `LIVE` for a copy of what a cache holds, in no store

    tokens: ClassVar[Any] = property(tokens_in)
    text: ClassVar[Any] = property(text_in)

    @property
    def kv(self) -> LayerKV:
        """The K/V of the chunk, once it is loaded."""
        assert self.loaded is not None, "it must be loaded first"
        return self.loaded

    def in_memory(self, kv: LayerKV | LayerStates) -> "StoredChunk":
        """The same chunk as host memory holds it, with K/V and tokens of its own."""
        assert isinstance(kv, LayerKV)
        return replace(self, ids=packed(self.tokens), loaded=kv, found=None, tier="ram")


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
    spare: bool = False  # others of the same prompt are close: host memory alone keeps them

    @property
    def states(self) -> LayerStates:
        """The states, once they are loaded."""
        assert self.loaded is not None, "they must be loaded first"
        return self.loaded

    def in_memory(self, states: LayerKV | LayerStates) -> "StoredStates":
        """The same states as host memory holds them, in tensors of their own."""
        assert isinstance(states, LayerStates)
        return replace(self, loaded=states, found=None)


Stored = StoredChunk | StoredStates


@dataclass(frozen=True, slots=True, repr=False)
class StoreContents:
    """The contents of host memory at one moment.

    Args:
        chunks: By key, the oldest first.
        states: By key, the oldest first.
        pinned: Keys of chunks and states that are never evicted.
        nbytes: Bytes of all of them, and bytes promised to chunks that are being copied.
    """

    chunks: Mapping[bytes, StoredChunk]
    states: Mapping[bytes, StoredStates]
    pinned: frozenset[bytes]
    nbytes: int

    def __repr__(self) -> str:  # that of a dataclass would print the K/V
        found = f"{len(self.chunks)} chunks, {len(self.states)} states, {len(self.pinned)} pinned, {self.nbytes} bytes"
        return f"{type(self).__name__}({found})"


class Put(Enum):
    """Outcome of offering a chunk or states to the store."""

    STORED = "stored"
    PRESENT = "present"
    GONE = "gone"  # the cache itself no longer holds it
    NO_PARENT = "no parent"  # the chunk before it is not stored: nothing could ever find it
    NO_ROOM = "no room"
    TOO_SHORT = "too short"  # to be found by content
    UNSEEN = "unseen"  # little of what was stored was of use: it will be stored when it comes again


def with_descendants(keys: Iterable[bytes], records: Iterable[Stored]) -> set[bytes]:
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
