"""The hook that `ChunkStore.warm` calls: computing K/V takes caches, which are built on the store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.config import KVQuantConfig, ReusePolicy

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
