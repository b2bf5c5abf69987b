"""`SessionRecord`: what the engine remembers of the requests that belong together. No text, and no tokens."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvboost_hf.cache.planning.chunks import Chunker, Tokens, digest, prefix_key, states_key
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.store.removal import Belongings
from kvboost_hf.server.jobs import Job, Keep

_MOST_FIRSTS = 256  # first chunks, of which a session has several only where its prompts are shorter than one
_MOST_PIECES = 4096
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
    _roots: set[bytes] = field(default_factory=set)
    _firsts: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)  # key -> root
    _pieces: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)

    def note_text(self, root: bytes, ids: Sequence[int], chunker: Chunker, pieces: frozenset[bytes]) -> None:
        """Note that K/V of a text has been stored.

        Args:
            root: Where it begins.
            ids: All of it.
            chunker: Cuts it.
            pieces: Keys of what was stored of it to be found by content.
        """
        if self.named:
            self._roots.add(root)
            return
        first, whole = first_chunk(ids, chunker)
        if len(first) >= HEAD_TOKENS:
            self._firsts[prefix_key(root, first)] = root
            if not whole:
                self._firsts[states_key(root, first)] = root
        self._pieces |= dict.fromkeys(pieces, root)
        for keys, most in ((self._firsts, _MOST_FIRSTS), (self._pieces, _MOST_PIECES)):
            while len(keys) > most:
                keys.popitem(last=False)

    def belongings(self, others: Sequence["SessionRecord"]) -> Belongings:
        """What of the store is its own, and of none of some others."""
        shared = {key for other in others if other is not self for key in other._firsts}
        firsts = {key: root for key, root in self._firsts.items() if key not in shared}
        return Belongings(frozenset(self._roots), firsts, dict(self._pieces))


def first_chunk(ids: Sequence[int], chunker: Chunker) -> tuple[Tokens, bool]:
    """The tokens of the first chunk of a text, and whether the text is long enough to tell where it ends."""
    tokens = np.asarray(ids, dtype=np.int64)
    cut = chunker.next_cut(tokens, 0)
    return tokens[:cut], cut is not None


def session_id(job: Job, chunker: Chunker) -> str:
    """The name of a job's session, or a hash of its first chunk that says nothing to those without its salt."""
    if job.session is not None:
        return job.session
    first, _ = first_chunk(job.ids, chunker)
    return digest(b"session", job.salt, first.tobytes(), size=_ID_BYTES).hex()
