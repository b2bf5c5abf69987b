"""Remembers the past of a store: evicted keys, salts of roots, what storing has paid, and audits."""

from collections import OrderedDict
from typing import TypeVar

from kvboost_hf import forks
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


# Storing so many tokens, or what takes as long as computing so many, tells whether it pays.
_STORED_AT_LEAST, _COMPUTED_AT_LEAST = 65_536, 4_096


class Payback:
    """Counts what was stored against what served prompts.

    Args:
        pays_for: How many tokens take as long to store as one takes to compute; None stores all that comes.
    """

    def __init__(self, pays_for: int | None) -> None:
        self._pays_for = pays_for
        self.clear()

    def clear(self) -> None:
        """Start over."""
        self._unpaid = 0  # tokens stored, less those that serving prompts has paid for
        self._unseen: OrderedDict[bytes, None] = OrderedDict()  # keys of what was not stored when it came first

    def admits(self, key: bytes) -> bool:
        """Whether a new chunk is to be stored: where storing has not paid, one that comes again."""
        if self._pays_for is None or self._unpaid < max(_STORED_AT_LEAST, _COMPUTED_AT_LEAST * self._pays_for):
            return True
        if key in self._unseen:
            del self._unseen[key]
            return True
        remember(self._unseen, key, None)
        return False

    def note_stored(self, tokens: int) -> None:
        """So many tokens were stored that nobody asked to store."""
        self._unpaid += tokens

    def note_served(self, tokens: int) -> None:
        """So many tokens served a prompt, which pays for what was stored before."""
        if self._pays_for is not None:
            self._unpaid = max(0, self._unpaid - self._pays_for * tokens)


class Audits:
    """Spreads audits evenly over reused prompts, and counts them. Safe for threads."""

    def __init__(self) -> None:
        self.count = self.divergences = 0
        self._lock = forks.lock()
        self._debt = 0.0

    def is_due(self, rate: float) -> bool:
        """Whether one more reused prompt brings the share of audited ones up to `rate`."""
        with self._lock:
            self._debt += rate
            due = self._debt >= 1 - 1e-9
            self._debt -= due
        return due

    def record(self, *, diverged: bool) -> None:
        """Count an audit."""
        with self._lock:
            self.count += 1
            self.divergences += diverged
