"""Cuts token sequences into chunks, and derives the keys that chunks are found under.

A chunk is a half-open interval [start, stop) of at most `chunk_size` tokens. It is found in two ways:

- by its *prefix key*, chained over all chunks before it: equal keys mean equal tokens, positions and history;
- by its *content*, its tokens alone, at any position. A chunk whose K/V was computed alone, or behind moved K/V, is
  found only in this way.

All keys start from a root, which contains the model's fingerprint and the caller's salt, so that another model,
adapter or tenant never matches. Keys are BLAKE2b digests; the tokens of a chunk found by key are compared before it is
used, so that a collision cannot match.
"""

from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

KEY_BYTES = 20


def digest(*parts: bytes, size: int = KEY_BYTES) -> bytes:
    """One BLAKE2b digest of several byte strings, each with its length before it."""
    found = blake2b(digest_size=size)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def root_key(fingerprint: bytes, salt: bytes, regime: bytes = b"") -> bytes:
    """The key before the first chunk: all that K/V depends on besides tokens, and the caller's salt."""
    return digest(b"root", fingerprint, salt, regime)


def prefix_key(parent: bytes, tokens: Tokens) -> bytes:
    """The key of a chunk with this history: `parent` is the prefix key of the chunk before, or the root."""
    return digest(parent, tokens.tobytes())


def states_key(parent: bytes, tokens: Tokens) -> bytes:
    """The key of the states after `tokens`, which follow the chunk border with prefix key `parent`."""
    return digest(b"states", parent, tokens.tobytes())


def content_only_key(root: bytes, parent: bytes, start: int, tokens: Tokens) -> bytes:
    """The key of a chunk that is found by its content only.

    Args:
        root: The root of its model and salt.
        parent: Key of the chunk that it was computed directly behind, of either kind, or bytes that name its history.
        start: How many tokens were before it.
        tokens: Its tokens.
    """
    return digest(b"content only", root, parent, start.to_bytes(8, "little"), tokens.tobytes())


def common_length(a: Tokens, b: Tokens) -> int:
    """How many leading tokens `a` and `b` share."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


class Chunker(Protocol):
    """Where a token sequence is cut. Cuts may depend on the tokens after the last cut, never on what is stored."""

    chunk_size: int  # no chunk is longer

    def next_cut(self, tokens: Tokens, start: int) -> int | None:
        """The end of the chunk that starts at `start`, or None while `tokens` is too short to tell."""
        ...


class FixedChunker:
    """Cuts at every multiple of `chunk_size` tokens.

    Args:
        chunk_size: Tokens per chunk, a positive multiple of 16.

    Raises:
        ValueError: for any other `chunk_size`.
    """

    def __init__(self, chunk_size: int = 128) -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size <= 0 or chunk_size % 16:
            raise ValueError(f"`chunk_size` must be a positive multiple of 16 tokens, got {chunk_size!r}.")
        self.chunk_size = chunk_size

    def next_cut(self, tokens: Tokens, start: int) -> int | None:
        """See `Chunker.next_cut`."""
        stop = start + self.chunk_size
        return stop if stop <= len(tokens) else None
