"""The arms of the benchmark: ways in which this package serves prompts.

A new arm is a line in `ARMS`, and its name in `choices`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvboost_hf.assisted.load import load_assistant
from kvboost_hf.assisted.lookup import lookup_assistant
from kvboost_hf.bench.models import Models
from kvboost_hf.bench.served import Served, served
from kvboost_hf.cache.planning.chunks import ContentChunker
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.choices import BENCH_ARMS
from kvboost_hf.compat import cache_argument
from kvboost_hf.config import Repair, ReusePolicy

_MEMORY, _DISK = "ram:1GB", "4GB"

_EXACT = ReusePolicy()
# For the embedded model: the default repair may compute two layers in full, which are half of those that it has.
FIRST_K = ReusePolicy(mode="blend", repair="first_k", recompute_ratio=0.2, progressive=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of serving prompts."""

    name: str  # the arm's name in `--arms`
    policy: ReusePolicy | None = _EXACT  # how stored K/V may be used; None for plain generate()
    codec: str = "raw"  # how K/V is stored
    attention: str | None = None  # attention implementation; None for the default one
    streamed: bool = False  # whether layers are streamed
    drafts: Literal["model", "lookup"] | None = None  # what proposes tokens
    # Whether one cache serves all prompts; if not, each gets a new one on the same store, as in a server.
    kept: bool = False
    keep_logits: bool = False  # whether answers have their logits, to be compared with plain ones

    @property
    def lossless(self) -> bool:
        """Whether its answers must be those of plain generate() in float32."""
        return self.codec == "raw" and (self.policy is None or self.policy.mode == "exact")

    def refusal(self, models: Models, tokenizer: Any) -> str | None:
        """Why it cannot serve this model here, or None."""
        if self.drafts == "model" and models.source.draft_name is None:
            return "no draft model: name one with --draft"
        return None

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> "OurServer":
        """A server that keeps nothing yet but what is in the folder.

        Args:
            models: Where its model is.
            tokenizer: Tells where documents may be cut.
            folder: Where to keep K/V on disk; None for host memory only.
        """
        return OurServer(self, models, tokenizer, folder)


def _tier_in(folder: Path) -> str:
    """The address of a tier that keeps K/V in a folder."""
    return folder.as_uri() if sys.platform == "win32" else f"disk:{folder}:{_DISK}"


def _once(repair: Repair) -> ReusePolicy:
    """Moved chunks with this repair, which ends with the first token."""
    return ReusePolicy(mode="blend", repair=repair, progressive=False)


PLAIN = Arm(name="plain", policy=None)
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        PLAIN,
        Arm(name="exact", kept=True),
        Arm(name="exact-store"),
        Arm(name="blend", policy=ReusePolicy(mode="blend")),
        Arm(name="blend-query", policy=_once("query")),
        Arm(name="blend-cacheblend", policy=_once("cacheblend")),
        Arm(name="blend-first_k", policy=FIRST_K),
        Arm(name="blend-selective", policy=_once("selective")),
        Arm(name="blend-none", policy=_once("none")),
        Arm(name="int8", codec="int8"),
        Arm(name="int4", codec="int4"),
        Arm(name="int2", codec="int2"),
        Arm(name="turboquant", codec="turboquant"),
        Arm(name="kvboost_fa2", attention="kvboost_fa2"),
        Arm(name="streamed", streamed=True),
        Arm(name="draft", drafts="model"),
        Arm(name="lookup", drafts="lookup"),
        Arm(name="all", policy=FIRST_K, codec="int8", attention="kvboost_fa2", streamed=True, drafts="model"),
    )
}
assert tuple(ARMS) == BENCH_ARMS, "flags take the names in choices"


class OurServer:
    """Serves prompts as an `Arm` says."""

    def __init__(self, arm: Arm, models: Models, tokenizer: Any, folder: Path | None) -> None:
        self._model, self._count = models.get(arm.attention, streamed=arm.streamed)
        self._arm = arm
        self._cache: ChunkReuseCache | None = None
        self._kwargs: dict[str, Any] = {}
        self.store: ChunkStore | None = None
        if arm.policy is not None:
            self.store = ChunkStore(
                self._model,
                chunker=ContentChunker.for_tokenizer(tokenizer) if arm.policy.mode == "blend" else None,
                codec=arm.codec,
                tiers=[_MEMORY, *([_tier_in(folder)] if folder is not None else [])],
            )
        if arm.drafts == "model":
            # The adaptive schedule goes by the clock: no two runs would forward as many tokens.
            draft = models.source.load_draft(self._model)
            self._kwargs["assistant_model"] = load_assistant(draft, target=self._model, schedule="constant")
        elif arm.drafts == "lookup":
            assert self.store is not None, "what is looked up is in the store"
            self._kwargs["assistant_model"] = lookup_assistant(self._model, self.store)

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:
        found = served(
            self._model, self._count, ids, max_new_tokens, self._arguments, keep_logits=self._arm.keep_logits
        )
        if self.store is None or self._cache is None:
            return replace(found, reused=0, store_bytes=0)
        kept = sum(tier["bytes"] for tier in self.store.stats()["tiers"].values())
        report = self._cache.report
        return replace(
            found,
            reused=report.reused_tokens,
            moved=report.moved_tokens,
            recomputed=report.recomputed_tokens,
            store_bytes=kept,
            bypassed=report.bypass_reason,
        )

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def _arguments(self) -> dict[str, Any]:
        if self.store is None:
            return self._kwargs
        arm = self._arm
        if self._cache is None or not arm.kept:
            # Decoding in a graph is left out: it would not begin, for the hooks that count.
            self._cache = ChunkReuseCache(self._model, self.store, arm.policy, max_cache_len=None)
        return {cache_argument(self._model): self._cache, **self._kwargs}
