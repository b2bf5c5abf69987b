"""`Holdings`: what a replica holds of the texts of its prompts, and the news of it for the fronts of a cluster.

    text key ──▶ chunks that cover the piece ──▶ tier of the least of them, and of all pieces before ──▶ events

A front knows texts and no tokens, a store knows chunks and no texts. A prompt that was computed links them: of m
pieces and n tokens, the i-th piece is taken to end at token n * i / (m + 1/2), as if tokens were spread evenly. What
the store says of the chunks is exact.
"""

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.planning.plan import Border
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.server.routing import BELOW, GONE, MAX_KEYS, MEMORY, News, Place

Changed = Callable[[Iterable[bytes] | None], None]
_MAX_LOG = 32_768  # events; who has missed more is told all that is held


@dataclass(slots=True, eq=False)
class _Piece:
    """A piece of text: the piece before it, the keys of the chunks that cover it and not that, and those behind it."""

    before: bytes | None
    chunks: tuple[bytes, ...]
    after: set[bytes] = field(default_factory=set)
    tier: int = GONE  # as it was published


class Holdings:
    """Links pieces of texts to chunks, and logs which of them come and go. Safe to use from several threads.

    Args:
        tier_of: Tells where the store has the chunk with a key: `GONE`, `BELOW` or `MEMORY`.
        age: Returns another value once what was stored serves no more, such as after a change of weights.
        watch: Has the store call a function for chunks that come and go, from the first link on.
        max_keys: Pieces that are linked, at most; those not seen for longest are withdrawn.
        max_log: Events that are kept for those who ask.
    """

    def __init__(
        self,
        tier_of: Callable[[bytes], int],
        age: Callable[[], object] = lambda: None,
        watch: Callable[[Changed], None] = lambda changed: None,
        *,
        max_keys: int = MAX_KEYS,
        max_log: int = _MAX_LOG,
    ) -> None:
        self._tier_of, self._age, self._max_keys, self._max_log = tier_of, age, max_keys, max_log
        self._watch: Callable[[Changed], None] | None = watch  # None once the store is watched
        self._lock = threading.Lock()
        self._epoch, self._at_age = uuid.uuid4().hex, age()
        self._pieces: OrderedDict[bytes, _Piece] = OrderedDict()  # what is behind a piece comes before it
        self._covered: dict[bytes, set[bytes]] = {}  # by chunk, the pieces
        # Written without the lock, while the store holds its own.
        self._changed: set[bytes] = set()  # chunks
        self._all_changed = False
        self._log: list[tuple[bytes, int]] = []
        self._events = 0

    @classmethod
    def of(cls, model: PreTrainedModel, store: ChunkStore) -> "Holdings":
        """The holdings of a store that was made for `model`."""
        near, anywhere, fingerprint = store.is_in_memory, store.holds, ModelState.of(model).fingerprint

        def tier_of(key: bytes) -> int:
            return MEMORY if near(key) else BELOW if anywhere(key) else GONE

        return cls(tier_of, lambda: fingerprint.age, store.watch)

    def changed(self, chunks: Iterable[bytes] | None) -> None:
        """The store has taken these chunks in, or given them up; None for all that it had."""
        if chunks is None:
            self._all_changed = True
            return
        for key in chunks:
            if key in self._covered:
                self._changed.add(key)

    def link(self, keys: Sequence[bytes], borders: Sequence[Border], tokens: int) -> None:
        """Link the pieces of a text to the chunks of its prompt, which end at `borders`."""
        if not keys or not borders:
            return
        if (watch := self._watch) is not None:
            self._watch = None
            watch(self.changed)
        places = {border.key: at for at, border in enumerate(borders)}
        with self._lock:
            self._follow_age()
            at, before = 0, None  # chunks that cover what is before
            for number, key in enumerate(keys, 1):
                piece = self._pieces.get(key)
                if piece is not None and piece.before == before and all(chunk in places for chunk in piece.chunks):
                    at = max([at, *(places[chunk] + 1 for chunk in piece.chunks)])
                else:
                    end, first = tokens * 2 * number // (2 * len(keys) + 1), at
                    while at < len(borders) and (at == 0 or borders[at - 1].at < end):
                        at += 1
                    self._enter(key, before, tuple(border.key for border in borders[first:at]))
                before = key
            for key in reversed(keys):
                if key in self._pieces:
                    self._pieces.move_to_end(key)
            while len(self._pieces) > self._max_keys:
                self._withdraw(next(iter(self._pieces)))

    def since(self, replica: str, place: Place | None) -> News:
        """The events behind some place, or all that is held where these are not known any more."""
        with self._lock:
            self._follow_age()
            self._look()
            first = self._events - len(self._log)
            if place is None or place.epoch != self._epoch or not first <= place.events <= self._events:
                held = [(key, piece.tier) for key, piece in self._pieces.items() if piece.tier != GONE]
                return self._news(replica, None, held)
            return self._news(replica, place.events, self._log[place.events - first :])

    def _news(self, replica: str, start: int | None, events: Sequence[tuple[bytes, int]]) -> News:
        keys, tiers = [key for key, _ in events], bytes(tier for _, tier in events)
        return News(replica, self._epoch, start, self._events, keys, tiers)

    # With the lock

    def _follow_age(self) -> None:
        if (age := self._age()) != self._at_age:
            self._at_age = age
            while self._pieces:
                self._withdraw(next(iter(self._pieces)))

    def _look(self) -> None:
        """Look where the chunks are that have changed."""
        if self._all_changed:
            self._all_changed = False
            self._changed |= self._covered.keys()
        while self._changed:
            for key in list(self._covered.get(self._changed.pop(), ())):
                self._update(key)

    def _enter(self, key: bytes, before: bytes | None, chunks: tuple[bytes, ...]) -> None:
        after = set[bytes]()
        if (old := self._pieces.get(key)) is not None:
            after = old.after
            self._cut(key, old)
        piece = self._pieces[key] = _Piece(before, chunks, after, old.tier if old is not None else GONE)
        for chunk in piece.chunks:
            self._covered.setdefault(chunk, set()).add(key)
        if before is not None and before in self._pieces:
            self._pieces[before].after.add(key)
        self._update(key)

    def _cut(self, key: bytes, piece: _Piece) -> None:
        """Undo the links of a piece to its chunks, and to the piece before it."""
        for chunk in piece.chunks:
            self._covered[chunk].discard(key)
            if not self._covered[chunk]:
                del self._covered[chunk]
        if piece.before is not None and piece.before in self._pieces:
            self._pieces[piece.before].after.discard(key)

    def _withdraw(self, key: bytes) -> None:
        """Forget a piece, and all that is behind it."""
        tree = [key]
        for found in tree:
            tree += self._pieces[found].after
        for found in reversed(tree):
            piece = self._pieces.pop(found)
            self._cut(found, piece)
            if piece.tier != GONE:
                self._tell(found, GONE)

    def _update(self, key: bytes) -> None:
        """Publish where a piece is now, if it has changed, and what that means for those behind it."""
        todo = [key]
        while todo:
            found = todo.pop()
            piece = self._pieces[found]
            above = MEMORY if piece.before is None else self._pieces[piece.before].tier
            tier = min([above, *map(self._tier_of, piece.chunks)])
            if tier != piece.tier:
                piece.tier = tier
                self._tell(found, tier)
                todo += piece.after

    def _tell(self, key: bytes, tier: int) -> None:
        self._log.append((key, tier))
        self._events += 1
        if len(self._log) > 2 * self._max_log:
            del self._log[: -self._max_log]
