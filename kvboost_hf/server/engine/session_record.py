"""`SessionRecord`: what the engine remembers of the requests that belong together."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvboost_hf.cache.planning.chunks import Chunker, Tokens, digest
from kvboost_hf.cache.store.removal import Belongings, Heads
from kvboost_hf.server.jobs import Job, Keep

_MOST_PIECES = 256  # whose keys are remembered
_ID_BYTES = 12


@dataclass(slots=True, eq=False)
class SessionRecord:
    """A session.

    Args:
        id: Its name, or a hash of its first chunk.
        client: Whose it is.
        named: Whether the client has named it. Then it has a salt of its own, and with it all K/V under some roots.
        first_seen: When its first request ran.
        last_used: When its last request ran.
        keep: What to pin of each of its prompts, as was asked afterwards.
        priority: Of its pins, as was asked afterwards; None for that of each job.
        roots: Where its K/V begins.
    """

    id: str
    client: bytes
    named: bool
    first_seen: float
    last_used: float
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    keep: Keep | None = None
    priority: int | None = None
    roots: set[bytes] = field(default_factory=set)
    _head: Tokens | None = None
    _pieces: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    _has_more_pieces: bool = False

    def note_text(self, root: bytes, ids: Sequence[int], chunker: Chunker, pieces: frozenset[bytes]) -> None:
        """Note that K/V of a text has been stored.

        Args:
            root: Where it begins.
            ids: Its prompt.
            chunker: Cuts it.
            pieces: Keys of what was stored of it to be found by content.
        """
        self.roots.add(root)
        if self.named:
            return
        if self._head is None:
            self._head = first_chunk(ids, chunker).copy()
        self._pieces |= dict.fromkeys(pieces, root)
        while len(self._pieces) > _MOST_PIECES:
            self._pieces.popitem(last=False)
            self._has_more_pieces = True

    def add_to(self, heads: Heads) -> None:
        """Add how its prompts begin."""
        if self._head is not None:
            for root in self.roots:
                heads.add(root, self._head, self.id)

    @property
    def belongings(self) -> Belongings:
        """The part of the store that belongs to the session."""
        roots = frozenset(self.roots if self.named else ())
        return Belongings(self.id, roots, dict(self._pieces), self._has_more_pieces)


def first_chunk(ids: Sequence[int], chunker: Chunker) -> Tokens:
    """The tokens of the first chunk of a prompt; all of them, where it is too short to tell where that ends."""
    tokens = np.asarray(ids, dtype=np.int64)
    return tokens[: chunker.next_cut(tokens, 0)]


def session_id(job: Job, chunker: Chunker) -> str:
    """The name of a job's session, or a hash of its first chunk that says nothing to those without its salt."""
    if job.session is not None:
        return job.session
    return digest(b"session", job.salt, first_chunk(job.ids, chunker).tobytes(), size=_ID_BYTES).hex()
