"""Finds stored text wherever it stood: the chunks of one root for `match.find_moved`."""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import CODE_BYTES, FACTOR, HALF, HEAD_TOKENS, Tokens, common_length, text_of
from kvboost_hf.cache.planning.match import MIN_MOVED_TOKENS, window_hashes
from kvboost_hf.cache.planning.plan import Chunk

_MAX_COMPARED = 32  # chunks of equal standing among which one is chosen
_MAX_INSIDE = 8  # texts that are known to have the same window inside, the latest ones
_BLOCK = 512  # texts that are sorted together
_FEWEST_ROWS = 64  # of a table of hashes
_NONE, _GONE = -1, -2  # no place; none any more, in the middle of a run

C = TypeVar("C", bound=Chunk)


class ContentIndex(Generic[C]):
    """The chunks of one root. Implements `match.MovedIndex`.

    Their texts are sorted. The chunk that shares most leading tokens with a text is next to the place where the text
    would be inserted, however many chunks start alike. A chunk of fewer than `MIN_MOVED_TOKENS` tokens is found only
    directly before or behind another one. Of several variants of a text, the one with most text before it serves: K/V
    that was computed behind little text is unlike all other.

    Each text has a slot, and the windows of texts are in arrays: of a chunk of 128 tokens the index takes some 450
    bytes beside the chunk itself. The lock, which is reentrant, is held wherever the index is read or written.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self.max_tokens = 0
        self._lock = lock
        self._heads, self._inside = WindowTable(), WindowTable()
        self._sorted = SortedTexts()
        self._slots: dict[bytes, int] = {}  # by text
        self._variants: list[list[C] | C | None] = []  # by slot; least `start` first
        self._first_inside: array[int] = array("i")  # by slot, the place of its first window but the head
        self._first_head: array[int] = array("i")
        self._free: array[int] = array("i")  # slots
        self._behind: dict[int, list[C] | C] = {}  # by hash of parent and first tokens
        self._by_key: dict[bytes, C] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def chunks(self) -> list[C]:
        """All chunks."""
        with self._lock:
            return [chunk for slot in self._slots.values() for chunk in _several(self._variants[slot])]

    def add(self, chunk: C) -> None:
        """Add a chunk."""
        text = chunk.text
        with self._lock:
            self.max_tokens = max(self.max_tokens, chunk.length)
            slot = self._slots.get(text)
            if slot is None:
                slot = self._new_text(text, window_hashes(text))
            held, place = self._variants[slot], hash((chunk.parent, text[: HEAD_TOKENS * CODE_BYTES]))
            self._variants[slot] = sorted([*_several(held), chunk], key=_start) if held is not None else chunk
            if (others := self._behind.setdefault(place, chunk)) is not chunk:
                self._behind[place] = [*_several(others), chunk]
            self._by_key[chunk.key] = chunk

    def remove(self, chunk: C) -> None:
        """Undo `add`."""
        text = chunk.text
        with self._lock:
            slot = self._slots[text]
            left = [each for each in _several(self._variants[slot]) if each is not chunk]
            self._variants[slot] = left if len(left) > 1 else left[0] if left else None
            if not left:
                self._drop_text(text, slot, window_hashes(text))
            place = hash((chunk.parent, text[: HEAD_TOKENS * CODE_BYTES]))
            others = [each for each in _several(self._behind[place]) if each is not chunk]
            if others:
                self._behind[place] = others if len(others) > 1 else others[0]
            else:
                del self._behind[place]
            if self._by_key.get(chunk.key) is chunk:
                del self._by_key[chunk.key]

    def _new_text(self, text: bytes, hashes: NDArray[np.uint64]) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._variants)
            self._variants.append(None)
            self._first_head.append(_NONE)
            self._first_inside.append(_NONE)
        self._slots[text] = slot
        if len(hashes):
            self._sorted.add(text)
            self._first_head[slot] = self._heads.add(slot, hashes[:1])
            self._first_inside[slot] = self._inside.add(slot, hashes[1:])
        return slot

    def _drop_text(self, text: bytes, slot: int, hashes: NDArray[np.uint64]) -> None:
        del self._slots[text]
        if len(hashes):
            self._sorted.remove(text)
            self._heads.remove(self._first_head[slot], hashes[:1])
            self._inside.remove(self._first_inside[slot], hashes[1:])
        self._free.append(slot)

    def _last(self, slot: int) -> C:
        """The variant of a stored text with most text before it."""
        held = self._variants[slot]
        assert held is not None
        return held[-1] if isinstance(held, list) else held

    def variants(self, tokens: Tokens) -> list[C]:
        """All chunks with exactly these tokens, those with the fewest tokens before them first."""
        with self._lock:
            slot = self._slots.get(text_of(tokens))
            found = _several(self._variants[slot]) if slot is not None else ()
            return [chunk for chunk in found if np.array_equal(chunk.tokens, tokens)]

    def known_heads(self, hashes: NDArray[np.uint64]) -> list[int]:
        """The indices in `hashes` at which the first of a stored chunk's `window_hashes` stands."""
        known: list[int] = np.flatnonzero(self._heads.know(hashes)).tolist()
        return known

    def known_windows(self, hashes: NDArray[np.uint64]) -> list[int]:
        """The indices in `hashes` at which the hash of a window of a stored chunk stands, its head included."""
        known: list[int] = np.flatnonzero(self._inside.know(hashes) | self._heads.know(hashes)).tolist()
        return known

    def whole(self, text: bytes) -> C | None:
        """The longest chunk that is a prefix of a `text_of` tokens; of equal ones the one with most `start`."""
        with self._lock:
            while len(text) >= MIN_MOVED_TOKENS * CODE_BYTES:
                below, above = self._sorted.around(text)
                below = above if above == text else below
                if below and text.startswith(below):
                    return self._last(self._slots[below])
                text = text[: _shared(below, text) * CODE_BYTES]  # what starts with it, or differs from it sooner
        return None

    def leading(self, text: bytes) -> C | None:
        """A chunk that shares most leading tokens with a `text_of` them; of equal ones the one with most `start`."""
        best: C | None = None
        with self._lock:
            below, above = self._sorted.around(text)
            if not above.startswith(text):
                text = text[: max(_shared(below, text), _shared(above, text)) * CODE_BYTES]
            if len(text) < MIN_MOVED_TOKENS * CODE_BYTES:
                return None
            for each in self._sorted.following(text, _MAX_COMPARED):
                if not each.startswith(text):
                    break
                held = self._variants[self._slots[each]]
                chunk = held[-1] if isinstance(held, list) else held
                if chunk is not None and (best is None or chunk.start > best.start):
                    best = chunk
        return best

    def inside(self, window: bytes) -> list[tuple[C, int]]:
        """Some chunks that have a window, the `text_of` it, inside them, and where; a collision may bring others."""
        with self._lock:
            found, first = self._inside.places(window_hashes(window), _MAX_INSIDE), self._first_inside
            return [(self._last(slot), (place - first[slot] + 1) * MIN_MOVED_TOKENS) for slot, place in found]

    def behind(self, parent: bytes, text: bytes) -> C | None:
        """Of chunks with this `parent`, one that shares most leading tokens with a text, `HEAD_TOKENS` or more.

        Of several, the one without more tokens, if there is one.
        """
        found: list[C] = []
        with self._lock:
            near = self._behind.get(hash((parent, text[: HEAD_TOKENS * CODE_BYTES])))
            slot = self._slots.get(text)
            held = self._variants[slot] if slot is not None else None
            others = near[-_MAX_COMPARED:] if isinstance(near, list) else [near]
            for chunk in [*others, *(held if isinstance(held, list) else [held])]:
                if chunk is not None and chunk.parent == parent and chunk not in found:
                    found.append(chunk)
        if len(found) > 1:
            return max(found, key=lambda chunk: (_shared(chunk.text, text), -chunk.length))
        return found[0] if found else None

    def under(self, key: bytes) -> C | None:
        """The chunk with this key."""
        return self._by_key.get(key)


def _several(held: list[C] | C | None) -> list[C]:
    """Chunks as a list, of which there may be one, or none: most lists would have one entry."""
    return held if isinstance(held, list) else [held] if held is not None else []


def _start(chunk: Chunk) -> int:
    return chunk.start


def _shared(a: bytes, b: bytes) -> int:
    """How many leading tokens two texts share."""
    if a.startswith(b) or b.startswith(a):
        return min(len(a), len(b)) // CODE_BYTES
    return common_length(np.frombuffer(a, dtype=np.int32), np.frombuffer(b, dtype=np.int32))


class SortedTexts:
    """Sorted byte strings, each once, in blocks: an insertion moves no more than a block."""

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = [[]]
        self._lowest = [b""]  # of each block; that of the first one is less than all
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, text: bytes) -> None:
        """Add a text that is not there."""
        number = bisect_right(self._lowest, text) - 1
        block = self._blocks[number]
        insort(block, text)
        self._count += 1
        if len(block) > _BLOCK:
            half = len(block) // 2
            self._blocks[number : number + 1] = [block[:half], block[half:]]
            self._lowest.insert(number + 1, block[half])

    def remove(self, text: bytes) -> None:
        """Remove a text that is there."""
        number = bisect_right(self._lowest, text) - 1
        block = self._blocks[number]
        del block[bisect_left(block, text)]
        self._count -= 1
        if not block and number:
            del self._blocks[number], self._lowest[number]

    def around(self, text: bytes) -> tuple[bytes, bytes]:
        """The last one before a text, and the text itself or the first one behind it; none of these is empty bytes."""
        number = bisect_right(self._lowest, text) - 1
        block = self._blocks[number]
        at = bisect_left(block, text)
        above = block[at : at + 1] or (self._blocks[number + 1][:1] if number + 1 < len(self._blocks) else [])
        while not at and number:
            number -= 1
            at = len(self._blocks[number])
        return self._blocks[number][at - 1] if at else b"", above[0] if above else b""

    def following(self, text: bytes, count: int) -> list[bytes]:
        """So many from a text on, itself included if it is there."""
        number = bisect_right(self._lowest, text) - 1
        at = bisect_left(self._blocks[number], text)
        found = self._blocks[number][at : at + count]
        while len(found) < count and (number := number + 1) < len(self._blocks):
            found += self._blocks[number][: count - len(found)]
        return found


class WindowTable:
    """Where hashes of windows stand: in which slots, and where in them. A collision may bring others.

    A table with open addressing leads from a hash to the place of its newest window, and places are linked to those of
    the same hash that are older. The places of one slot follow one another. So a window takes 12 bytes of places and
    some 20 of the table, and all hashes of a prompt are looked up at once.
    """

    def __init__(self) -> None:
        self._slots: array[int] = array("i")  # by place
        self._older: array[int] = array("i")
        self._newer: array[int] = array("i")
        self._free: dict[int, array[int]] = {}  # first places of runs, by length
        self._views = self._make(_FEWEST_ROWS)

    def __len__(self) -> int:
        return self._rows

    def _make(self, size: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Have a table of so many rows, none of them taken."""
        self._hashes, self._places = array("Q", bytes(8 * size)), array("i", [_NONE]) * size
        self._rows = self._used = 0  # that are taken, and that were
        return np.frombuffer(self._hashes, np.uint64), np.frombuffer(self._places, np.int32)

    def _grow(self, count: int) -> None:
        """Have a larger table, with room for `count` more; or one of the same size, without those that are gone."""
        taken = self._views[1] >= 0
        hashes, places = self._views[0][taken], self._views[1][taken]
        size = max(_FEWEST_ROWS, 2 * (len(hashes) + count))
        rows = _rows(hashes, size)
        order = np.argsort(rows, kind="stable")
        hashes, places, rows = hashes[order], places[order], rows[order]
        numbers = np.arange(len(rows))
        rows = np.maximum.accumulate(rows - numbers) + numbers  # each behind the one before, or where it belongs
        fitting = rows < size
        views = self._make(size)
        views[0][rows[fitting]], views[1][rows[fitting]] = hashes[fitting], places[fitting]
        self._rows = self._used = int(fitting.sum())
        late = zip(hashes[~fitting].tolist(), places[~fitting].tolist(), strict=True)
        for hashed, place in late:  # from the end of the table to its beginning
            self._take(0, hashed, place)
        self._views = views  # at once: a long prompt is looked up without the lock

    def _take(self, row: int, hashed: int, place: int) -> None:
        """Have a hash lead to a place, from the first free row on."""
        while self._places[row] >= 0:
            row = (row + 1) % len(self._places)
        self._rows += 1
        self._used += self._places[row] == _NONE
        self._hashes[row], self._places[row] = hashed, place

    def know(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which hashes stand somewhere."""
        own, places = self._views
        known, left, rows = np.zeros(len(hashes), dtype=bool), np.arange(len(hashes)), _rows(hashes, len(own))
        while len(left):
            found = places[rows]
            hit = (found >= 0) & (own[rows] == hashes[left])
            known[left[hit]] = True
            going = ~hit & (found != _NONE)
            left, rows = left[going], (rows[going] + 1) % len(own)
        return known

    def places(self, hashes: NDArray[np.uint64], count: int) -> list[tuple[int, int]]:
        """So many slots and places of a hash [1], the newest first."""
        found: list[tuple[int, int]] = []
        row = self._row(int(hashes[0]), int(_rows(hashes, len(self._places))[0]))
        place = self._places[row] if row is not None else _NONE
        while place != _NONE and len(found) < count:
            found.append((self._slots[place], place))
            place = self._older[place]
        return found

    def _row(self, hashed: int, row: int) -> int | None:
        """The row of a hash, which belongs into `row` or behind it."""
        while (place := self._places[row]) != _NONE:
            if place != _GONE and self._hashes[row] == hashed:
                return row
            row = (row + 1) % len(self._places)
        return None

    def add(self, slot: int, hashes: NDArray[np.uint64]) -> int:
        """Add the windows of a slot; returns the place of the first one."""
        count = len(hashes)
        if not count:
            return _NONE
        if (self._used + count) * 10 > len(self._places) * 7:
            self._grow(count)
        first = self._run_of(count)
        for place, hashed, row in self._where(first, hashes):
            self._slots[place], self._older[place], self._newer[place] = slot, _NONE, _NONE
            there = self._row(hashed, row)
            if there is None:
                self._take(row, hashed, place)
            elif self._slots[older := self._places[there]] == slot:
                self._slots[place] = _GONE  # of a text that repeats itself, the first one
            else:
                self._older[place], self._newer[older], self._places[there] = older, place, place
        return first

    def _where(self, first: int, hashes: NDArray[np.uint64]) -> Iterator[tuple[int, int, int]]:
        """The place of each window, its hash, and the row where that belongs."""
        rows = _rows(hashes, len(self._places)).tolist()
        return zip(range(first, first + len(hashes)), hashes.tolist(), rows, strict=True)

    def _run_of(self, count: int) -> int:
        free = self._free.get(count)
        if free:
            return free.pop()
        first = len(self._slots)
        for links in (self._slots, self._older, self._newer):
            links.extend([_NONE] * count)
        return first

    def remove(self, first: int, hashes: NDArray[np.uint64]) -> None:
        """Undo `add`."""
        for place, hashed, row in self._where(first, hashes):
            if self._slots[place] == _GONE:
                continue
            older, newer = self._older[place], self._newer[place]
            if older != _NONE:
                self._newer[older] = newer
            if newer != _NONE:
                self._older[newer] = older
            else:
                there = self._row(hashed, row)
                assert there is not None
                self._places[there] = older if older != _NONE else _GONE
                self._rows -= older == _NONE
        if len(hashes):
            self._free.setdefault(len(hashes), array("i")).append(first)


def _rows(hashes: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Where hashes belong in a table of so many rows."""
    rows: NDArray[np.int64] = ((((hashes * FACTOR) >> HALF) * np.uint64(size)) >> HALF).astype(np.int64)
    return rows
