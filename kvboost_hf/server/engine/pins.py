"""`Pins`: beginnings of prompts that stay in host memory for a while, within a share of the store for each client."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

import numpy as np

from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.server.jobs import Job, Keep

_MOST = 1024  # pins of one client


@dataclass(slots=True, eq=False)
class Pin:
    """A beginning of prompts, or all K/V of a session, that a client has asked to keep.

    Args:
        holder: Names it to the store.
        session: Of the session that it belongs to.
        root: Where the text begins; empty for a whole session.
        ttl_s: Seconds after its last use; None for no limit.
        priority: Those with the largest number give way first.
        used: When it was last used.
        tokens: How many tokens the text has; 0 for a whole session.
        digest: Of root and tokens.
    """

    holder: bytes
    session: str
    root: bytes
    ttl_s: float | None
    priority: int
    used: float
    tokens: int = 0
    digest: bytes = b""

    @property
    def until(self) -> float:
        """When it ends, unless it is used before."""
        return math.inf if self.ttl_s is None else self.used + self.ttl_s


class Pins:
    """The pins of each client. For the engine's thread alone.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._pins: dict[bytes, list[Pin]] = {}  # by client, the newest last
        self._next = math.inf  # nothing ends before
        self._holders = count(1)

    def __len__(self) -> int:
        return sum(map(len, self._pins.values()))

    def of(self, client: bytes, session: str) -> list[Pin]:
        """The pins of a session."""
        return [pin for pin in self._pins.get(client, ()) if pin.session == session]

    def keep(
        self, store: ChunkStore, job: Job, keeps: Collection[Keep], cache: ChunkReuseCache, session: str, priority: int
    ) -> bool:
        """Renew the pins that a prompt begins with, and make new ones.

        Args:
            store: Where K/V stays.
            job: Whose prompt it is.
            keeps: What to pin of it.
            cache: Holds the prompt alone.
            session: Of the job.
            priority: Of the new pins.

        Returns:
            Whether all that was asked for is pinned. What is longer than the client's share, has no room, or has moved
            K/V in it, is not pinned at all.
        """
        root, tokens = cache.root, np.asarray(job.ids, dtype=np.int64)
        if root is None:
            return not keeps
        begun = self._renew(job.client, root, tokens, session)
        if keeps:
            cache.store_all()  # what came from lower tiers may not be in host memory yet
        made = [self._new(session, root, keep.ttl_s, priority) for keep in keeps]
        return all(
            [
                self._keep_one(store, job.client, pin, keep, tokens, begun)
                for pin, keep in zip(made, keeps, strict=True)
            ]
        )

    def _keep_one(
        self, store: ChunkStore, client: bytes, pin: Pin, keep: Keep, tokens: Tokens, begun: list[Pin]
    ) -> bool:
        """Pin a beginning of a prompt, in place of shorter ones among those that the prompt has `begun` with."""
        wanted = len(tokens) if keep.tokens is None else min(keep.tokens, len(tokens))
        records, held = store.beginning(pin.root, tokens, wanted)
        if held <= wanted - HEAD_TOKENS:  # fewer tokens than that are never stored
            return False
        keys = [record.key for record in records]
        if keep.share is None:
            return store.pin(keys, b"")
        pin.tokens, pin.digest = wanted, _digests(pin.root, tokens, [wanted])[0]
        old = [each for each in begun if each.tokens <= wanted and each.until <= pin.until]
        added = self._add(store, client, pin, keys, keep.share, old)
        begun += [pin] if added else []
        return added

    def keep_session(
        self, store: ChunkStore, client: bytes, session: str, keys: Collection[bytes], keep: Keep, priority: int
    ) -> bool:
        """Pin K/V of a session, in place of its pins; returns whether all of it is pinned."""
        self.release(store, client, session)
        assert keep.share is not None
        pin = self._new(session, b"", keep.ttl_s, priority)
        return self._add(store, client, pin, keys, keep.share, ())

    def _renew(self, client: bytes, root: bytes, tokens: Tokens, session: str) -> list[Pin]:
        """Note the use of the pins that a prompt begins with, which are returned, and of that of its whole session."""
        pins, now = self._pins.get(client, []), self._clock()
        alike = [pin for pin in pins if pin.root == root and pin.tokens <= len(tokens)]
        lengths = sorted({pin.tokens for pin in alike})
        found = dict(zip(lengths, _digests(root, tokens, lengths), strict=True))
        begun = [pin for pin in alike if found[pin.tokens] == pin.digest]
        for pin in (*begun, *(pin for pin in pins if pin.session == session and not pin.tokens)):
            pin.used = now
        return begun

    def set_priority(self, client: bytes, session: str, priority: int) -> None:
        """Change which pins of a client give way first."""
        for pin in self.of(client, session):
            pin.priority = priority

    def release(self, store: ChunkStore, client: bytes, session: str) -> None:
        """Let go of the pins of a session."""
        for pin in self.of(client, session):
            self._remove(store, client, pin)

    def expire(self, store: ChunkStore) -> None:
        """Let go of the pins that have ended."""
        if (now := self._clock()) < self._next:
            return
        for client, pins in list(self._pins.items()):
            for pin in [pin for pin in pins if pin.until <= now]:
                self._remove(store, client, pin)
        self._next = min((pin.until for pins in self._pins.values() for pin in pins), default=math.inf)

    def _new(self, session: str, root: bytes, ttl_s: float | None, priority: int) -> Pin:
        return Pin(next(self._holders).to_bytes(8, "little"), session, root, ttl_s, priority, self._clock())

    def _add(
        self,
        store: ChunkStore,
        client: bytes,
        pin: Pin,
        keys: Collection[bytes],
        share: float,
        replaced: Collection[Pin],
    ) -> bool:
        """Pin records. The client's other pins give way where all of them would exceed its share."""
        pins, limit = self._pins.setdefault(client, []), share * store.max_bytes
        if not store.pin(keys, pin.holder):
            return False
        lasting = [each for each in pins if each.priority < pin.priority and each not in replaced]
        if _bytes(store, [*lasting, pin]) > limit:
            store.let_go(pin.holder)
            return False
        pins.append(pin)
        for each in [each for each in pins if each in replaced]:
            self._remove(store, client, each)
        order = sorted((each for each in pins if each not in (*lasting, pin)), key=lambda each: each.used)
        order.sort(key=lambda each: -each.priority)
        while order and (_bytes(store, pins) > limit or len(pins) > _MOST):
            self._remove(store, client, order.pop(0))
        self._next = min(self._next, pin.until)
        return True

    def _remove(self, store: ChunkStore, client: bytes, pin: Pin) -> None:
        pins = self._pins[client]
        pins.remove(pin)
        if not pins:
            del self._pins[client]
        store.let_go(pin.holder)


def _bytes(store: ChunkStore, pins: Collection[Pin]) -> int:
    return store.pinned_bytes(pin.holder for pin in pins)


def _digests(root: bytes, tokens: Tokens, lengths: Collection[int]) -> list[bytes]:
    """Digests of a root and so many first tokens each; the lengths ascend."""
    found, running, start = [], blake2b(root, digest_size=20), 0
    for stop in lengths:
        running.update(tokens[start:stop].tobytes())
        found.append(running.copy().digest())
        start = stop
    return found
