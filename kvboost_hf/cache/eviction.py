"""Which chunk to drop next: leaves before roots, rarely used before often used, old before new.

Pure bookkeeping, no tensors. Chunks form a forest: a chunk is useful only while all of its ancestors are stored, so
only leaves may go. Among leaves the order is LFU with dynamic aging (Arlitt et al., "Evaluating content management
techniques for Web proxy caches", 2000): priority = clock at last use + uses, and the clock rises to the priority of
each victim, so that what was once popular ages.
"""

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class _Node:
    parent: bytes | None  # None for a root
    children: int
    uses: int
    priority: int
    stamp: int  # order of last use; also tells a live heap entry from a stale one
    pinned: bool


class EvictionOrder:
    """The forest of stored chunks by key, and the order in which its leaves are given up."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._heap: list[tuple[int, int, bytes]] = []  # (priority, stamp, key); stale entries are skipped when met
        self._clock = 0
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def add(self, key: bytes, parent: bytes | None, *, pinned: bool = False) -> None:
        """Add a leaf. `parent` must be present, or None for a root."""
        assert key not in self._nodes
        if parent is not None:
            self._nodes[parent].children += 1
        self._nodes[key] = _Node(parent, children=0, uses=0, priority=0, stamp=0, pinned=pinned)
        self.touch(key)

    def touch(self, key: bytes) -> None:
        """Count one use of `key`."""
        node = self._nodes[key]
        node.uses += 1
        node.priority = self._clock + node.uses
        self._stamp += 1
        node.stamp = self._stamp
        self._offer(key, node)

    def pin(self, key: bytes) -> None:
        """Never give `key` up from now on."""
        self._nodes[key].pinned = True

    def unpin(self, key: bytes) -> None:
        """Let `key` be given up again."""
        node = self._nodes[key]
        node.pinned = False
        self._offer(key, node)

    def is_pinned(self, key: bytes) -> bool:
        """Whether `key` is pinned."""
        return self._nodes[key].pinned

    def is_leaf(self, key: bytes) -> bool:
        """Whether no stored chunk continues `key`."""
        return self._nodes[key].children == 0

    def remove(self, key: bytes) -> None:
        """Forget the leaf `key`; its parent may become a leaf."""
        node = self._nodes.pop(key)
        assert node.children == 0, "a chunk with descendants cannot be removed"
        if node.parent is not None:
            parent = self._nodes[node.parent]
            parent.children -= 1
            self._offer(node.parent, parent)

    def remove_tree(self, key: bytes) -> list[bytes]:
        """Forget `key` and all that descends from it, pinned or not; returns their keys."""
        children: dict[bytes, list[bytes]] = {}
        for other, node in self._nodes.items():
            if node.parent is not None:
                children.setdefault(node.parent, []).append(other)
        tree = [key]
        for found in tree:
            tree += children.get(found, [])
        for found in reversed(tree):  # leaves first
            self.remove(found)
        return tree

    def victim(self, *, keep: bytes | None = None) -> bytes | None:
        """Remove and return the leaf to give up, or None where every leaf is pinned or is `keep`."""
        kept: tuple[int, int, bytes] | None = None
        found: bytes | None = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            priority, stamp, key = entry
            node = self._nodes.get(key)
            if node is None or node.stamp != stamp or node.children or node.pinned:
                continue
            if key == keep:
                kept = entry
                continue
            self._clock = max(self._clock, priority)
            found = key
        if kept is not None:
            heapq.heappush(self._heap, kept)
        if found is not None:
            self.remove(found)
        return found

    def _offer(self, key: bytes, node: _Node) -> None:
        if node.children or node.pinned:
            return
        heapq.heappush(self._heap, (node.priority, node.stamp, key))
        if len(self._heap) > 64 + 4 * len(self._nodes):  # mostly stale: rebuild, amortized O(1) a use
            self._heap = [(n.priority, n.stamp, k) for k, n in self._nodes.items() if not n.children and not n.pinned]
            heapq.heapify(self._heap)
