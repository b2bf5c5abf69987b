"""A store that keeps nothing."""

from kvboost_hf.cache.store.chunk_store import ChunkStore


class NothingKept(ChunkStore):
    """Gives caches nothing and takes nothing, so that they compute every prompt."""

    def root(self, salt: bytes, regime: bytes = b"", *, read_all: bool = False) -> None:
        """No key: there is nothing that chains could start from."""
