"""The store's memory of what it no longer holds, and of whose roots are whose: what explains a miss."""

from collections import OrderedDict
from typing import TypeVar

from kvboost_hf.cache.kv.records import Stored, StoredChunk, head_key
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.plan import HEAD_TOKENS

_REMEMBERED = 65_536  # keys

K = TypeVar("K")
V = TypeVar("V")


def remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    """Enter the newest of a bounded number of keys."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)


class History:
    """Salts of roots, keys that were evicted, and beginnings of prompts; as far as they are remembered."""

    def __init__(self) -> None:
        self._salts: OrderedDict[bytes, bytes] = OrderedDict()  # by root
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # keys
        self._first_heads: OrderedDict[bytes, bytes] = OrderedDict()  # salt and first tokens -> root last stored under

    def clear(self) -> None:
        """Forget keys and beginnings."""
        self._evicted.clear()
        self._first_heads.clear()

    def note_root(self, root: bytes, salt: bytes) -> None:
        """Remember the salt behind a root."""
        remember(self._salts, root, salt)

    def salt_of(self, root: bytes) -> bytes | None:
        """The salt behind a root."""
        return self._salts.get(root)

    def note_stored(self, chunk: StoredChunk) -> None:
        """Remember how a prompt begins, and that a chunk is here."""
        self._evicted.pop(chunk.key, None)
        if not chunk.content_only and chunk.parent == chunk.root:
            remember(self._first_heads, self._first_head(chunk.root, chunk.tokens), chunk.root)

    def known_under_other_root(self, root: bytes, tokens: Tokens) -> bool:
        """Whether a prompt with this beginning was stored, under the same salt, for the model as it was before."""
        known = self._first_heads.get(self._first_head(root, tokens))
        return known is not None and known != root

    def _first_head(self, root: bytes, tokens: Tokens) -> bytes:
        return head_key(self._salts.get(root, b""), tokens[:HEAD_TOKENS])

    def note_evicted(self, stored: Stored) -> None:
        """Remember that a record had to make room."""
        remember(self._evicted, stored.key, None)

    def was_evicted(self, key: bytes | None) -> bool:
        """Whether a record under this key had to make room."""
        return key in self._evicted
