"""`Pins`: keeps prompts that clients have warmed in host memory, within a share for each client."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore, Put
from kvboost_hf.server.jobs import Job


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    root: bytes
    tokens: Tokens


class Pins:
    """The pinned prompts of each client, the oldest first."""

    def __init__(self) -> None:
        self._texts: dict[bytes, deque[_Text]] = {}  # by client

    def keep(self, store: ChunkStore, job: Job, cache: ChunkReuseCache) -> bool:
        """Pin the K/V of a job's prompt. Where that exceeds the client's share, its oldest prompts are unpinned.

        Args:
            store: Where it stays.
            job: Whose `pin_share` is not 0.
            cache: Holds the prompt alone.

        Returns:
            False where the prompt does not fit; what of it was not pinned before is not pinned then, either.
        """
        before = store.pinned_keys()
        results = cache.store_all(pinned=True)
        new = store.pinned_keys() - before
        if any(result in (Put.NO_ROOM, Put.NO_PARENT, Put.GONE) for result in results):
            store.unpin(new)
            return False
        if not new or job.pin_share == 1:
            return True
        text = _Text(store.records.root_of(next(iter(new))), np.asarray(job.ids, dtype=np.int64))
        limit = int(job.pin_share * store.max_bytes)
        if sum(store.records.pinned_of(text.root, text.tokens).values()) > limit:
            store.unpin(new)
            return False
        texts = self._texts.setdefault(job.client, deque())
        texts.append(text)
        while sum(self._held(store, texts).values()) > limit:
            oldest = texts.popleft()
            store.unpin(store.records.pinned_of(oldest.root, oldest.tokens).keys() - self._held(store, texts).keys())
        return True

    @staticmethod
    def _held(store: ChunkStore, texts: deque[_Text]) -> dict[bytes, int]:
        """Keys and bytes of what is pinned of texts."""
        held: dict[bytes, int] = {}
        for text in texts:
            held |= store.records.pinned_of(text.root, text.tokens)
        return held
