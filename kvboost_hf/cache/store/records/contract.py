"""The contract between a store and the caches that use it: find, insert, pin, take out, check."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from kvboost_hf.cache.kv.layer_kv import LayerKV, LayerStates
from kvboost_hf.cache.kv.records import Put, Stored, StoredChunk, StoredStates
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.content_index import ContentIndex
from kvboost_hf.cache.planning.plan import ChunkIndex
from kvboost_hf.cache.store.records.view import Row
from kvboost_hf.cache.tiers.record import DamagedBlobError

S = TypeVar("S", bound=Stored)


class Unsettled(Protocol):
    """K/V of a prompt that is not stored yet."""

    def settle_here(self) -> None:
        """Store it, unless another thread may still be computing."""

    def wait_for(self, root: bytes, ids: Tokens) -> None:
        """Wait for another thread that is about to store a prompt which begins as `ids` [batch, columns] do."""


class Records(Protocol):
    """Chunks and states of one store, wherever they are. Safe for threads.

    Whoever holds a record may go on reading it, whatever becomes of it in the store.
    """

    # Find

    def wait_for_others(self, root: bytes, ids: Tokens) -> None:
        """Wait for other threads that are about to store a prompt which begins as `ids` [batch, columns] do."""
        ...

    def view(self, root: bytes, row: Row, without: frozenset[bytes] = frozenset()) -> ChunkIndex:
        """The chunks and states that a row can find by prefix key, in whatever tier.

        Args:
            root: Of the row.
            row: The row.
            without: Keys of records in lower tiers that are not to be found.
        """
        ...

    def moved_index(self, root: bytes) -> ContentIndex[StoredChunk]:
        """The chunks under `root` by their content, for `match.find_moved`; follows what is stored from then on.

        Chunks that other processes have stored in lower tiers appear within seconds.
        """
        ...

    def fetch(self, wanted: Iterable[S], *, check: bool = True) -> dict[bytes, S]:
        """Load records that are in lower tiers only.

        Args:
            wanted: Records, loaded or not.
            check: Whether all of each is to be compared with its checksums now, rather than as it is read.

        Returns:
            By key, what is loaded now. What is missing was lost, and will not be found again.
        """
        ...

    def lose(self, stored: Stored, error: DamagedBlobError | None = None) -> None:
        """Give up a record that was found in a lower tier: its blob is not there, or not what was written there."""
        ...

    def everything(self) -> list[Stored]:
        """All records under the roots that this store knows, in any tier; loaded or not."""
        ...

    # Use

    def record_use(
        self, chunks: Sequence[StoredChunk], *, missed: bool, states: StoredStates | None = None, moved: bool = False
    ) -> None:
        """Count what served a prompt, whether any of it was moved, and whether a look-up failed after it."""
        ...

    def promote(self, used: Sequence[Stored]) -> None:
        """Let records that have served come nearer: to the device, and from lower tiers to host memory, in a while.

        It takes time that a forward under way has more use for.
        """
        ...

    # Insert

    def expects(self, key: bytes) -> bool:
        """Whether a chunk that nobody asked to store is to be: where storing has not paid, one that comes again.

        What serves a prompt pays for what was stored before.
        """
        ...

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
        unfinished: bool = False,
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
            unfinished: It ends where no cut is, so that nothing will continue it, and a longer one serves as well.
        """
        ...

    def put_content(
        self,
        root: bytes,
        tokens: Tokens,
        start: int,
        nbytes: int,
        copy_kv: Callable[[], LayerKV] | None,
        *,
        parent: bytes | None = None,
        pinned: bool = False,
    ) -> Put:
        """Offer a chunk that is to be found by its content only: one computed alone, or behind K/V that was moved.

        Of those with the same tokens, one is kept: the one that had the fewest tokens before it. None is, where a
        chunk with a prefix key had no more.

        Args:
            root: Whose it is.
            tokens: Its tokens; fewer than `MIN_MOVED_TOKENS` are not stored.
            start: How many tokens were before it.
            nbytes: Bytes that `copy_kv` will take.
            copy_kv: Makes the copy; None if it can no longer be made.
            parent: Key of the chunk that it was computed directly behind, of either kind (`content_only_key` tells
                it), or bytes that name its history, such as a digest of it. None if nothing that is stored will ever
                continue it.
            pinned: Never evict it.
        """
        ...

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
        ...

    # Pin, take out, reset

    def settles_first(self, unsettled: Unsettled) -> None:
        """Have it stored before everything is written to the lower tiers, or dropped."""
        ...

    def has_pinned(self, keys: Iterable[bytes]) -> bool:
        """Whether some of what is stored under these keys is pinned."""
        ...

    def quarantine(self, keys: Iterable[bytes]) -> None:
        """Take chunks and states out of service in every tier, and all that continues them.

        What comes again is taken again, for memory may have failed; what is quarantined a second time is refused from
        then on, until `clear()`.
        """
        ...

    def clear(self) -> None:
        """Forget all records; the lower tiers keep what they have."""
        ...

    # Check

    def check_consistency(self) -> None:
        """Check bytes, keys, parents, pins and indexes against the records that are there.

        Raises:
            AssertionError: naming what disagrees.
        """
        ...
