"""Tells which records of a store belong to some prompts: to those under some roots, or to those that begin alike."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvboost_hf.cache.kv import Stored, StoredChunk, StoredStates, with_descendants
from kvboost_hf.cache.planning.chunks import Tokens


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
