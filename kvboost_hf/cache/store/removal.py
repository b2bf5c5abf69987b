"""Counts and removes what belongs to some prompts: all that begins at some roots, or with some first chunks."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvboost_hf.cache.kv.records import Stored, StoredStates, unloaded, with_descendants
from kvboost_hf.cache.store.tiered import TieredRecords
from kvboost_hf.cache.tiers.below import Found


@dataclass(frozen=True, slots=True)
class Belongings:
    """What of a store belongs to some prompts.

    Args:
        roots: All that is stored under these.
        firsts: By key of a first chunk, its root: the chunk and all that continues it.
        pieces: By key of another record, its root.
    """

    roots: frozenset[bytes]
    firsts: Mapping[bytes, bytes]
    pieces: Mapping[bytes, bytes]

    @property
    def all_roots(self) -> frozenset[bytes]:
        """The roots that anything of it is under."""
        return self.roots.union(self.firsts.values(), self.pieces.values())

    def keys(self, records: Collection[Stored], *, lost: bool) -> set[bytes]:
        """Keys of those records that belong to the prompts.

        Args:
            records: All under `all_roots`.
            lost: Under the roots of first chunks, include what may belong to any prompt: chunks behind one that is
                not stored any more, and states before the end of a first chunk.
        """
        wanted = {*self.firsts, *self.pieces}
        if lost:
            known, shared = {each.key for each in records}, frozenset(self.firsts.values())
            wanted |= {each.key for each in records if each.root in shared and _is_lost(each, known)}
        tree = with_descendants(wanted, records)
        return {each.key for each in records if each.root in self.roots or each.key in tree}


def _is_lost(stored: Stored, known: set[bytes]) -> bool:
    if stored.parent == stored.root:
        return isinstance(stored, StoredStates)
    return stored.parent not in known and (isinstance(stored, StoredStates) or not stored.content_only)


def count_bytes(records: TieredRecords, wanted: Iterable[Belongings]) -> list[int]:
    """The bytes of each in host memory."""
    with records.lock:
        held = {each.key: each for each in records.memory.records()}
    firsts: dict[bytes, bytes] = {}  # by key, the first chunk that it continues
    sizes: Counter[bytes] = Counter()  # by root, by first chunk, and by key
    for each in held.values():
        way = [each]
        while (above := held.get(way[-1].parent)) is not None and above.key not in firsts:
            way.append(above)
        first = firsts[above.key] if above is not None else way[-1].key
        firsts |= {passed.key: first for passed in way}
        sizes[each.root] += each.nbytes
        sizes[first] += each.nbytes
        if first != each.key:
            sizes[each.key] += each.nbytes
    return [
        sum(sizes[key] for key in (*each.roots, *each.firsts))
        + sum(sizes[key] for key in each.pieces if firsts.get(key) not in each.firsts)
        for each in wanted
    ]


def remove(records: TieredRecords, wanted: Belongings) -> dict[str, int]:
    """Remove what belongs to some prompts from every tier, pinned or not, and wait until all tiers have done so.

    Returns:
        By tier, the bytes that were removed.
    """
    records.lower.tiers.flush()  # what was on its way to host memory is there
    below = [each for root in wanted.all_roots for each in _below(records, root)]
    with records.lock:
        here = [each for each in records.memory.records() if each.root in wanted.all_roots]
        doomed = wanted.keys([*here, *(stored for _, stored, _ in below)], lost=True)
        records.take_out(doomed)
    records.lower.tiers.flush()
    freed: Counter[str] = Counter()
    for name, stored, nbytes in [*(("ram", each, each.nbytes) for each in here), *below]:
        if stored.key in doomed:
            freed[name] += nbytes
    return dict(freed)


def _below(records: TieredRecords, root: bytes) -> Iterator[tuple[str, Stored, int]]:
    """The tier of each record under a root, the record, and its bytes there."""
    for tier in records.lower.tiers.tiers:
        for entry in tier.tier.entries(root):
            if entry.root == root:
                yield tier.tier.name, unloaded(Found(entry, tier)), entry.nbytes
