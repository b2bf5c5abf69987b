"""The settings of a store: checks of those that it is made with, and the settings of `ChunkStore.warm`.

Computing K/V ahead takes caches, which are built on the store: what does it registers itself here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.codecs.base import Codec
from kvboost_hf.cache.planning.chunks import Chunker, FixedChunker, Tokens
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.compat import bytes_per_token, known_reason
from kvboost_hf.config import KVQuantConfig, ReusePolicy, require_size


def salt_bytes(salt: str | bytes) -> bytes:
    """A salt as bytes.

    Raises:
        ValueError: if it is neither text nor bytes.
    """
    if isinstance(salt, str):
        return salt.encode()
    if isinstance(salt, bytes):
        return salt
    raise ValueError(f"`salt` must be str or bytes, got {type(salt).__name__}.")


def checked_chunker(chunker: Chunker | None, chunk_size: int | None) -> Chunker:
    """The chunker of a store.

    Raises:
        ValueError: for a bad `chunk_size`, or another one than the chunker's.
    """
    if chunker is None:
        return FixedChunker(128 if chunk_size is None else chunk_size)
    if chunk_size not in (None, chunker.chunk_size):
        raise ValueError(
            f"`chunk_size` must be left out beside a `chunker`, or be its {chunker.chunk_size}, got {chunk_size!r}."
        )
    return chunker


def chunk_bytes(model: PreTrainedModel, chunk_size: int, codec: Codec) -> int:
    """The least that a chunk takes; 0 where nothing will be stored, and the configuration may have other names."""
    if known_reason(model) is not None:
        return 0
    per_token = bytes_per_token(model) if codec.lossless else 0  # of codes: less, and not worth a second formula
    return (per_token + np.dtype(np.int64).itemsize) * chunk_size


def checked_budget(model: PreTrainedModel, max_bytes: int | str | None, least: int, chunk_size: int) -> int | None:
    """The budget of host memory; None where none is given.

    Raises:
        ValueError: for no size, or less than `least` bytes.
    """
    ram = None if max_bytes is None else require_size("max_bytes", max_bytes, least=1)
    if ram is not None and ram < least:
        raise ValueError(
            f"`max_bytes` must hold at least one chunk, which is {least} bytes ({chunk_size} tokens "
            f"of {bytes_per_token(model)} bytes of K/V), got {ram}. Raise it, or lower `chunk_size`."
        )
    return ram


def checked_share(state_share: float) -> float:
    """The share of the budget that states may take.

    Raises:
        ValueError: for anything but a number from 0 to 1.
    """
    if isinstance(state_share, bool) or not isinstance(state_share, int | float) or not 0 <= state_share <= 1:
        raise ValueError(
            f"`state_share` must be a number from 0 to 1, got {state_share!r}. Leave it out for 0.5, or pass 0 to "
            "keep no states but those that are pinned."
        )
    return float(state_share)


class Uncut:
    """A chunker that cuts nothing."""

    chunk_size = 2**31

    def next_cut(self, tokens: Tokens, start: int) -> int | None:
        """None: there is no cut."""
        return None


Texts = str | Sequence[int] | torch.Tensor  # a text, or its token ids
Starts = Texts | Sequence[Mapping[str, Any]]  # or the first messages of chats


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """The keyword arguments of `ChunkStore.warm`."""

    tokenizer: Any
    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    pin: bool
    policy: ReusePolicy | None
    salt: bytes
    progress: Callable[[int, int], None] | None  # given the tokens that are done, and all of them
    live_quant: KVQuantConfig | None


Warmer = Callable[..., ReuseReport]  # of a model, its store, texts, documents, their prefix, and settings
_warmers: list[Warmer] = []


def register_warmer(warmer: Warmer) -> None:
    """Set the function that computes K/V ahead."""
    _warmers[:] = [warmer]


def warmer() -> Warmer:
    """The function that computes K/V ahead."""
    assert _warmers, "kvboost_hf.cache.warm registers itself when it is imported"
    return _warmers[0]
