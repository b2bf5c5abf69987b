"""The protocol of storage tiers below host memory: keep blobs, and find them by key or by how they begin.

A tier knows nothing of models and tensors. It keeps blobs (see `record.py`), each with an `Entry` that says what it is
found by. Whatever goes wrong in it (a full disk, a server that is gone, a file that was cut short) is logged, and
looks like a miss: no method but the constructor raises.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from kvboost_hf.cache.planning.chunks import Tokens


class Kind(Enum):
    """Kind of K/V in a blob."""

    CHUNK = "chunk"  # K/V that is found by prefix key, and by content
    CONTENT = "content"  # K/V that is found by content only
    STATES = "states"  # of linear attention, after some token


@dataclass(frozen=True, slots=True)
class MadeWith:
    """What K/V was computed and kept with, besides the model, its weights and a salt.

    Args:
        codec: Name of the codec of the store.
        regime: Names the rotary frequencies and the codes of the live cache that it was computed with.
        attention: The attention implementation of the model.
        versions: Those of PyTorch and transformers.
    """

    codec: str
    regime: str
    attention: str
    versions: str


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Index entry of a blob: enough to plan with, without reading the blob.

    Args:
        key: The key of the entry, which no other entry has.
        kind: What the blob holds.
        model: Names the model that it is of: its configuration and shapes, not its weights.
        root: The root that its history begins at.
        parent: Key of the chunk that it was computed behind, or the root.
        head: What it shares with all that begin alike behind the same `parent`; empty for `Kind.CONTENT`.
        start: Row token of its first token, when it was stored.
        tokens: The tokens of the chunk; int64.
        nbytes: Bytes of the blob.
        made_with: What it was made with. Told by blobs and not by every index; None where it is not known.
    """

    key: bytes
    kind: Kind
    model: bytes
    root: bytes
    parent: bytes
    head: bytes
    start: int
    tokens: Tokens
    nbytes: int
    made_with: MadeWith | None = None


@runtime_checkable
class Tier(Protocol):
    """A place to keep blobs. Safe to use from several threads; several processes may share what is behind it.

    Attributes:
        name: A short word for reports and `stats()`, such as `"disk"`.
        location: Where it is, for people; without secrets.
    """

    name: str
    location: str

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """Which of `keys` are kept, all in one round trip."""
        ...

    def find_alike(self, heads: Sequence[bytes]) -> list[Entry]:
        """Entries with one of these `Entry.head`; newest first, no more than 256 of each."""
        ...

    def entries(self, root: bytes | None = None) -> Iterator[Entry]:
        """All that is kept, or what is kept under one root."""
        ...

    def read(self, key: bytes) -> memoryview | None:
        """The blob, or None if it is not there (any more). It stays readable whatever happens to the tier.

        It may be damaged: whoever reads it checks its checksums.
        """
        ...

    def write(self, entry: Entry, blob: Sequence[bytes | memoryview]) -> bool:
        """Keep a blob, given in parts to be joined; tells whether it is kept now. One that is there stays as it is.

        Others are given up for it where there is a budget: those that were not used for longest, what continues a
        chunk before the chunk itself.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """These have been used just now."""
        ...

    def delete(self, keys: Iterable[bytes]) -> None:
        """Give these up."""
        ...

    def clear(self, model: bytes) -> None:
        """Give up all that is kept of one model (`Entry.model`)."""
        ...

    def stats(self) -> Mapping[str, int | float | str]:
        """At least `chunks` and `bytes`, and `max_bytes` where there is a budget; `errors` counts what went wrong."""
        ...

    def hits(self) -> Mapping[bytes, int]:
        """Number of touches of each key, where that is known."""
        ...

    def close(self) -> None:
        """Let go of files, connections and threads. Nothing is given up."""
        ...
