"""Base of tiers that may fail at any time: a failure is a miss, and what failed is left alone for a while."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvboost_hf.cache.tiers.base import Entry
from kvboost_hf.cache.tiers.failures import Guard, secrets_in, without_secrets

MAX_ALIKE = 256  # of what begins alike, so many are looked at
_BATCH = 256  # entries that are asked for at once


class RemoteTier(ABC):
    """A `Tier` of methods that may fail, each behind a `Guard`.

    Args:
        name: The name of the tier in reports and errors.
        url: Where it is.
        max_bytes: Budget, or None.
        cooldown_s: Seconds that it is left alone for after a failure, twice as many after each further one, up to 30.

    Raises:
        ValueError: for a budget or a cool-down that is not positive.
    """

    def __init__(self, name: str, url: str, max_bytes: int | None, cooldown_s: float) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(f"`max_bytes` must be a positive number of bytes, got {max_bytes}. None sets no limit.")
        self.name, self.location, self.max_bytes = name, without_secrets(url), max_bytes
        self._guard = Guard(f"The tier at {self.location}", secrets=secrets_in(url), cooldown_s=cooldown_s)
        self._counted = (0, 0)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        return self._guard.call({}, self._find, keys) if keys else {}

    def find_alike(self, heads: Sequence[bytes]) -> list[Entry]:
        return self._guard.call([], self._find_alike, heads) if heads else []

    def entries(self, root: bytes | None = None) -> Iterator[Entry]:
        keys = self._guard.call([], self._keys, root)
        for at in range(0, len(keys), _BATCH):
            yield from self.find(keys[at : at + _BATCH]).values()

    def read(self, key: bytes) -> memoryview | None:
        return self._guard.call(None, self._read, key)

    def write(self, entry: Entry, blob: Sequence[bytes | memoryview]) -> bool:
        parts = [memoryview(part).cast("B") for part in blob]
        assert sum(map(len, parts)) == entry.nbytes, "an entry tells the size of its blob"
        if self.max_bytes is not None and entry.nbytes > self.max_bytes:
            return False
        return self._guard.call(False, self._write, entry, parts)

    def touch(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._guard.call(None, self._touch, keys)

    def delete(self, keys: Iterable[bytes]) -> None:
        every = list(keys)
        for at in range(0, len(every), _BATCH):
            self._guard.call(None, self._delete, every[at : at + _BATCH])

    def clear(self, model: bytes) -> None:
        self.delete([entry.key for entry in self.entries() if entry.model == model])

    def stats(self) -> Mapping[str, int | float | str]:
        """`chunks` and `bytes` are those last heard of while `state` is `"down"`."""
        self._counted = self._guard.call(self._counted, self._count)
        chunks, nbytes = self._counted
        known: dict[str, int | float | str] = {
            "chunks": chunks,
            "bytes": nbytes,
            "errors": self._guard.errors,
            "state": self._guard.state,
        }
        return known if self.max_bytes is None else {**known, "max_bytes": self.max_bytes}

    def hits(self) -> Mapping[bytes, int]:
        return {}

    @abstractmethod
    def close(self) -> None:
        """See `Tier.close`."""

    @abstractmethod
    def _find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]: ...

    @abstractmethod
    def _find_alike(self, heads: Sequence[bytes]) -> list[Entry]: ...

    @abstractmethod
    def _keys(self, root: bytes | None) -> list[bytes]:
        """Keys of `entries(root)`; some of them may be gone."""

    @abstractmethod
    def _read(self, key: bytes) -> memoryview | None: ...

    @abstractmethod
    def _write(self, entry: Entry, blob: Sequence[memoryview]) -> bool: ...

    @abstractmethod
    def _touch(self, keys: Sequence[bytes]) -> None: ...

    @abstractmethod
    def _delete(self, keys: Sequence[bytes]) -> None: ...

    @abstractmethod
    def _count(self) -> tuple[int, int]:
        """Number of blobs, and their bytes."""
