"""`kvboost.chunk_registry`: cuts prompts into chunks, by the chunkers of stores."""

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import numpy as np

from kvboost_hf.cache.planning.chunks import ContentChunker, FixedChunker
from kvboost_hf.fields import require_int
from kvboost_hf.old_names import refuse

__all__ = ["ChunkRegistry", "ChunkStrategy"]


class ChunkStrategy(Enum):
    """Where prompts are cut: at multiples of a length, by content, or not at all."""

    FIXED = "fixed"
    SEMANTIC = "semantic"
    DOCUMENT = "document"


class ChunkRegistry:
    """Cuts prompts into chunks of `chunk_size` tokens at most; a rest of fewer than `min_chunk_tokens` is no chunk."""

    def __init__(
        self,
        chunk_size: int = 128,
        strategy: ChunkStrategy = ChunkStrategy.FIXED,
        min_chunk_tokens: int = 32,
        boundary_window: int | None = None,
    ) -> None:
        if boundary_window is not None:
            refuse("arguments of parts", ["ChunkRegistry: boundary_window"])
        require_int("min_chunk_tokens", min_chunk_tokens, least=0)
        self.chunk_size, self.strategy, self.min_chunk_tokens = chunk_size, ChunkStrategy(strategy), min_chunk_tokens
        by_content = self.strategy is ChunkStrategy.SEMANTIC
        self._chunker = ContentChunker(chunk_size) if by_content else FixedChunker(chunk_size)

    def split(self, text: str, token_ids: Sequence[int]) -> list[tuple[int, int, list[int]]]:
        """Cut a prompt: for each chunk its first token, the one behind its last, and its tokens. No text is read."""
        tokens, cuts = np.asarray(token_ids, dtype=np.int64), [0]
        while self.strategy is not ChunkStrategy.DOCUMENT:
            cut = self._chunker.next_cut(tokens, cuts[-1])
            if cut is None:
                break
            cuts.append(cut)
        if len(tokens) - cuts[-1] >= self.min_chunk_tokens:
            cuts.append(len(tokens))
        return [(a, b, tokens[a:b].tolist()) for a, b in pairwise(cuts)]
