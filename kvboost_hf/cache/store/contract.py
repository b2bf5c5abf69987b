"""The contract of a store, as its parts and its tests see it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.content_index import ContentIndex
from kvboost_hf.cache.planning.plan import ChunkIndex
from kvboost_hf.cache.store.kv import ColumnFormat, LayerKV, LayerStates
from kvboost_hf.cache.store.records import Put, StoreContents, Stored, StoredChunk
from kvboost_hf.cache.store.view import Row

S = TypeVar("S", bound=Stored)


class KVStore(Protocol):
    """K/V of chunks across tiers. Safe for threads.

    A record that was found may be read as long as it is held, whatever the store does meanwhile.
    """

    @property
    def column_format(self) -> ColumnFormat:
        """How columns are kept."""
        ...

    def root(self, salt: bytes, regime: bytes = b"", *, read_all: bool = False) -> bytes | None:
        """The key that all chains start from; None while nothing may be stored or found."""
        ...

    def salt_of(self, root: bytes) -> bytes | None:
        """The salt behind a root, as far as it is remembered."""
        ...

    # Find

    def view(self, root: bytes, row: Row, without: frozenset[bytes] = frozenset()) -> ChunkIndex:
        """The chunks and states that a row can find by prefix key, in all tiers."""
        ...

    def moved_index(self, root: bytes) -> ContentIndex[StoredChunk]:
        """The chunks under a root by their content, in all tiers."""
        ...

    def fetch(self, wanted: Iterable[S], *, check: bool = True) -> Mapping[bytes, S]:
        """Load records, by key; those that are missing in the result are lost."""
        ...

    # Insert

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
        """Offer a chunk that is found by prefix key."""
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
        """Offer a chunk that is found by its content only."""
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
        """Offer the states after some token."""
        ...

    # Pin, evict, reset

    def pinned_keys(self) -> set[bytes]:
        """Keys of records that are never evicted."""
        ...

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let records be evicted again."""
        ...

    def quarantine(self, keys: Iterable[bytes]) -> None:
        """Take wrong records, and all that continues them, out of every tier."""
        ...

    def clear(self) -> None:
        """Drop all records of the model in every tier."""
        ...

    # Size and checks

    def inspect(self) -> StoreContents:
        """The contents of host memory."""
        ...

    def everything(self) -> list[Stored]:
        """All records under the roots that this store knows, in any tier."""
        ...

    def check_consistency(self) -> None:
        """Raise AssertionError if the store's books do not agree with each other."""
        ...
