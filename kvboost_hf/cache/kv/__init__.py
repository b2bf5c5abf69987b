"""K/V as a store keeps it: the records of chunks, and of states of linear attention; and whose they are.

`Belongings` tells which records belong to some prompts: to those under some roots, or to those that begin alike.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
        """Its K/V, once it is loaded."""
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


class Beginnings:
    """How the prompts of several owners begin.

    A first chunk, and all that continues it, belongs to the owners with the longest head that it begins with.
    """

    def __init__(self) -> None:
        self._owners: dict[bytes, dict[int, dict[bytes, set[str]]]] = {}  # by root, length and head

    def add(self, root: bytes, head: Tokens, owner: str) -> None:
        """Add an owner of prompts that begin with `head` under a root."""
        self._owners.setdefault(root, {}).setdefault(len(head), {}).setdefault(head.tobytes(), set()).add(owner)

    def owners(self, stored: Stored) -> frozenset[str]:
        """Whose a first chunk is, or a state within one; none for other records, and for those of nobody here."""
        if stored.parent != stored.root or (isinstance(stored, StoredChunk) and stored.content_only):
            return frozenset()
        by_length = self._owners.get(stored.root, {})
        for length in sorted(by_length, reverse=True):
            if (owners := by_length[length].get(stored.tokens[:length].tobytes())) is not None:
                return frozenset(owners)
        return frozenset()

    def roots(self, owner: str) -> frozenset[bytes]:
        """The roots under which an owner has prompts."""
        return frozenset(
            root
            for root, by_length in self._owners.items()
            if any(owner in owners for heads in by_length.values() for owners in heads.values())
        )


@dataclass(frozen=True, slots=True)
class Belongings:
    """The part of a store that belongs to some prompts."""

    owner: str  # as `Beginnings` name it: what begins with its heads
    roots: frozenset[bytes] = frozenset()  # all that is stored under these
    # By key of a record that is found by its content, its root.
    pieces: Mapping[bytes, bytes] = field(default_factory=dict)
    all_pieces: bool = False  # there are more of these, whose keys are not known

    def under(self, heads: Beginnings) -> frozenset[bytes]:
        """The roots that anything of it is under."""
        return self.roots.union(heads.roots(self.owner), self.pieces.values())

    def keys(self, records: Collection[Stored], heads: Beginnings, *, lost: bool) -> set[bytes]:
        """Keys of those records that belong to the prompts.

        With `lost`, also of what may belong to any prompt under the same roots: chunks behind one that is not stored
        any more, states within a first chunk, and if not all pieces are known, those of others.
        """
        wanted = {*self.pieces} | {each.key for each in records if self.owner in heads.owners(each)}
        if lost:
            known = {each.key for each in records}
            wanted |= {each.key for each in records if self._may_be_lost(each, known)}
        tree = with_descendants(wanted, records)
        return {each.key for each in records if each.root in self.roots or each.key in tree}

    def _may_be_lost(self, stored: Stored, known: set[bytes]) -> bool:
        if isinstance(stored, StoredStates):
            return stored.parent == stored.root or stored.parent not in known
        if stored.content_only:
            return self.all_pieces
        return stored.parent != stored.root and stored.parent not in known


def count_bytes(held: Iterable[Stored], wanted: Iterable[Belongings], heads: Beginnings) -> list[int]:
    """The bytes of what is held, for each of those `wanted`."""
    by_key = {each.key: each for each in held}
    tops: dict[bytes, frozenset[str]] = {}  # by key, the owners of the first chunk that it continues
    sizes: Counter[str | bytes] = Counter()  # by owner, by root, and by key of a piece
    for each in by_key.values():
        way = [each]
        while way[-1].key not in tops and (above := by_key.get(way[-1].parent)) is not None:
            way.append(above)
        owners = tops[way[-1].key] if way[-1].key in tops else heads.owners(way[-1])
        tops |= {passed.key: owners for passed in way}
        sizes[each.root] += each.nbytes
        for owner in owners or (each.key,):
            sizes[owner] += each.nbytes
    return [sizes[each.owner] + sum(sizes[key] for key in (*each.roots, *each.pieces)) for each in wanted]
